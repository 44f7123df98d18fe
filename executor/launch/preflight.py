"""Whether a plan can run on this machine, and what to change where it cannot. `judge` is pure."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from executor import doctor, mps
from executor.doctor import Finding
from executor.launch.memory import estimates
from executor.placement import parse_cores
from executor.sizes import parse_size, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from executor.doctor import Machine
    from executor.launch.memory import Estimate
    from executor.launch.plan import LaunchPlan

_SOCKET_PATH_MAX = 107
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What was looked up beside the machine. `busy`: addresses that cannot be bound, with the reason;
    `cores`: that may be used; `mps_program`: where it is, or None; `root`: who starts this."""

    busy: dict[str, str]
    cores: frozenset[int]
    mps_program: str | None
    root: bool


def look(plan: LaunchPlan) -> Surroundings:
    addresses = [address for process in plan.processes for address in process.listens]
    busy = {address: why for address in addresses if (why := _refused(address))}
    return Surroundings(
        busy=busy,
        cores=frozenset(os.sched_getaffinity(0)),
        mps_program=shutil.which(mps.PROGRAM),
        root=os.geteuid() == 0,
    )


def judge(plan: LaunchPlan, machine: Machine, around: Surroundings) -> list[Finding]:
    """The machine's own findings, then those of this plan."""
    lanes = estimates(plan)
    return [
        *_general(plan, machine),
        *_gpus(plan, machine, around),
        *_addresses(plan, around),
        *_cores(plan, around),
        *_memory(plan, machine, lanes),
    ]


def _general(plan: LaunchPlan, machine: Machine) -> Iterator[Finding]:
    """The doctor's, less what it can only guess at: which GPU is for what is known here."""
    for finding in doctor.judge(machine):
        ours = finding.subject.startswith(("gpu ", "mps"))
        unused = not plan.gpus and finding.subject.startswith(("gpu", "mps", "cuda", "torch and"))
        if not (ours or unused):
            yield finding


def _gpus(plan: LaunchPlan, machine: Machine, around: Surroundings) -> Iterator[Finding]:
    found = {gpu.uuid: gpu for gpu in machine.gpus or ()}
    for gpu in plan.gpus:
        subject = f"gpu {gpu.name}"
        users = _users(plan, gpu.name)
        if gpu.uuid.startswith("MIG-"):
            yield Finding(subject, "ok", f"{gpu.uuid}, a MIG slice for {_list(users)}")
        elif gpu.uuid not in found:
            there = ", ".join(found) or "none"
            what = f"{gpu.uuid} is not" if gpu.uuid else "it is not"
            yield Finding(
                *(subject, "error", f"{what} among the driver's GPUs ({there})"),
                "change `select` to one that `nvidia-smi -L` shows, or use deploy/topologies/cpu.toml",
            )
        elif found[gpu.uuid].compute_mode == "Prohibited":
            yield Finding(subject, "error", "its compute mode is Prohibited", "run `nvidia-smi -c DEFAULT`")
        elif found[gpu.uuid].compute_mode == "Exclusive_Process" and gpu.directory is None and len(users) > 1:
            yield Finding(
                *(subject, "error", f"exclusive to one process, but {_list(users)} are to share it"),
                "give it `mps = {}` in the topology, or run `nvidia-smi -c DEFAULT`",
            )
        elif len(users) > 1 and gpu.directory is None:
            yield Finding(
                *(subject, "warning", f"{_list(users)} take turns on it"),
                "`mps = {}` lets them run at once; see DEPLOY.md for what that isolates",
            )
        else:
            yield Finding(subject, "ok", f"{gpu.uuid} ({gpu.model}) for {_list(users)}")
        yield from _mps(plan, gpu.name, around)


def _mps(plan: LaunchPlan, name: str, around: Surroundings) -> Iterator[Finding]:
    gpu = plan.gpu(name)
    if gpu.directory is None:
        return
    subject = f"mps-{name}"
    if around.mps_program is None:
        yield Finding(
            *(subject, "error", f"{mps.PROGRAM} is not on the PATH"),
            "install the driver's compute utilities, or leave `mps` out to take turns",
        )
    elif gpu.exclusive and not around.root:
        yield Finding(
            *(subject, "error", "only root may change the compute mode"),
            'run as root, or say compute_mode = "keep"',
        )
    else:
        yield Finding(subject, "ok", around.mps_program)


