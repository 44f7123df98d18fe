"""From a topology and the GPUs that there are to the processes that are to run. Pure.

Each process gets everything by its command line and its environment, so what `--dry-run` shows can be started
by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from executor import mps
from executor.address import is_address
from executor.errors import InvalidConfig
from executor.launch.commands import SPECLANE, arguments, config_of, server_config_of
from executor.placement import VISIBLE, parse_cores
from executor.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from executor.config import Config
    from executor.doctor import Gpu as FoundGpu
    from executor.launch.topology import Gpu, Lane, Target, Topology

Kind = Literal["mps", "speculator", "target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGpu:
    """`uuid`: empty if this machine has no such GPU. `directory`: the MPS daemon's, None without MPS."""

    name: str
    uuid: str
    model: str
    directory: Path | None = None
    verify: bool = False
    patience: float = 10.0
    exclusive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLane:
    """One lane of a process. `gpus`: names, one per rank; none is the CPU. `cores`: as the file has them."""

    name: str
    gpus: tuple[str, ...]
    environment: Mapping[str, str]
    cores: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """`environment`: beside the launcher's own. `needs`: processes that must be ready before it starts.
    `listens`: addresses. `attaches`: those of the speculators that it tries, in their order."""

    name: str
    kind: Kind
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    listens: tuple[str, ...] = ()
    attaches: tuple[str, ...] = ()
    lanes: tuple[PlannedLane, ...] = ()
    gpus: tuple[str, ...] = ()
    config: Config | None = None
    """What it runs, if that is known here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """`directory`: private to the launcher while it runs. `processes`: in the order in which they start."""

    topology: Topology
    directory: Path
    gpus: tuple[PlannedGpu, ...]
    processes: tuple[PlannedProcess, ...]

    def gpu(self, name: str) -> PlannedGpu:
        return next(gpu for gpu in self.gpus if gpu.name == name)


def make_plan(topology: Topology, found: Sequence[FoundGpu], directory: Path) -> LaunchPlan:
    """`found`: the machine's GPUs as the driver counts them. Raises InvalidConfig."""
    gpus = tuple(_gpu(gpu, found, directory) for gpu in topology.gpus)
    by_name = {gpu.name: gpu for gpu in gpus}
    processes = [_daemon(gpu) for gpu in gpus if gpu.directory is not None]
    for speculator in topology.speculators:
        lane = _lane("speculator", f"speculators.{speculator.name}.lane", speculator.lane, by_name)
        address = f"ipc://{directory / speculator.name}" if speculator.bind == "ipc" else speculator.bind
        path = f"speculators.{speculator.name}.options"
        words = [
            f"--bind={address}",
            *arguments(path, speculator.options),
            *_device_words("", speculator.lane),
        ]
        processes.append(
            PlannedProcess(
                name=speculator.name,
                kind="speculator",
                argv=(*SPECLANE, "speculator", *words),
                environment=lane.environment,
                needs=_daemons(lane, by_name),
                listens=(address,),
                lanes=(lane,),
                gpus=lane.gpus,
                config=server_config_of(path, words),
            )
        )
    addresses = {process.name: process.listens[0] for process in processes if process.kind == "speculator"}
    processes += [_target(target, topology, by_name, addresses) for target in topology.targets]
    return LaunchPlan(topology=topology, directory=directory, gpus=gpus, processes=tuple(processes))


def attaching_later(argv: Sequence[str]) -> tuple[str, ...]:
    """The same command for a server that begins without its speculators if none of them is there."""
    return (*argv, "--attach=later")


def _gpu(gpu: Gpu, found: Sequence[FoundGpu], directory: Path) -> PlannedGpu:
    by_uuid = {each.uuid: each for each in found}
    there: FoundGpu | None
    if isinstance(gpu.select, str):
        there = by_uuid.get(gpu.select)
        uuid = gpu.select
    else:
        there = found[gpu.select] if gpu.select < len(found) else None
        uuid = there.uuid if there else ""
    return PlannedGpu(
        name=gpu.name,
        uuid=uuid,
        model=there.name if there else "",
        directory=directory / f"mps-{gpu.name}" if gpu.mps else None,
        verify=gpu.mps is not None and gpu.mps.attach == "verify",
        patience=gpu.mps.patience if gpu.mps is not None else 0.0,
        exclusive=gpu.mps is not None and gpu.mps.compute_mode == "exclusive",
    )


