"""What batch-invariant numerics cost the native engine, measured by a process of the workers' side."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from executor.errors import InvalidConfig, SpeclaneError
from executor.model import prepare
from executor.process import numeric_environment

if TYPE_CHECKING:
    from executor.config import Config

log = logging.getLogger("speclane")


def measure(config: Config, *, context: int, repeats: int) -> dict[str, Any]:
    """Step times after `context` tokens for 1 row and for K + 1 rows, invariant and plain.

    Raises InvalidConfig before anything is loaded, SpeclaneError if the process fails.
    """
    (spec,) = prepare(config, log.info).specs
    rows = config.num_speculative_tokens + 1
    if context + rows > spec.max_model_len:
        raise InvalidConfig(
            "context",
            f"context {context} with {rows} rows exceeds the model's {spec.max_model_len} tokens; "
            f"try {spec.max_model_len - rows}",
        )
    command = [sys.executable, "-P", "-m", "workers.bench_invariance"]
    command += ["--spec", msgspec.json.encode(spec).decode(), "--context", str(context)]
    command += ["--rows", "1", str(rows), "--repeats", str(repeats)]
    done = _run(command, spec.threads)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise SpeclaneError(f"the measurement failed: {last}")
    result: dict[str, Any] = json.loads(done.stdout)
    return {"target": config.target, "dtype": config.dtype, "threads": spec.threads} | result


def _run(command: list[str], threads: int) -> subprocess.CompletedProcess[str]:
    """Run it to its end; it ends with this process, however that ends."""
    death_fd, lifeline = os.pipe2(os.O_CLOEXEC)
    try:
        return subprocess.run(
            [*command, "--parent-pid", str(os.getpid()), "--death-fd", str(death_fd)],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            pass_fds=(death_fd,),
            env=numeric_environment(threads),
        )
    finally:
        os.close(death_fd)
        os.close(lifeline)
