"""Other engines on the same prompts: scripts of a directory, each run a process of its own.

A script takes --model --prompts --method --k --new-tokens --batch --threads --dtype --temperature and prints,
among whatever else, a line that is a JSON object with `engine`, `tokens` and `tok_s`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_SECONDS = 1800.0
"""Of one run, loading and compiling included."""
_HF = "transformers", "run_hf.py", ("none", "lookup")
_VLLM = "vllm", "run_vllm.py", ("none", "ngram")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine with one of its methods. `python`: the interpreter that has the engine."""

    engine: str
    method: str
    script: Path
    python: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.method}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all peers are run with. threads: of the whole system. prompts: a file of JSON lines."""

    model: str
    prompts: Path
    k: int
    new_tokens: int
    batch: int
    threads: int
    dtype: str
    temperature: float

    def options(self) -> list[str]:
        given = {
            "model": self.model,
            "prompts": self.prompts,
            "k": self.k,
            "new-tokens": self.new_tokens,
            "batch": self.batch,
            "threads": self.threads,
            "dtype": _DTYPES[self.dtype],
            "temperature": self.temperature,
        }
        return [part for name, value in given.items() for part in (f"--{name}", str(value))]


@dataclass(frozen=True, slots=True)
class PeerRun:
    """What one run came to; `error` instead of figures if it failed."""

    engine: str
    tok_s: float = 0.0
    tokens: int = 0
    error: str | None = None


def find_peers(directory: Path, python: str | None) -> list[Peer]:
    """transformers by this interpreter, and vLLM by `python` if it is given. Raises InvalidConfig."""
    own = [(_HF, sys.executable)]
    if python is not None:
        if (found := shutil.which(python)) is None:
            raise InvalidConfig(
                "peer_python", f"peer-python {python} is no program; try the bin/python that has vllm"
            )
        own.append((_VLLM, found))
    for (_, script, _), _ in own:
        if not (directory / script).is_file():
            raise InvalidConfig("peers", f"peers {directory} has no {script}; try a directory that has it")
    return [
        Peer(engine, method, directory / script, interpreter)
        for (engine, script, methods), interpreter in own
        for method in methods
    ]


def run_peer(peer: Peer, terms: Terms, seconds: float = _SECONDS) -> PeerRun:
    """Never raises for what the peer does. All that it started is ended with it."""
    command = [peer.python, str(peer.script), "--method", peer.method, *terms.options()]
    environment = dict(os.environ)
    if peer.python != sys.executable:
        environment.pop("PYTHONPATH", None)  # meant for this interpreter
    # Files, since a pipe would stay open for as long as any process that the peer left behind.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            status = _run(command, environment, out, err, seconds)
        except OSError as error:
            return PeerRun(peer.engine, error=f"{peer.python}: {error.strerror}")
        lines, complaints = _lines(out), _lines(err)
    said = complaints[-1] if complaints else None
    if status is None:
        return PeerRun(peer.engine, error=f"no result within {seconds:g} seconds")
    if status != 0:
        return PeerRun(peer.engine, error=said or f"ended with status {status}")
    return _result(peer, lines) or PeerRun(peer.engine, error=said or "printed no JSON object with tok_s")


def peer_row(peer: Peer, runs: Sequence[PeerRun], terms: Terms, off: float | None) -> dict[str, Any]:
    """`off`: tokens per second of our own mode off, for the speedup."""
    row = {
        "mode": None,
        "engine": runs[-1].engine,
        "method": peer.method,
        "batch": terms.batch,
        "threads": terms.threads,
    }
    failed = next((run.error for run in runs if run.error is not None), None)
    if failed is not None:
        return row | {"tok_s": None, "speedup": None, "error": failed}
    speed = statistics.median(run.tok_s for run in runs)
    return row | {
        "tok_s": round(speed, 3),
        "speedup": round(speed / off, 4) if off is not None else None,
        "tokens": runs[-1].tokens,
        "tok_s_each": [round(run.tok_s, 3) for run in runs],
    }


def _run(
    command: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes], seconds: float
) -> int | None:
    """Its status; None if it took too long. Raises OSError if it cannot be started."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lines(file: IO[bytes]) -> list[str]:
    """Those that are not empty."""
    file.seek(0)
    return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _result(peer: Peer, lines: Sequence[str]) -> PeerRun | None:
    """The last line that is a result."""
    for line in reversed(lines):
        try:
            found = json.loads(line)
            speed, tokens = float(found["tok_s"]), int(found["tokens"])
        except (ValueError, LookupError, TypeError):
            continue
        if speed > 0:
            return PeerRun(str(found.get("engine", peer.engine)), speed, tokens)
    return None