def _addresses(plan: LaunchPlan, around: Surroundings) -> Iterator[Finding]:
    for process in plan.processes:
        for address in process.listens:
            path = address.removeprefix("ipc://")
            is_path = "://" not in address or address.startswith("ipc://")
            if is_path and len(path) > _SOCKET_PATH_MAX:
                yield Finding(
                    *(process.name, "error", f"{path} is too long for a socket's path"),
                    "set XDG_RUNTIME_DIR to a short directory, such as /tmp, or shorten the topology's name",
                )
            elif address in around.busy:
                yield Finding(
                    *(process.name, "error", f"{address}: {around.busy[address]}"),
                    "end who has it (`ss -ltnp` shows), or change the port in the topology",
                )
            elif "://" in address:
                yield Finding(process.name, "ok", f"will listen on {address}")


def _cores(plan: LaunchPlan, around: Surroundings) -> Iterator[Finding]:
    taken: dict[int, str] = {}
    for process in plan.processes:
        for lane in process.lanes:
            if lane.cores is None:
                continue
            who = f"{process.name}/{lane.name}"
            cores = parse_cores("cores", lane.cores)
            if gone := sorted(cores - around.cores):
                there = _ranges(around.cores)
                yield Finding(
                    who, "error", f"there is no core {_list(map(str, gone))}", f"use cores of {there}"
                )
            elif shared := sorted(core for core in cores if core in taken):
                other = taken[shared[0]]
                yield Finding(
                    who, "warning", f"shares core {shared[0]} with {other}", "give each lane cores of its own"
                )
            else:
                yield Finding(who, "ok", f"on cores {lane.cores}")
            taken |= dict.fromkeys(cores, who)


def _memory(plan: LaunchPlan, machine: Machine, lanes: Sequence[Estimate]) -> Iterator[Finding]:
    room = {"": machine.memory}
    for gpu in plan.gpus:
        there = next((each for each in machine.gpus or () if each.uuid == gpu.uuid), None)
        if there is not None and there.memory.removesuffix(" MiB").isdigit():
            room[gpu.name] = int(there.memory.removesuffix(" MiB")) * _MIB
    for place, has in room.items():
        here = [lane for lane in lanes if (lane.gpus or ("",))[0] == place and not lane.unknown]
        if not here:
            continue
        weights = sum(lane.weights // max(1, len(lane.gpus)) for lane in here)
        subject, name = "memory", place or "the CPU"
        if weights > has:
            yield Finding(
                *(subject, "error", f"weights of {size(weights)} for {size(has)} on {name}"),
                "use smaller models or dtype, or move a lane in the topology",
            )
        else:
            yield Finding(subject, "ok", f"weights of {size(weights)} for {size(has)} on {name}")
    for process in plan.processes:
        for lane in process.lanes:
            limit = lane.environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "").removeprefix("0=")
            mine = next(
                (each for each in lanes if (each.process, each.lane) == (process.name, lane.name)), None
            )
            if limit and mine is not None and mine.weights > parse_size(limit.replace("M", "MiB")):
                yield Finding(
                    *(
                        f"{process.name}/{lane.name}",
                        "error",
                        f"weights of {size(mine.weights)}, but pinned_memory {limit}",
                    ),
                    f"try pinned_memory {size(2 * mine.weights)}",
                )


def _users(plan: LaunchPlan, gpu: str) -> list[str]:
    return [
        f"{process.name}/{lane.name}"
        for process in plan.processes
        for lane in process.lanes
        if gpu in lane.gpus
    ]


def _list(words: Iterable[str]) -> str:
    return ", ".join(words) or "nobody"


def _ranges(cores: frozenset[int]) -> str:
    ordered = sorted(cores)
    return (
        f"{ordered[0]}-{ordered[-1]}"
        if len(ordered) == ordered[-1] - ordered[0] + 1
        else _list(map(str, ordered))
    )


def _refused(address: str) -> str:
    """Why an address cannot be bound; empty if it can. Nothing listens there for more than a moment."""
    found = urlsplit(address)
    if found.scheme not in ("http", "tcp"):
        return ""
    try:
        port = found.port or 0
        places = socket.getaddrinfo(found.hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, number, _, place = places[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""
