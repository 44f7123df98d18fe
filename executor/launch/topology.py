"""A topology as its TOML file gives it, checked in itself; what the machine offers is not looked at here."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from executor.errors import InvalidConfig
from executor.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}", re.ASCII)
_NUMBERED = re.compile(r"gpu:([0-9]{1,3})", re.ASCII)
_SELECT = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]{1,120}", re.ASCII)


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the file's tables."""


class Mps(_Table, frozen=True):
    """A control daemon for one GPU.

    attach: `verify` asks the daemon whether the lanes really are its clients; `trust` does not, as one must
        where process ids are counted otherwise, in a container with ids of its own.
    patience: seconds that a lane may take to become a client, and a server to recover from a GPU fault.
    compute_mode: `exclusive` sets the GPU's compute mode to EXCLUSIVE_PROCESS while the topology runs, which
        needs root and keeps others out; `keep` changes nothing.
    """

    attach: Literal["verify", "trust"] = "verify"
    patience: float = 10.0
    compute_mode: Literal["keep", "exclusive"] = "keep"


class Gpu(_Table, frozen=True):
    """A GPU by the name that lanes use. `select`: its number as `nvidia-smi -L` counts, or its UUID."""

    name: str
    select: int | str
    mps: Mps | None = None


class Share(_Table, frozen=True):
    """What one lane may take of a GPU under MPS. active_thread_percentage: of the multiprocessors;
    pinned_memory: a size, beyond which it is refused memory; priority: of its kernels among the others'."""

    active_thread_percentage: int | None = None
    pinned_memory: str | None = None
    priority: Literal["normal", "below_normal"] = "normal"


class Lane(_Table, frozen=True):
    """Where one lane runs. device: `cpu`, a GPU's name, `gpu:N` for the N-th GPU without naming it before, or
    for a rank group one of these per rank."""

    device: str | list[str] = "cpu"
    cores: str | None = None
    environment: dict[str, str] = {}
    share: Share | None = None

    @property
    def devices(self) -> list[str]:
        return [self.device] if isinstance(self.device, str) else self.device


class Lanes(_Table, frozen=True):
    target: Lane = Lane()
    speculator: Lane = Lane()


class Target(_Table, frozen=True):
    """One `speclane serve`, which starts its own lanes. `options`: of that command; `attach`: names or
    addresses of stand-alone speculators: the first that serves drafts for it, and it has none of its own."""

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    attach: list[str] = []
    options: dict[str, Any] = {}
    lanes: Lanes = Lanes()


class Speculator(_Table, frozen=True):
    """One `speclane speculator`, for several targets. `bind`: `ipc` for a socket in the launcher's own
    directory, or an address; `options`: of that command."""

    name: str
    bind: str = "ipc"
    options: dict[str, Any] = {}
    lane: Lane = Lane()


class Supervision(_Table, frozen=True):
    """Seconds, and how many deaths in `period` are too many.

    start: until a process must be ready. drain: what answers under way get, and how long a process that was
    told to end may take beyond. watchdog: after so long without a sign of life a process is ended.
    """

    start: float = 900.0
    drain: float = 30.0
    watchdog: float = 30.0
    intensity: int = 5
    period: float = 120.0


class Topology(_Table, frozen=True):
    name: str
    targets: list[Target] = []
    description: str = ""
    gpus: list[Gpu] = []
    speculators: list[Speculator] = []
    supervision: Supervision = Supervision()

    @property
    def lanes(self) -> Iterator[tuple[str, Lane]]:
        """All lanes that the file places, with the path by which errors name them."""
        for target in self.targets:
            yield f"targets.{target.name}.lanes.target", target.lanes.target
            if not target.attach:
                yield f"targets.{target.name}.lanes.speculator", target.lanes.speculator
        for speculator in self.speculators:
            yield f"speculators.{speculator.name}.lane", speculator.lane


