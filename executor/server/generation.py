"""The sequences that answer one HTTP request: submitted together, read as one, ended together.

`Desk` admits them, as long as the queue has room. All of this runs in the event loop; only `Slot.put` is
called by the coordinator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from executor.errors import SpeclaneError
from executor.events import line
from executor.request import Completion, Delta
from executor.server.errors import ApiError, api_error
from executor.server.mailbox import Mailbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from executor.llm import LLM
    from executor.sampling import SamplingParams
    from executor.server.metrics import Metrics


log = logging.getLogger("speclane")
_NO_HEADERS: Mapping[str, str] = {}


class Job(NamedTuple):
    """One sequence to run; its choice is its place in the list."""

    tokens: list[int]
    params: SamplingParams


class Ended(NamedTuple):
    """An answer that has ended. began_ns: since 1970. first_seconds: until its first token, if there was one.

    headers: of its request; a client may name its trace there.
    """

    label: str
    user: str | None
    jobs: Sequence[Job]
    completions: Sequence[Completion]
    failure: ApiError | None
    began_ns: int
    seconds: float
    first_seconds: float | None
    headers: Mapping[str, str]


class Desk:
    """Takes jobs for an executor. `draining`: set when no more are taken."""

    def __init__(
        self,
        llm: LLM,
        max_queue: int,
        timeout: float | None,
        metrics: Metrics,
        record: Callable[[Ended], None] | None = None,
    ) -> None:
        """`max_queue`: sequences beyond those that can run at once. `timeout`: seconds for an answer.

        `record` is called with each answer that has ended.
        """
        self._record = record
        self._llm = llm
        self._capacity = llm.config.max_sequences + max_queue
        self._timeout = timeout
        self._metrics = metrics
        self._mailbox = Mailbox(asyncio.get_running_loop())
        self._open: set[Generation] = set()
        self._sequences = 0
        self.draining = asyncio.Event()

    def begin(
        self,
        jobs: Sequence[Job],
        label: str,
        user: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> Generation:
        """Submit all jobs or none. `label` and `user` say in the log whose they are; `headers`: see Ended.

        Raises ApiError: 429 if the queue has no room, 503 if nothing runs.
        """
        if self.draining.is_set():
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if len(jobs) > self._capacity:
            raise ApiError(
                400,
                f"{len(jobs)} sequences at once are more than {self._capacity}",
                param="n",
                code="too_many",
            )
        if self._sequences + len(jobs) > self._capacity:
            raise ApiError(
                *(429, f"{self._sequences} sequences run or wait; try again in a moment"),
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        generation = Generation(jobs, self._metrics, self._ended)
        generation.label, generation.user, generation.headers = label, user, headers
        self._open.add(generation)
        self._sequences += len(jobs)
        generation.start(self._llm, self._mailbox, self._timeout)
        return generation

    @property
    def answers(self) -> int:
        """How many are under way."""
        return len(self._open)

    def cancel_all(self) -> None:
        for generation in list(self._open):
            generation.cancel()

    def _ended(self, generation: Generation, sequences: int) -> None:
        """So many of its sequences are out of the lanes."""
        self._sequences -= sequences
        if not generation.unfinished:
            self._open.discard(generation)
            ended = generation.story()
            _log(ended)
            if self._record is not None:
                self._record(ended)


class Generation:
    """Iterate over `outputs`; `cancel` at any time."""

    def __init__(
        self, jobs: Sequence[Job], metrics: Metrics, ended: Callable[[Generation, int], None]
    ) -> None:
        self.jobs = jobs
        self.unfinished = set(range(len(jobs)))
        self.completions: dict[int, Completion] = {}
        self._watches = [metrics.watch(len(job.tokens)) for job in jobs]
        self._ended = ended
        self._arrived: list[tuple[int, Delta | Completion]] = []
        self._failure: ApiError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._cancels: list[Callable[[], None]] = []
        self._deadline: asyncio.TimerHandle | None = None
        self.label = ""
        self.user: str | None = None
        self.headers: Mapping[str, str] = _NO_HEADERS
        self._began_ns = time.time_ns()
        self._began = time.perf_counter()
        self._first: float | None = None

    def start(self, llm: LLM, mailbox: Mailbox, timeout: float | None) -> None:
        """Raises ApiError if the executor takes no requests any more."""
        try:
            for i, job in enumerate(self.jobs):
                slot = mailbox.slot(partial(self._receive, i))
                self._cancels.append(llm.submit(job.tokens, job.params, slot))
        except SpeclaneError as error:
            self.cancel()
            for i in range(len(self._cancels), len(self.jobs)):
                self._leave(i)
            raise api_error(error) from error
        if timeout is not None:
            self._deadline = asyncio.get_running_loop().call_later(timeout, self._expire, timeout)

    def cancel(self) -> None:
        """Free its seats in both lanes; what has been generated stays."""
        for choice, cancel in enumerate(self._cancels):
            if choice in self.unfinished:
                cancel()
        if self._deadline is not None:
            self._deadline.cancel()

    async def outputs(self) -> AsyncIterator[list[tuple[int, Delta | Completion]]]:
        """What came since the last look, by choice, until all have ended. Raises ApiError."""
        while True:
            arrived, self._arrived = self._arrived, []
            if arrived:
                yield arrived
            elif self._failure is not None:
                raise self._failure
            elif not self.unfinished:
                return
            else:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader

    async def finished(self) -> list[Completion]:
        """All of it, in the order of the choices. Raises ApiError."""
        async for _ in self.outputs():
            pass
        return [self.completions[i] for i in range(len(self.jobs))]

    def story(self) -> Ended:
        """Of one that has ended."""
        return Ended(
            label=self.label,
            user=self.user,
            jobs=self.jobs,
            completions=[self.completions[choice] for choice in sorted(self.completions)],
            failure=self._failure,
            began_ns=self._began_ns,
            seconds=time.perf_counter() - self._began,
            first_seconds=self._first,
            headers=self.headers,
        )

    # ------------------------------------------------------------ inside

    def _receive(self, choice: int, output: Delta | Completion | SpeclaneError) -> None:
        self._wake()
        watch = self._watches[choice]
        if isinstance(output, Delta):
            if self._first is None:
                self._first = time.perf_counter() - self._began
            watch.added(len(output.token_ids))
            self._arrived.append((choice, output))
        elif isinstance(output, Completion):
            watch.ended(output.finish_reason)
            if output.finish_reason == "cancelled":
                self._fail(ApiError(503, "the request was cancelled", code="cancelled"))
            else:
                self.completions[choice] = output
                self._arrived.append((choice, output))
            self._leave(choice)
        else:
            watch.ended("error")
            self._fail(api_error(output))
            self._leave(choice)

    def _wake(self) -> None:
        """Whoever waits for outputs looks again."""
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _leave(self, choice: int) -> None:
        self.unfinished.discard(choice)
        if not self.unfinished and self._deadline is not None:
            self._deadline.cancel()
        self._ended(self, 1)

    def _expire(self, seconds: float) -> None:
        self._fail(ApiError(504, f"no whole answer within {seconds:g} s", code="deadline_exceeded"))

    def _fail(self, failure: ApiError) -> None:
        self._failure = self._failure or failure
        self._wake()
        self.cancel()


def _log(ended: Ended) -> None:
    """One line for each request, as of events: what it took and how it ended."""
    reasons = sorted({completion.finish_reason for completion in ended.completions})
    log.info(
        "%s",
        line(
            "request_ended",
            id=ended.label,
            user=ended.user,
            choices=len(ended.jobs),
            prompt_tokens=len(ended.jobs[0].tokens),
            tokens=sum(len(completion.token_ids) for completion in ended.completions),
            seconds=round(ended.seconds, 3),
            reason=",".join(reasons) if ended.failure is None else ended.failure.code,
        ),
    )
