"""A speculator server that is near, and farther and farther away, against no speculation: all in one run.

An executor without a speculator, and for each distance one with a server, stay up throughout and work in
turns, so that what else the machine does hits all alike. Only one works at a time. Each has a server of its
own, since one that remembers what was said would have heard it from the others.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from executor.bench.long_wire import LongWire
from executor.bench.pool import server_process
from executor.bench.stretch import Client, Work, agree, circumstances, stretch, tokens_per_step
from executor.errors import InvalidConfig
from executor.llm import LLM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from executor.config import Config

MOST_MS = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`config`: of each executor, its speculator that of the server. `server`: options of `speclane
    speculator` that say the same of the server. `round_trips`: milliseconds that are added to the way there
    and back. `seconds`: of one turn; `repeat`: turns of each."""

    config: Config
    server: Sequence[str]
    work: Work
    round_trips: Sequence[float]
    seconds: float
    repeat: int


def parse_round_trips(text: str) -> list[float]:
    """`0,1,5` in milliseconds. Raises InvalidConfig about `round_trips`."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= each <= MOST_MS for each in found) or len(set(found)) < len(found):
        raise InvalidConfig(
            "round_trips", f"round-trips must be different milliseconds, got {text!r}; try 0,1,5,20"
        )
    return found


def measure(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    """A row for each distance, and whether all said the same. Raises SpeclaneError, InvalidConfig."""
    if not plan.config.speculates:
        raise InvalidConfig("speculator", "speculator off leaves nothing to measure; try ngram")
    with ExitStack() as stack:
        configs = [replace(plan.config, speculator="off")]
        for milliseconds in plan.round_trips:
            address, _ = stack.enter_context(server_process("tcp://127.0.0.1:0", plan.server))
            wire = stack.enter_context(LongWire(int(address.rpartition(":")[2]), milliseconds / 1e3))
            configs.append(replace(plan.config, speculator=wire.address))
        clients = [Client(stack.enter_context(LLM(config)), plan.work) for config in configs]
        speeds: list[list[float]] = [[] for _ in clients]
        for turn in range(plan.repeat):
            for client, mine in zip(clients, speeds, strict=True):
                mine += stretch([client], plan.seconds)
            told = ", ".join(f"{mine[-1]:.2f}" for mine in speeds)
            progress(f"turn {turn + 1} of {plan.repeat}: {told} tok/s")
        names = [None, *plan.round_trips]
        rows = [
            _row(name, client, mine, speeds[0])
            for name, client, mine in zip(names, clients, speeds, strict=True)
        ]
        agreed = agree(clients)
    return {
        "rows": rows,
        "tokens_agree": agreed,
        **circumstances(plan.config, plan.work),
        "seconds": plan.seconds,
        "repeat": plan.repeat,
    }


def _row(
    round_trip: float | None, client: Client, mine: Sequence[float], plain: Sequence[float]
) -> dict[str, Any]:
    """`share`: of the speed without speculation, all turns together; `setting`: what was chosen last."""
    controller = client.llm.coordinator.controller
    return {
        "round_trip_ms": round_trip,
        "tok_s": round(sum(mine) / len(mine), 3),
        "tok_s_each": [round(one, 3) for one in mine],
        "share": round(sum(mine) / sum(plain), 4) if sum(plain) else 1.0,
        "tokens_per_step": round(tokens_per_step([client]), 4),
        "setting": "off" if round_trip is None else str(controller.current),
        "reason": "" if round_trip is None else controller.reason,
    }
