"""Executors at work for a stretch of time: what each brings while all answer the same prompts in turn."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from executor.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.config import Config
    from executor.llm import LLM

_WARM_UP, _WARM_UP_TOKENS = "Hello.", 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """`prompts`: what a user says, for the model's own template. `new_tokens`: of each answer. `at_once`:
    sequences of each executor."""

    prompts: Sequence[str]
    new_tokens: int
    temperature: float
    at_once: int


def circumstances(config: Config, work: Work) -> dict[str, Any]:
    """What figures of such executors hang on."""
    return setup(config, work.at_once) | {"temperature": work.temperature}


def setup(config: Config, batch: int) -> dict[str, Any]:
    """What an executor is made of, for so many sequences at once."""
    return {
        "target": config.target,
        "speculator": config.speculator,
        "engine": config.engine,
        "dtype": config.dtype,
        "threads": config.threads,
        "k": config.num_speculative_tokens,
        "batch": batch,
    }


class Client:
    """Of one executor. `said`: all that it answered to each prompt, by the prompt's number."""

    def __init__(self, llm: LLM, work: Work, share: float = 0.0) -> None:
        """Starts the executor, and asks it something. It begins so far into the prompts: two who share a
        speculator that remembers must not ask the same."""
        self.llm = llm
        self.said: dict[int, set[tuple[int, ...]]] = {}
        self._work = work
        self._next = int(share * len(work.prompts))
        llm.chat([{"role": "user", "content": _WARM_UP}], SamplingParams(max_tokens=_WARM_UP_TOKENS))

    @property
    def tokens(self) -> int:
        """That were settled so far."""
        return self.llm.coordinator.stats.acceptance.tokens

    def ask(self, stop: threading.Event) -> None:
        """The prompts in turn, from where it was, until `stop`: none is asked again before all have been."""
        while not stop.is_set():
            numbers = [(self._next + i) % len(self._work.prompts) for i in range(self._work.at_once)]
            self._next += self._work.at_once
            streams = [self.llm.stream(self._encoded(number), self._params(number)) for number in numbers]
            for number, stream in zip(numbers, streams, strict=True):
                for _ in stream:
                    if stop.is_set():
                        break
                else:
                    self.said.setdefault(number, set()).add(tuple(stream.completion.token_ids))
            for stream in streams:
                stream.close()

    def _encoded(self, number: int) -> list[int]:
        message = {"role": "user", "content": self._work.prompts[number]}
        return self.llm.encode_chat([message], self._params(number))

    def _params(self, number: int) -> SamplingParams:
        work = self._work
        return SamplingParams(
            temperature=work.temperature, seed=number, max_tokens=work.new_tokens, ignore_eos=True
        )


def stretch(clients: Sequence[Client], seconds: float) -> list[float]:
    """Tokens per second of each while all of them ask."""
    stop = threading.Event()
    threads = [threading.Thread(target=client.ask, args=(stop,)) for client in clients]
    for thread in threads:
        thread.start()
    began, before = time.perf_counter(), [client.tokens for client in clients]
    stop.wait(seconds)
    took, after = time.perf_counter() - began, [client.tokens for client in clients]
    stop.set()
    for thread in threads:
        thread.join()
    return [(last - first) / took for first, last in zip(before, after, strict=True)]


def agree(clients: Sequence[Client]) -> bool:
    """Whether all said the same to each prompt, each time."""
    said: dict[int, set[tuple[int, ...]]] = {}
    for client in clients:
        for number, answers in client.said.items():
            said.setdefault(number, set()).update(answers)
    return all(len(answers) == 1 for answers in said.values())


def tokens_per_step(clients: Sequence[Client]) -> float:
    """Of their targets, all stretches together."""
    outcomes = [client.llm.coordinator.stats.acceptance for client in clients]
    rounds = sum(outcome.rounds for outcome in outcomes)
    return sum(outcome.tokens for outcome in outcomes) / max(rounds, 1)