def read(path: Path) -> Topology:
    """Raises InvalidConfig that names the file, the field and a value that works."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(
            "topology", f"topology {path}: {error.strerror}; try deploy/topologies/cpu.toml"
        ) from None
    except UnicodeDecodeError:
        raise InvalidConfig(
            "topology", f"topology {path} is no UTF-8; try deploy/topologies/cpu.toml"
        ) from None
    except InvalidConfig as error:
        raise InvalidConfig("topology", f"topology {path}: {error}") from None


def parse(text: str) -> Topology:
    """Raises InvalidConfig."""
    try:
        made = msgspec.convert(tomllib.loads(text), Topology)
    except tomllib.TOMLDecodeError as error:
        raise _refusal("", f"is no TOML: {error}", 'name = "mine"') from None
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        raise _refusal(
            where.strip("`").removeprefix("$."), what, "a file of deploy/topologies as a pattern"
        ) from None
    made = _with_numbered_gpus(made)
    _check(made)
    return made


def _with_numbered_gpus(topology: Topology) -> Topology:
    """Those that lanes name by number are declared, too."""
    devices = dict.fromkeys(name for _, lane in topology.lanes for name in lane.devices)
    numbers = [found[1] for name in devices if (found := _NUMBERED.fullmatch(name))]
    gpus = [Gpu(name=f"gpu:{number}", select=int(number)) for number in numbers]
    return msgspec.structs.replace(topology, gpus=[*topology.gpus, *gpus])


def _check(topology: Topology) -> None:
    if not topology.targets and not topology.speculators:
        raise _refusal("targets", "there is nothing to run", '[[targets]] with a name, such as "main"')
    _check_names(topology)
    gpus = {gpu.name: gpu for gpu in topology.gpus}
    for gpu in topology.gpus:
        if isinstance(gpu.select, int) and gpu.select < 0:
            raise _refusal(f"gpus.{gpu.name}.select", f"there is no GPU {gpu.select}", "0")
        if isinstance(gpu.select, str) and not _SELECT.fullmatch(gpu.select):
            raise _refusal(
                f"gpus.{gpu.name}.select",
                f"{gpu.select!r} is neither number nor UUID",
                "0, or see nvidia-smi -L",
            )
        if gpu.mps is not None and not 0 < gpu.mps.patience <= 1e6:
            raise _refusal(f"gpus.{gpu.name}.mps.patience", "must be a positive number of seconds", "10")
    for path, lane in topology.lanes:
        _check_lane(path, lane, gpus)
    known = [speculator.name for speculator in topology.speculators]
    for target in topology.targets:
        where = f"targets.{target.name}"
        if not 1 <= target.port <= 65535:
            raise _refusal(f"{where}.port", f"must be from 1 to 65535, got {target.port}", "8000")
        for name in target.attach:
            if name not in known and "://" not in name:
                raise _refusal(
                    f"{where}.attach",
                    f"there is no speculator {name!r}",
                    known[0] if known else "[[speculators]]",
                )
        if target.attach and "speculator" in target.options:
            raise _refusal(f"{where}.options.speculator", "contradicts attach", "leaving one of them out")
    ports = [(target.host, target.port) for target in topology.targets]
    for i, address in enumerate(ports):
        if address in ports[:i]:
            free = max(port for _, port in ports) + 1
            raise _refusal(
                f"targets.{topology.targets[i].name}.port", f"{address[1]} is taken twice", str(free)
            )
    for speculator in topology.speculators:
        if speculator.bind != "ipc" and not speculator.bind.startswith(("ipc://", "tcp://")):
            raise _refusal(
                f"speculators.{speculator.name}.bind",
                f"{speculator.bind!r} is no address",
                "ipc, or tcp://127.0.0.1:5570",
            )
    _check_supervision(topology.supervision)


def _check_names(topology: Topology) -> None:
    seen: set[str] = set()
    things = [("gpus", gpu.name) for gpu in topology.gpus]
    things += [("targets", target.name) for target in topology.targets]
    things += [("speculators", speculator.name) for speculator in topology.speculators]
    for kind, name in [("", topology.name), *things]:
        if not _NAME.fullmatch(name) and not (kind == "gpus" and _NUMBERED.fullmatch(name)):
            raise _refusal(
                f"{kind}.name" if kind else "name",
                f"{name!r} must be small letters, digits and dashes, at most 31",
                "main",
            )
    for kind, name in things:
        if name in seen:
            raise _refusal(f"{kind}.name", f"{name!r} is taken", f"{name}-2")
        seen.add(name)
    if "cpu" in seen:
        raise _refusal("gpus.name", "cpu means the CPU", "gpu0")


def _check_lane(path: str, lane: Lane, gpus: dict[str, Gpu]) -> None:
    known = ", ".join(["cpu", "gpu:0", *gpus])
    if not lane.devices:
        raise _refusal(f"{path}.device", "is an empty list", "cpu")
    for name in lane.devices:
        if name != "cpu" and name not in gpus:
            raise _refusal(f"{path}.device", f"there is no {name!r}, only {known}", known.split(", ")[-1])
    if lane.share is None:
        return
    if not all(name in gpus and gpus[name].mps for name in lane.devices):
        raise _refusal(f"{path}.share", "its GPU has no MPS", "mps = {} for that GPU, or leaving share out")
    percentage = lane.share.active_thread_percentage
    if percentage is not None and not 1 <= percentage <= 100:
        raise _refusal(
            f"{path}.share.active_thread_percentage", f"must be from 1 to 100, got {percentage}", "50"
        )
    if lane.share.pinned_memory is not None:
        try:
            parse_size(lane.share.pinned_memory)
        except ValueError as error:
            raise _refusal(f"{path}.share.pinned_memory", str(error).split(";")[0], "8GB") from None


def _check_supervision(supervision: Supervision) -> None:
    for name, works in (("start", 900), ("drain", 30), ("watchdog", 30), ("period", 120)):
        if not 0 < getattr(supervision, name) <= 1e6:
            raise _refusal(f"supervision.{name}", "must be a positive number of seconds", str(works))
    if supervision.intensity < 0:
        raise _refusal("supervision.intensity", "must not be negative", "5")


def _refusal(where: str, what: str, works: str) -> InvalidConfig:
    return InvalidConfig("topology", f"{where}: {what}; try {works}" if where else f"{what}; try {works}")
