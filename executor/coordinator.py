"""The coordinator: the only place that knows tokens. Runs rounds in its own thread.

One round is a straight line: plan → draft → verify → commit → publish. Requests come in by `submit` from any
thread; what happens to them goes out by each request's own queue. Talks to the workers through
`executor.lanes`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from executor.commit import commit
from executor.errors import Closed, InvalidConfig, InvalidRequest, LaneFailed, SpeclaneError
from executor.lanes import Lanes, NoReply
from executor.model import check_length
from executor.plan import Limits, plan_round
from executor.request import Acceptance
from ipc.codec import MAX_ARRAY_LENGTH
from ipc.messages import (
    Close,
    Draft,
    Drafted,
    DraftItem,
    Open,
    OpenedSequence,
    Verified,
    Verify,
    VerifyItem,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.config import Timeouts
    from executor.lane import Lane
    from executor.plan import Step
    from executor.request import Request
    from ipc.messages import DraftedItem, LaneSpec, VerifiedItem, Vocabulary

log = logging.getLogger("speclane")

_IDLE_SECONDS = 60.0
_ROUNDS_KEPT = 4096


class RoundTime(NamedTuple):
    """One round, in nanoseconds: as a whole, and how long each lane computed in it."""

    total: int
    draft: int
    verify: int
    sequences: int


@dataclass(slots=True)
class Stats:
    """Totals since start: drafts `invalid` for what they held, drafts `missed` because they did not come."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    invalid: int = 0
    missed: int = 0
    rounds: int = 0
    round_times: deque[RoundTime] = field(default_factory=lambda: deque(maxlen=_ROUNDS_KEPT))


