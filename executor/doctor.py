"""What this machine offers to the lanes, and what to change where that is too little.

`gather` looks; `judge` decides, and is pure. Nothing is started but `nvidia-smi` and a Python that imports
torch, each with a deadline.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import psutil

from executor.config import available_cores
from executor.rundir import bases
from executor.sizes import size
from ipc.arena import Arena, Importer
from ipc.errors import ArenaError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TORCH_SECONDS = 120.0
_SMI_SECONDS = 20.0
_SMI_FIELDS = "name,uuid,compute_mode,memory.total,mig.mode.current"
_SOCKET_PATH_MAX = 107
_SOCKET_NAME_LENGTH = 40
"""What an executor's directory and socket add to the base, at most."""
_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""

Level = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """`advice`: what to change; empty if all is well."""

    subject: str
    level: Level
    found: str
    advice: str = ""


class Gpu(NamedTuple):
    name: str
    uuid: str
    compute_mode: str
    memory: str
    mig: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Sizes in bytes. `torch`: version, cuda, gpus; or `error`. `gpus`: as the driver names them, None if
    there is no driver. `mps`: where its daemon listens, if one does."""

    cores: int
    flags: frozenset[str]
    memory: int
    shm: int
    descriptors: int
    pidfd: bool
    runtime: str
    runtime_writable: bool
    cache: str
    cache_free: int
    torch: dict[str, Any] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] | None = None
    mps: str | None = None
    wsl: bool = False
    memfd: str = ""
    """Why lanes cannot share memory of the host; empty if that was tried and works."""
    cuda_bindings: bool = True
    visible_devices: str | None = None


def judge(machine: Machine) -> list[Finding]:
    return [*_host(machine), *_torch(machine), *_gpus(machine)]


# ---------------------------------------------------------------- pure


def _host(machine: Machine) -> Iterator[Finding]:
    yield _enough("cores", machine.cores, 2, str(machine.cores), "two lanes share one core; give it two")
    native = {"amx_bf16", "avx512_bf16"} & machine.flags
    if native:
        yield Finding("cpu", "ok", f"bf16 arithmetic ({', '.join(sorted(native))})")
    elif "avx2" in machine.flags:
        yield Finding("cpu", "ok", "avx2; --dtype bf16 means weights of 16 bits and arithmetic in float32")
    else:
        yield Finding("cpu", "warning", "no avx2", "expect a few tokens per second; use another machine")
    yield _enough(
        *("memory", machine.memory, 1 << 30, f"{size(machine.memory)} available"),
        "SmolLM2 with a speculator wants about 1 GB; end other programs",
    )
    yield _enough(
        *("/dev/shm", machine.shm, 64 << 20, f"{size(machine.shm)} free"),
        "start the container with --shm-size=1g",
    )
    yield _enough(
        *("open files", machine.descriptors, 1024, f"limit {machine.descriptors}"),
        "raise it with `ulimit -n 4096`, or LimitNOFILE=4096 in a systemd unit",
    )
    if machine.memfd:
        yield Finding(
            *("shared memory", "warning", machine.memfd),
            "hidden rows go within messages instead; use Linux 5.1 or newer, and look at memory limits",
        )
    else:
        yield Finding("shared memory", "ok", "memfd: sealed, written and read back")
    if machine.pidfd:
        yield Finding("pidfd", "ok", "deaths of lanes are seen at once")
    else:
        yield Finding("pidfd", "error", "the kernel has no pidfd_open", "use Linux 5.3 or newer")
    yield _runtime(machine)
    yield _enough(
        *("cache", machine.cache_free, 1 << 30, f"{machine.cache}, {size(machine.cache_free)} free"),
        "name another directory with --cache-dir or $SPECLANE_CACHE",
    )


def _runtime(machine: Machine) -> Finding:
    advice = "set XDG_RUNTIME_DIR to a short directory you can write, such as /tmp"
    if not machine.runtime_writable:
        return Finding("sockets", "error", f"{machine.runtime} cannot be written", advice)
    if len(machine.runtime) + _SOCKET_NAME_LENGTH > _SOCKET_PATH_MAX:
        return Finding("sockets", "error", f"{machine.runtime} is too long for a socket's path", advice)
    return Finding("sockets", "ok", machine.runtime)


def _torch(machine: Machine) -> Iterator[Finding]:
    found = machine.torch
    if not found:
        return
    if "error" in found:
        yield Finding("torch", "error", found["error"], "run `pip install torch==2.13.0`")
        return
    build = f"CUDA {found['cuda']}" if found.get("cuda") else "CPU only"
    yield Finding("torch", "ok", f"{found['version']}, {build}")
    driver = len(machine.gpus or ())
    seen = len(found.get("gpus", ()))
    if driver and not found.get("cuda"):
        yield Finding(
            *("torch and GPUs", "error", f"{driver} GPUs, but a build of torch for CPUs"),
            "install the build for your driver, see https://pytorch.org/get-started/locally",
        )
    elif driver > seen:
        hidden = (
            f"CUDA_VISIBLE_DEVICES={machine.visible_devices}" if machine.visible_devices else "the driver"
        )
        yield Finding(
            *("torch and GPUs", "warning", f"{seen} of {driver} GPUs visible"),
            f"look at {hidden}; in a container start it with --gpus all",
        )


def _gpus(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        without = "no driver" if machine.gpus is None else "no GPU"
        yield Finding("gpu", "ok", f"{without}: lanes run on the CPU")
        return
    for i, gpu in enumerate(machine.gpus):
        yield Finding(f"gpu {i}", "ok", f"{gpu.name}, {gpu.memory}")
        if gpu.compute_mode == "Exclusive_Process" and machine.mps is None:
            yield Finding(
                *(f"gpu {i} mode", "error", "exclusive to one process, and MPS does not run"),
                "start MPS with `nvidia-cuda-mps-control -d`, or `nvidia-smi -c DEFAULT`",
            )
    yield _ipc(machine)
    if len(machine.gpus) > 1:
        yield Finding("mps", "ok", machine.mps or "not running; a GPU for each lane needs none")
    elif machine.mps is None:
        yield Finding(
            *("mps", "warning", "not running: two lanes take turns on one GPU"),
            "start it with `nvidia-cuda-mps-control -d`, and use --group one_for_all",
        )
    else:
        yield Finding(
            "mps", "ok", f"{machine.mps}; use --group one_for_all, a GPU fault ends all lanes on it"
        )


def _ipc(machine: Machine) -> Finding:
    if machine.wsl:
        return Finding("cuda ipc", "warning", "WSL has none", "hidden rows then go through host memory")
    if any(gpu.mig == "Enabled" for gpu in machine.gpus or ()):
        return Finding(
            "cuda ipc", "warning", "MIG slices have none", "they isolate; rows go through host memory"
        )
    if not machine.cuda_bindings:
        return Finding(
            *("cuda ipc", "warning", "no cuda.bindings: hidden rows go through host memory"),
            "run `pip install 'speclane[cuda]'`",
        )
    return Finding("cuda ipc", "ok", "possible; each start proves it both ways")


def _enough(subject: str, has: int, wants: int, found: str, advice: str) -> Finding:
    return Finding(subject, "ok", found) if has >= wants else Finding(subject, "warning", found, advice)


# ---------------------------------------------------------------- looks


def gather(cache: Path, *, ask_torch: bool = True) -> Machine:
    """`cache`: where checkpoints are kept. `ask_torch`: whether to import it, which takes seconds."""
    runtime = next(iter(bases()), Path("/tmp"))
    return Machine(
        cores=available_cores(),
        flags=_cpu_flags(),
        memory=psutil.virtual_memory().available,
        shm=_free(Path("/dev/shm")),
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        pidfd=_has_pidfd(),
        runtime=str(runtime),
        runtime_writable=os.access(runtime, os.W_OK | os.X_OK),
        cache=str(cache),
        cache_free=_free(cache),
        torch=_ask_torch() if ask_torch else {},
        gpus=_ask_driver(),
        mps=_mps(),
        wsl="microsoft" in _read(Path("/proc/version")).lower(),
        memfd=_try_memfd(),
        cuda_bindings=_has("cuda.bindings"),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _cpu_flags() -> frozenset[str]:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _free(path: Path) -> int:
    """Bytes left where the path is, or would be made."""
    there = next((each for each in (path, *path.absolute().parents) if each.exists()), None)
    return shutil.disk_usage(there).free if there is not None else 0


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _try_memfd() -> str:
    """As lanes do it, but for the second process."""
    try:
        arena, importer = Arena("doctor/0", "doctor", 1 << 16, "memfd"), Importer()
        importer.open(arena.export, os.dup(arena.fd))
        importer.prove("doctor/0")
        importer.close_all()
        arena.close()
    except (ArenaError, OSError) as error:
        return str(error)
    return ""


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _ask_torch() -> dict[str, Any]:
    output = _output([sys.executable, "-c", _TORCH], _TORCH_SECONDS)
    try:
        found: dict[str, Any] = json.loads(output or "")
    except ValueError:
        return {"error": "torch cannot be imported"}
    return found


def _ask_driver() -> tuple[Gpu, ...] | None:
    output = _output(["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader"], _SMI_SECONDS)
    if output is None:
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
    return tuple(Gpu(*row) for row in rows if len(row) == len(Gpu._fields))


def _mps() -> str | None:
    directory = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return str(directory) if (directory / "control").exists() else None


def _output(command: list[str], seconds: float) -> str | None:
    """What a program writes to stdout; None if it cannot be run, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
