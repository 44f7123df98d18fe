"""Several executors that share one speculator server, against each with a speculator of its own, and none.

All executors of a mode run at once, in this process, and answer the same prompts over and over; what counts
are the tokens of each in the same stretch of time. Their lanes, and the server, are processes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from executor.errors import InvalidConfig, SpeclaneError
from executor.llm import LLM
from executor.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from executor.config import Config

Mode = Literal["off", "own", "shared"]
MODES: tuple[Mode, ...] = get_args(Mode)
_EXIT_SECONDS = 10.0
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`config`: of each of `executors`, its speculator that of the server. `server`: options of `speclane
    speculator` that say the same of the server. `seconds`: of one measurement; `repeat`: so many of each."""

    config: Config
    server: Sequence[str]
    prompts: Sequence[str]
    executors: int
    new_tokens: int
    temperature: float
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
    lengths: dict[Mode, float] = {}
    said: dict[int, set[tuple[int, ...]]] = {}
    for turn in range(plan.repeat):
        for mode in MODES:
            each, lengths[mode], outputs = _measured(plan, mode)
            speeds[mode].append(each)
            for index, tokens in outputs:
                said.setdefault(index, set()).add(tuple(tokens))
            progress(f"{mode} {turn + 1} of {plan.repeat}: {', '.join(f'{one:.2f}' for one in each)} tok/s")
    return {
        "rows": [_row(mode, speeds, lengths[mode]) for mode in MODES],
        "tokens_agree": all(len(versions) == 1 for versions in said.values()),
        "executors": plan.executors,
        "target": plan.config.target,
        "speculator": plan.config.speculator,
        "engine": plan.config.engine,
        "dtype": plan.config.dtype,
        "threads": plan.config.threads,
        "k": plan.config.num_speculative_tokens,
        "batch": plan.config.max_sequences,
        "temperature": plan.temperature,
        "seconds": plan.seconds,
    }


def fairness(speeds: Sequence[float]) -> float:
    """Jain's index: 1 if all are alike, 1/n if one has all. 1 if nobody has anything."""
    squares = len(speeds) * sum(speed * speed for speed in speeds)
    return sum(speeds) ** 2 / squares if squares else 1.0


def _measured(plan: Plan, mode: Mode) -> tuple[list[float], float, list[tuple[int, list[int]]]]:
    """Tokens per second of each executor, tokens per target step, and what each said to each prompt."""
    with ExitStack() as stack:
        config = plan.config
        if mode == "off":
            config = replace(config, speculator="off")
        elif mode == "shared":
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="pool-"))
            address, _ = stack.enter_context(server_process(f"ipc://{Path(place) / 's'}", plan.server))
            config = replace(config, speculator=address)
        llms = [stack.enter_context(LLM(config)) for _ in range(plan.executors)]
        for llm in llms:
            llm.generate(plan.prompts[0], SamplingParams(max_tokens=_WARM_UP_TOKENS), progress=False)
        outputs: list[dict[int, list[int]]] = [{} for _ in llms]
        stop = threading.Event()
        threads = [
            threading.Thread(target=_work, args=(llm, plan, said, stop))
            for llm, said in zip(llms, outputs, strict=True)
        ]
        for thread in threads:
            thread.start()
        began, before = time.perf_counter(), [_tokens(llm) for llm in llms]
        stop.wait(plan.seconds)
        seconds, after = time.perf_counter() - began, [_tokens(llm) for llm in llms]
        stop.set()
        for thread in threads:
            thread.join()
        outcomes = [llm.coordinator.stats.acceptance for llm in llms]
        tokens, rounds = sum(one.tokens for one in outcomes), sum(one.rounds for one in outcomes)
    speeds = [(last - first) / seconds for first, last in zip(before, after, strict=True)]
    return speeds, tokens / max(rounds, 1), [pair for said in outputs for pair in said.items()]


def _work(llm: LLM, plan: Plan, outputs: dict[int, list[int]], stop: threading.Event) -> None:
    """The prompts in turn, as many at once as run at once, over and over until `stop`."""
    size = plan.config.max_sequences
    start = 0
    while not stop.is_set():
        indices = [(start + i) % len(plan.prompts) for i in range(size)]
        start += size
        streams = [llm.stream(plan.prompts[index], _params(plan, index)) for index in indices]
        for index, stream in zip(indices, streams, strict=True):
            for _ in stream:
                if stop.is_set():
                    break
            else:
                outputs[index] = stream.completion.token_ids
        for stream in streams:
            stream.close()


def _tokens(llm: LLM) -> int:
    """That it has settled so far."""
    return llm.coordinator.stats.acceptance.tokens


def _params(plan: Plan, index: int) -> SamplingParams:
    return SamplingParams(
        temperature=plan.temperature, seed=index, max_tokens=plan.new_tokens, ignore_eos=True
    )


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