class Coordinator:
    def __init__(self, specs: Sequence[LaneSpec], k: int, timeouts: Timeouts, max_model_len: int) -> None:
        """`specs`: the target's first, then the speculator's if there is one. Lengths in tokens: `k` of the
        longest draft, `max_model_len` of the longest sequence. Raises InvalidConfig or SpeclaneError."""
        self._k = k
        self._timeouts = timeouts
        self._max_sequences = specs[0].max_sequences
        self._inbox: deque[Request] = deque()
        self._running: list[Request] = []
        self._orders = 0
        self._started = threading.Event()
        self._ended = threading.Event()
        self._failure: SpeclaneError | None = None
        self._lock = threading.Lock()  # guards `_inbox` against the moment of failure
        self._lanes = Lanes(specs)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="speclane-coordinator", daemon=True)
        self.stats = Stats()
        self.max_model_len = min(max_model_len, MAX_ARRAY_LENGTH)  # a history must fit into one message

    # ------------------------------------------------------------ any thread

    def start(self) -> None:
        """Returns when both lanes serve. Raises what kept them from it."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self._end(SpeclaneError(f"no thread for the coordinator: {error}; raise the limit on processes"))
        while not self._started.wait(timeout=1.0):
            pass  # the thread's own deadline ends this; short waits let Ctrl-C in
        if self._failure is not None:
            raise self._failure

    def submit(self, request: Request) -> None:
        """Raises Closed, or what the executor failed of."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._inbox.append(request)
            self._lanes.wake()

    def cancel(self, request: Request) -> None:
        """Its outputs end with a Completion that says `cancelled`, unless it ends first."""
        request.cancelled = True
        with self._lock:
            if self._failure is None:
                self._lanes.wake()

    def close(self) -> None:
        """Answer all requests, stop the workers. Idempotent."""
        self._closing = True
        with self._lock:
            if self._failure is None:
                self._lanes.halt()
        self._ended.wait()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def lanes(self) -> list[Lane]:
        return self._lanes.all

    @property
    def stale(self) -> int:
        """Replies that came too late or from an earlier order, and were dropped."""
        return self._lanes.counts.stale

    # ------------------------------------------------------------ the coordinator's thread

    def _run(self) -> None:
        failure: SpeclaneError = Closed("the executor was closed")
        try:
            self._start_lanes()
            self._started.set()
            while not self._closing:
                self._admit()
                if self._running:
                    self._round()
                else:
                    self._lanes.wait(time.monotonic() + _IDLE_SECONDS)
        except SpeclaneError as error:
            failure = error
        except Exception as error:  # the thread's edge: whoever waits must hear of it
            log.exception("the coordinator failed")
            failure = SpeclaneError(f"the coordinator failed: {type(error).__name__}: {error}")
        finally:
            self._end(failure)

    def _start_lanes(self) -> None:
        self._lanes.start(time.monotonic() + self._timeouts.load)
        target, *others = (lane.ready for lane in self.lanes)
        if target is None:
            return  # closed while starting
        self.max_model_len = min(self.max_model_len, target.max_model_len)
        for ready in filter(None, others):
            _check_vocabulary(target.vocabulary, ready.vocabulary)

    def _end(self, failure: SpeclaneError) -> None:
        """Everybody who waits gets an answer, then the workers go."""
        with self._lock:
            self._failure = failure
            unanswered = [*self._running, *self._inbox]
            self._inbox.clear()
        for request in unanswered:
            request.outputs.put(failure)
        try:
            self._lanes.stop(self._timeouts.stop)
        finally:
            self._started.set()
            self._ended.set()

    def _admit(self) -> None:
        """Drop what was cancelled, then take waiting requests while there is room."""
        for request in [request for request in (*self._running, *self._inbox) if request.cancelled]:
            request.finish_reason = "cancelled"
            self._finish(request)
        while self._inbox and len(self._running) < self._max_sequences:
            request = self._inbox.popleft()
            try:
                # Checked by the caller, but perhaps before the target had said how much it holds.
                check_length(len(request.tokens), self.max_model_len)
            except InvalidRequest as error:
                request.outputs.put(error)
            else:
                self._running.append(request)

    def _round(self) -> None:
        began = time.perf_counter_ns()
        busy_before = [lane.busy_ns for lane in self.lanes]

        plan = plan_round(self._running, self._limits())
        drafts = self._draft(plan)
        verdicts = self._verify(plan, drafts)
        if verdicts is None:
            return
        for step in plan:
            request, draft = step.request, drafts.get(step.request.seq, [])
            verdict = verdicts[request.seq]
            delta = commit(request, draft, verdict, self.max_model_len)
            request.outputs.put(delta)
            self.stats.acceptance.record(len(draft), verdict.n_accepted)
            if request.finish_reason is not None:
                self._finish(request)

        busy = [lane.busy_ns - before for lane, before in zip(self.lanes, busy_before, strict=True)]
        self.stats.rounds += 1
        total = time.perf_counter_ns() - began
        self.stats.round_times.append(RoundTime(total, sum(busy[1:]), busy[0], len(plan)))

    # ------------------------------------------------------------ steps of a round

    def _limits(self) -> Limits:
        speculator = self._speculator()
        if speculator is not None and speculator.abandoned and speculator.overdue(self._timeouts.hang):
            self._lanes.take_down(speculator, f"owed an answer for {self._timeouts.hang:g} s")
        ready = speculator.ready if speculator is not None and speculator.idle else None
        return Limits(self._k, self.max_model_len, ready.max_model_len if ready is not None else 0)

    def _draft(self, plan: Sequence[Step]) -> dict[int, list[int]]:
        """Drafts by sequence. One without a draft takes a plain step, whatever became of the speculator."""
        asked = {step.request.seq: step for step in plan if step.k > 0}
        speculator = self._speculator()
        if not asked or speculator is None:
            return {}
        self._open(speculator, [step.request for step in asked.values()])
        items = [
            DraftItem(r.seq, r.gen, len(r.tokens), self._since(speculator, r), k) for r, k in asked.values()
        ]
        self._lanes.ask(speculator, Draft(speculator.epoch, self._next_order(), items))
        reply = self._lanes.reply(speculator, time.monotonic() + self._timeouts.draft)
        if isinstance(reply, Drafted):
            return self._usable_drafts(asked, reply.items)
        self.stats.missed += len(asked)
        return {}

    def _usable_drafts(self, asked: dict[int, Step], items: Sequence[DraftedItem]) -> dict[int, list[int]]:
        """Only what was asked for, of this generation and length, of tokens that the target knows."""
        target = self.lanes[0].ready
        assert target is not None, "rounds run after start"
        drafts = {}
        for item in items:
            step = asked.get(item.seq)
            if step is None or (item.gen, item.base_len) != (step.request.gen, len(step.request.tokens)):
                self._lanes.counts.stale += 1
            elif len(item.tokens) > step.k or not _known(item.tokens, target.vocabulary.size):
                self.stats.invalid += 1
            else:
                drafts[item.seq] = item.tokens
        return drafts

    def _verify(self, plan: Sequence[Step], drafts: dict[int, list[int]]) -> dict[int, VerifiedItem] | None:
        """A verdict for every sequence of the plan; None when the executor is closing. Raises LaneFailed."""
        target = self.lanes[0]
        self._open(target, [step.request for step in plan])
        items = [
            VerifyItem(r.seq, r.gen, len(r.tokens), self._since(target, r), drafts.get(r.seq, []))
            for r, _ in plan
        ]
        self._lanes.ask(target, Verify(target.epoch, self._next_order(), items))
        reply = self._lanes.reply(target, time.monotonic() + self._timeouts.verify)
        if not isinstance(reply, Verified):
            if reply == NoReply("halted"):
                return None
            raise self._target_failed(f"no verdict within {self._timeouts.verify:g} s")
        verdicts = {item.seq: item for item in reply.items}
        for item in items:
            self._check_verdict(item, verdicts.get(item.seq))
        return verdicts

    def _check_verdict(self, asked: VerifyItem, verdict: VerifiedItem | None) -> None:
        target = self.lanes[0]
        assert target.ready is not None, "rounds run after start"
        if (
            verdict is None
            or (verdict.gen, verdict.base_len) != (asked.gen, asked.base_len)
            or not 0 <= verdict.n_accepted <= len(asked.draft)
            or not 0 <= verdict.next_token < target.ready.vocabulary.size
            or len(verdict.logprobs) not in (0, verdict.n_accepted + 1)
        ):
            raise self._target_failed(f"impossible verdict {verdict} on {asked}")

    def _target_failed(self, reason: str) -> LaneFailed:
        """Takes the target down, unless it is down already for a reason of its own."""
        target = self.lanes[0]
        self._lanes.take_down(target, reason)
        return LaneFailed("target", target.down_because, target.stderr_tail)

    def _finish(self, request: Request) -> None:
        (self._running if request in self._running else self._inbox).remove(request)
        for lane in self.lanes:
            if lane.told.pop(request.seq, None) is not None:
                self._lanes.tell(lane, Close(lane.epoch, [request.seq]))
        request.outputs.put(request.completion())

    # ------------------------------------------------------------ what a lane knows

    def _open(self, lane: Lane, requests: Sequence[Request]) -> None:
        """Tell a lane of sequences it has not met, all committed tokens at once."""
        for r in requests:
            if r.seq not in lane.told:
                # A message each, since frames are capped and long histories together could pass the cap.
                opened = OpenedSequence(r.seq, r.gen, r.tokens, r.prompt_len, r.spec)
                self._lanes.tell(lane, Open(lane.epoch, [opened]))
                lane.told[r.seq] = len(r.tokens)

    def _since(self, lane: Lane, request: Request) -> list[int]:
        """The committed tokens that are news to a lane, which are none any more once this is sent."""
        known = lane.told[request.seq]
        lane.told[request.seq] = len(request.tokens)
        return request.tokens[known:]

    def _speculator(self) -> Lane | None:
        return self.lanes[1] if len(self.lanes) > 1 else None

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders


def _check_vocabulary(target: Vocabulary, speculator: Vocabulary) -> None:
    """Raises InvalidConfig if the lanes do not mean the same by a token id. Size 0: has no own vocabulary."""
    if speculator.size == 0 or target.fingerprint == speculator.fingerprint:
        return
    if (target.fingerprint and speculator.fingerprint) or target.size != speculator.size:
        raise InvalidConfig(
            "speculator",
            f"vocabularies differ: target {target.size} tokens ({target.fingerprint[:12]}), "
            f"speculator {speculator.size} ({speculator.fingerprint[:12]}); "
            "use a speculator with the target's tokenizer, or --speculator ngram",
        )


def _known(tokens: Sequence[int], vocabulary_size: int) -> bool:
    return not tokens or (min(tokens) >= 0 and max(tokens) < vocabulary_size)
