"""Several executors that share one speculator server, against each with a speculator of its own, and none.

All executors of a mode run at once, in this process, and answer the same prompts over and over; what counts
are the tokens of each in the same stretch of time. Their lanes, and the server, are processes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from executor.bench.stretch import Client, Work, agree, circumstances, stretch, tokens_per_step
from executor.errors import InvalidConfig, SpeclaneError
from executor.llm import LLM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from executor.config import Config

Mode = Literal["off", "own", "shared"]
MODES: tuple[Mode, ...] = get_args(Mode)
_EXIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`config`: of each of `executors`, its speculator that of the server. `server`: options of `speclane
    speculator` that say the same of the server. `seconds`: of one measurement; `repeat`: so many of each."""

    config: Config
    server: Sequence[str]
    work: Work
    executors: int
    seconds: float
    repeat: int


@contextmanager
def server_process(bind: str, options: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`speclane speculator` as a process, once it serves: its address, and itself. Its log is this stderr.

    Raises SpeclaneError if it does not come to serve.
    """
    command = [sys.executable, "-m", "executor", "speculator", "--bind", bind, *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None, "asked for"
            line = process.stdout.readline()  # the only one; empty if it ends before
            if " on " not in line:
                raise SpeclaneError(f"the speculator server ended with status {process.wait()}")
            yield line.rpartition(" on ")[2].strip(), process
        finally:
            process.terminate()
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def measure(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    """A row for each mode, and whether all said the same. Raises SpeclaneError, InvalidConfig."""
    if not plan.config.speculates:
        raise InvalidConfig("speculator", "speculator off leaves nothing to share; try ngram")
    speeds: dict[Mode, list[list[float]]] = {mode: [] for mode in MODES}
    clients: dict[Mode, list[Client]] = {mode: [] for mode in MODES}
    for turn in range(plan.repeat):
        for mode in MODES:
            each, asked = _measured(plan, mode)
            speeds[mode].append(each)
            clients[mode] += asked
            progress(f"{mode} {turn + 1} of {plan.repeat}: {', '.join(f'{one:.2f}' for one in each)} tok/s")
    return {
        "rows": [_row(mode, speeds, tokens_per_step(clients[mode])) for mode in MODES],
        "tokens_agree": agree([client for mode in MODES for client in clients[mode]]),
        "executors": plan.executors,
        **circumstances(plan.config, plan.work),
        "seconds": plan.seconds,
    }


def fairness(speeds: Sequence[float]) -> float:
    """Jain's index: 1 if all are alike, 1/n if one has all. 1 if nobody has anything."""
    squares = len(speeds) * sum(speed * speed for speed in speeds)
    return sum(speeds) ** 2 / squares if squares else 1.0


def _measured(plan: Plan, mode: Mode) -> tuple[list[float], list[Client]]:
    """Tokens per second of each executor, and whom that was measured with."""
    with ExitStack() as stack:
        config = plan.config
        if mode == "off":
            config = replace(config, speculator="off")
        elif mode == "shared":
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="pool-"))
            address, _ = stack.enter_context(server_process(f"ipc://{Path(place) / 's'}", plan.server))
            config = replace(config, speculator=address)
        clients = [
            Client(stack.enter_context(LLM(config)), plan.work, share=number / plan.executors)
            for number in range(plan.executors)
        ]
        return stretch(clients, plan.seconds), clients


def _row(mode: Mode, speeds: dict[Mode, list[list[float]]], length: float) -> dict[str, Any]:
    def middle(of: Mode) -> list[float]:
        """The turn whose combined speed is the median, the lower one of two."""
        return sorted(speeds[of], key=sum)[(len(speeds[of]) - 1) // 2]

    each = middle(mode)
    return {
        "mode": mode,
        "tok_s": round(sum(each), 3),
        "tok_s_each": [round(one, 3) for one in each],
        "speedup": round(sum(each) / sum(middle("off")), 4),
        "fairness": round(fairness(each), 4),
        "acceptance_length": round(length, 4),
    }
