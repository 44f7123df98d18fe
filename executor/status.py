"""What an executor is doing, as plain records. Reads the coordinator from any thread, changes nothing."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

from executor.request import Acceptance

if TYPE_CHECKING:
    from executor.coordinator import Coordinator
    from executor.lane import Lane


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the records; they are sent as they are."""


class HealthStatus(Record, frozen=True):
    """As executor.health.Health; `since`: seconds since 1970."""

    state: str
    reason: str
    since: float


class LaneStatus(Record, frozen=True):
    """`pid` is None while it has no process; `peers`: those of its other ranks.

    `busy_share`: part of its life that it computed, 0 … 1;
    `busy_seconds`: so long. `reused_tokens`: of prompts, not computed since they had been for others."""

    lane: str
    state: str
    pid: int | None
    epoch: str
    engine: str
    model: str
    restarts: int
    busy_share: float
    orders: int
    deaths: int = 0
    busy_seconds: float = 0.0
    reused_tokens: int = 0
    peers: list[int] = []


class Totals(Record, frozen=True):
    """Since the start. Rounds, tokens, or as executor.stats.Stats says."""

    rounds: int
    tokens: int
    drafted: int
    accepted: int
    missed: int
    invalid: int
    broken: int
    catch_ups: int
    quarantined: int
    preempted: int
    stale: int


class LoadStatus(Record, frozen=True):
    """As executor.stats.Load."""

    running: int = 0
    waiting: int = 0
    tokens: int = 0


class MemoryStatus(Record, frozen=True):
    """What is planned for a lane, in bytes of one process, and the tokens that it can hold.

    `scratch`: activations and workspace.
    """

    lane: str
    device: str
    kv_tokens: int
    process: int
    weights: int
    scratch: int
    graphs: int
    kv: int

    @property
    def total(self) -> int:
        return self.process + self.weights + self.scratch + self.graphs + self.kv


class SettingStatus(Record, frozen=True):
    """How is speculated now, why, and how many verdicts were foreseen since the start."""

    setting: str = ""
    reason: str = ""
    hits: int = 0
    misses: int = 0


class Status(Record, frozen=True):
    """`drafted`, `accepted`: by position in the draft, since the start. `memory`: what is planned."""

    pid: int
    speculation: str
    health: HealthStatus
    lanes: list[LaneStatus]
    totals: Totals
    load: LoadStatus = LoadStatus()
    drafted: list[int] = []
    accepted: list[int] = []
    memory: list[MemoryStatus] = []
    setting: SettingStatus = SettingStatus()


def observe(coordinator: Coordinator, speculation: str) -> Status:
    """`speculation`: what drafts, as the user named it."""
    restarts, deaths = coordinator.restarts, coordinator.deaths
    # A copy, made in one step of the interpreter: the coordinator's thread goes on counting.
    acceptance = Acceptance(dict(coordinator.stats.acceptance.outcomes))
    return Status(
        os.getpid(),
        speculation,
        HealthStatus(*coordinator.health),
        [_lane(lane, restarts.get(lane.name, 0), deaths.get(lane.name, 0)) for lane in coordinator.lanes],
        _totals(coordinator, acceptance),
        LoadStatus(*coordinator.load),
        acceptance.drafted,
        acceptance.accepted,
        _memory(coordinator),
        _setting(coordinator),
    )


def _setting(coordinator: Coordinator) -> SettingStatus:
    controller, stats = coordinator.controller, coordinator.stats
    return SettingStatus(str(controller.current), controller.reason, stats.hits, stats.misses)


def _memory(coordinator: Coordinator) -> list[MemoryStatus]:
    plan = coordinator.memory
    return [
        MemoryStatus(
            lane=lane.lane,
            device=lane.profile.device,
            kv_tokens=lane.kv_tokens,
            process=lane.profile.process,
            weights=lane.profile.weights,
            scratch=lane.profile.activations + lane.profile.workspace,
            graphs=lane.profile.graphs,
            kv=lane.kv,
        )
        for lane in (plan.lanes if plan is not None else ())
    ]


def _lane(lane: Lane, restarts: int, deaths: int) -> LaneStatus:
    process = lane.process  # once: the coordinator's thread may set it to None at any time
    alive_ns = (time.monotonic() - lane.started_at) * 1e9
    return LaneStatus(
        lane=lane.name,
        state=str(lane.state),
        pid=process.pid if process is not None else None,
        epoch=lane.epoch,
        engine=lane.spec.engine,
        model=lane.spec.model,
        restarts=restarts,
        busy_share=round(min(1.0, lane.busy_ns / alive_ns), 4) if alive_ns > 0 else 0.0,
        orders=lane.orders,
        deaths=deaths,
        busy_seconds=lane.busy_ns / 1e9,
        reused_tokens=lane.reused,
        peers=list(process.pids[1:]) if process is not None else [],
    )


def _totals(coordinator: Coordinator, acceptance: Acceptance) -> Totals:
    stats = coordinator.stats
    return Totals(
        rounds=stats.rounds,
        tokens=acceptance.tokens,
        drafted=sum(acceptance.drafted),
        accepted=sum(acceptance.accepted),
        missed=stats.missed,
        invalid=stats.invalid,
        broken=stats.broken,
        catch_ups=stats.catch_ups,
        quarantined=stats.quarantined,
        preempted=stats.preempted,
        stale=coordinator.stale,
    )