def _daemon(gpu: PlannedGpu) -> PlannedProcess:
    assert gpu.directory is not None, "a GPU with MPS has a directory for it"
    return PlannedProcess(
        name=f"mps-{gpu.name}",
        kind="mps",
        argv=mps.DAEMON,
        environment={VISIBLE: seen(gpu)} | mps.directories(gpu.directory),
        listens=(str(gpu.directory / mps.PIPE / mps.CONTROL),),
        gpus=(gpu.name,),
    )


def seen(gpu: PlannedGpu) -> str:
    """How the GPU is named to a process: by its UUID, or a stand-in where there is none to name."""
    return gpu.uuid or f"<UUID of {gpu.name}>"


def _lane(name: str, path: str, lane: Lane, gpus: Mapping[str, PlannedGpu]) -> PlannedLane:
    names = tuple(each for each in lane.devices if each != "cpu")
    if names and len(names) < len(lane.devices):
        raise InvalidConfig("topology", f"{path}.device: ranks are on GPUs or on the CPU, not both; try cpu")
    environment = dict(lane.environment)
    if names:
        environment[VISIBLE] = ",".join(seen(gpus[each]) for each in names)
        directory = gpus[names[0]].directory
        if directory is not None:
            if len(names) > 1:
                raise InvalidConfig(
                    "topology",
                    f"{path}.device: one MPS daemon serves one GPU, ranks need several; try GPUs without mps",
                )
            environment |= mps.directories(directory)
            share = lane.share
            if share is not None:
                memory = share.pinned_memory
                environment |= mps.share(
                    share.active_thread_percentage,
                    None if memory is None else parse_size(memory),
                    below_normal=share.priority == "below_normal",
                )
    if lane.cores is not None:
        try:
            parse_cores("cores", lane.cores)
        except InvalidConfig as error:
            raise InvalidConfig("topology", f"{path}: {error}") from None
    return PlannedLane(name=name, gpus=names, environment=environment, cores=lane.cores)


def _device_words(prefix: str, lane: Lane) -> list[str]:
    device = "cpu" if lane.devices[0] == "cpu" else "cuda"
    return [f"--{prefix}device={device}"]


def _daemons(lane: PlannedLane, gpus: Mapping[str, PlannedGpu]) -> tuple[str, ...]:
    return tuple(f"mps-{name}" for name in lane.gpus if gpus[name].directory is not None)


def _target(
    target: Target, topology: Topology, gpus: Mapping[str, PlannedGpu], addresses: Mapping[str, str]
) -> PlannedProcess:
    path = f"targets.{target.name}"
    options = dict(target.options)
    if target.attach:
        options["speculator"] = ",".join(addresses.get(name, name) for name in target.attach)
    speculator = str(options.get("speculator", "auto"))
    attaches = tuple(speculator.split(",")) if is_address(speculator) else ()
    drafts = not attaches and speculator != "off"
    lanes = [_lane("target", f"{path}.lanes.target", target.lanes.target, gpus)]
    if len(lanes[0].gpus) > 1 and "target-ranks" not in options:
        options.setdefault("target_ranks", len(lanes[0].gpus))
    ranks = options.get("target_ranks", options.get("target-ranks", 1))
    if lanes[0].gpus and len(lanes[0].gpus) != ranks:
        raise InvalidConfig(
            "topology",
            f"{path}.lanes.target.device: {len(lanes[0].gpus)} GPUs for {ranks} ranks; "
            f"try leaving options.target_ranks out",
        )
    if drafts:
        lanes.append(_lane("speculator", f"{path}.lanes.speculator", target.lanes.speculator, gpus))
    host = f"[{target.host}]" if ":" in target.host else target.host
    used = tuple(dict.fromkeys(name for lane in lanes for name in lane.gpus))
    daemons = tuple(dict.fromkeys(name for lane in lanes for name in _daemons(lane, gpus)))
    if daemons:
        options.setdefault("group", "one_for_all")
    options.setdefault("shutdown_timeout", topology.supervision.drain)
    words = [f"--host={target.host}", f"--port={target.port}", *arguments(f"{path}.options", options)]
    pinned: list[str] = []
    for lane in lanes:
        words += _device_words(f"{lane.name}-", getattr(target.lanes, lane.name))
        words += [f"--{lane.name}-env={name}={value}" for name, value in lane.environment.items()]
        # What these cores are is checked on the machine that has them.
        pinned += [f"--{lane.name}-cores={lane.cores}"] if lane.cores is not None else []
    return PlannedProcess(
        name=target.name,
        kind="target",
        argv=(*SPECLANE, "serve", *words, *pinned),
        needs=(*daemons, *(name for name in target.attach if name in addresses)),
        listens=(f"http://{host}:{target.port}",),
        attaches=attaches,
        lanes=tuple(lanes),
        gpus=used,
        config=config_of(f"{path}.options", words),
    )
