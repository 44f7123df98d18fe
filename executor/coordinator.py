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
from concurrent.futures import Future
from functools import partial
from logging import INFO, WARNING
from typing import TYPE_CHECKING

from executor import admission, dialogue
from executor.address import AttachPolicy
from executor.admission import Demand, KvRoom
from executor.collapse import Collapse
from executor.config import available_cores
from executor.errors import Closed, InvalidRequest, LaneFailed, RequestFailed, SpeclaneError
from executor.events import record
from executor.health import Health, HealthLog
from executor.lane import LaneState
from executor.lanes import Lanes
from executor.layout import contend
from executor.model import check_length
from executor.placement import ANYWHERE
from executor.rounds import Rounds
from executor.stats import Load, Stats
from executor.swapping import Swapping, check_vocabulary, fail
from ipc.codec import MAX_ARRAY_LENGTH

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from executor.capacity import MemoryLimits, MemoryPlan
    from executor.config import Hosting, Recovery, Timeouts
    from executor.controller import Controller
    from executor.lane import Lane
    from executor.lane_times import LaneTimes
    from executor.placement import Placement
    from executor.request import Completion, Delta, Request
    from executor.trace import Trace
    from executor.transport import TransportInfo, TransportPolicy
    from ipc.messages import LaneName, LaneSpec

log = logging.getLogger("speclane")


class Coordinator:
    def __init__(
        self,
        specs: Sequence[LaneSpec],
        controller: Controller,
        timeouts: Timeouts,
        recovery: Recovery,
        max_model_len: int,
        memory: MemoryLimits,
        hosting: Hosting = "process",
        max_verify_tokens: int | None = None,
        placements: Mapping[LaneName, Placement] = ANYWHERE,
        transport: TransportPolicy | None = None,
        attach: AttachPolicy = AttachPolicy(),  # noqa: B008  it cannot change
        trace: Trace | None = None,
    ) -> None:
        """`specs`: the target's first, then the speculator's if there is one. `controller`: of how
        to speculate. Lengths in tokens: `max_model_len` of the longest sequence, `max_verify_tokens` of a
        verification of all sequences (None: what the target runs in one pass). `attach`: to speculator
        servers. Raises InvalidConfig or SpeclaneError.
        """
        self._k = controller.current.k
        self.controller = controller
        self._load_seconds = timeouts.load
        self._max_sequences = specs[0].max_sequences
        self._max_verify_tokens = max_verify_tokens
        self._inbox: deque[Request] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._swaps: set[Future[None]] = set()
        self._running: list[Request] = []
        self._started = threading.Event()
        self._ended = threading.Event()
        self._failure: SpeclaneError | None = None
        self._lock = threading.Lock()  # guards what callers leave here against the moment of failure
        self._lanes = Lanes(specs, timeouts, recovery, memory, hosting, placements, transport, attach)
        self.stats = Stats()
        self._rounds = Rounds(
            self._lanes,
            timeouts,
            self.stats,
            controller,
            recovery.strikes,
            self._say,
            self._finish,
            self._fail,
            trace,
        )
        self._trace = trace
        self._swapping = Swapping(self._lanes, self._errands.append, self._swapped)
        self._speculates = len(specs) > 1
        self._health = HealthLog()
        self._fresh_collapse = partial(Collapse, recovery.collapse_rounds, recovery.collapse_share)
        self._rounds.accounting.collapse = self._fresh_collapse()
        self._outbox: deque[tuple[Request, Delta | Completion | SpeclaneError]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="speclane-coordinator", daemon=True)
        self.max_model_len = min(max_model_len, MAX_ARRAY_LENGTH)  # a history must fit into one message
        self._context = self.max_model_len  # and this is what it would be, were there memory enough
        self._room: KvRoom | None = None

    # ------------------------------------------------------------ any thread

    def start(self) -> None:
        """Returns when both lanes serve. Raises what kept them from it."""
        try:
            with self._lock:
                if self._failure is None:
                    self._thread.start()
        except RuntimeError as error:
            self._end(SpeclaneError(f"no thread for the coordinator: {error}; raise the limit on processes"))
        while not self._started.wait(timeout=1.0):
            pass  # the thread's own deadline ends this; short waits let Ctrl-C in
        if self._failure is not None:
            raise self._failure

    def check(self, prompt: int, max_tokens: int) -> None:
        """Raises InvalidRequest for lengths in tokens that cannot be run, as far as that is known yet."""
        check_length(prompt, self._context)
        if self._room is not None:
            admission.check_fits(prompt, max_tokens, self._demand(self._room), self._context)

    def submit(self, request: Request) -> None:
        """Raises Closed, or what the executor failed of; InvalidRequest as `check`."""
        self.check(request.prompt_len, request.params.max_tokens)
        self._leave(lambda: self._inbox.append(request))

    def cancel(self, request: Request) -> None:
        """Its outputs end with a Completion that says `cancelled`, unless it ends first."""
        request.cancelled = True
        with self._lock:
            if self._failure is None:
                self._lanes.wake()

    def swap_speculator(self, spec: LaneSpec | None) -> Future[None]:
        """Load another speculator beside the present one, move over, let the old one go. None: just the last.

        The future raises InvalidConfig or LaneFailed if the new one cannot serve; then all is as before.
        So it is if the future is cancelled in time. Raises Closed, or what the executor failed of.
        """
        done: Future[None] = Future()

        def leave() -> None:
            self._swaps.add(done)
            self._errands.append(lambda: self._swapping.begin(spec, self._target_vocabulary, done))

        self._leave(leave)
        done.add_done_callback(self._swaps.discard)
        return done

    def close(self) -> None:
        """Answer all requests, stop the workers. Idempotent."""
        self._closing = True
        closed = Closed("the executor was closed")
        with self._lock:
            # A signal can come between the making of the executor and its start.
            never_ran = self._failure is None and self._thread.ident is None
            if never_ran:
                self._failure = closed
            elif self._failure is None:
                self._lanes.halt()
        if never_ran:
            self._end(closed)
        self._ended.wait()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def lanes(self) -> list[Lane]:
        return self._lanes.all

    @property
    def memory(self) -> MemoryPlan | None:
        """What each lane holds of its device, and the tokens that all hold; None until that is known."""
        return self._lanes.memory

    @property
    def turned_at(self) -> float:
        """When its thread last looked after the lanes, by time.monotonic: twice a second if all is well."""
        return self._lanes.supervisor.ticked_at

    @property
    def health(self) -> Health:
        """What a user may expect now, why, and since when."""
        return self._health.now

    @property
    def deaths(self) -> dict[LaneName, int]:
        """By lane, how often it died after it had served."""
        return dict(self._lanes.supervisor.deaths)

    @property
    def restarts(self) -> dict[LaneName, int]:
        """By lane, how often it was started again or a spare took its place."""
        return dict(self._lanes.supervisor.restarts)

    @property
    def load(self) -> Load:
        """What runs and waits now."""
        running = list(self._running)  # a copy, made in one step: the coordinator's thread goes on
        return Load(len(running), len(self._inbox), sum(len(request.tokens) for request in running))

    @property
    def directory(self) -> Path:
        """Private to this executor; it is gone after the end."""
        return self._lanes.directory

    @property
    def lane_times(self) -> LaneTimes:
        """Where the time of lanes goes, since the start."""
        return self._lanes.times

    @property
    def transport(self) -> TransportInfo:
        """How tensors go from lane to lane."""
        return self._lanes.transport.info

    @property
    def slots(self) -> dict[str, int]:
        """Of what the lanes have in shared memory, how much is kept, lent, quarantined; half a second old."""
        return self._lanes.transport.slots

    @property
    def stale(self) -> int:
        """Replies that came too late or from an earlier order, and were dropped."""
        return self._lanes.counts.stale

    def _leave(self, thing: Callable[[], None]) -> None:
        """Leave something for the coordinator's thread. Raises Closed, or what the executor failed of."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            thing()
            self._lanes.wake()

    # ------------------------------------------------------------ the coordinator's thread

    def _run(self) -> None:
        failure: SpeclaneError = Closed("the executor was closed")
        try:
            self._start_lanes()
            self._started.set()
            while not self._closing:
                self._rounds.collect()
                hold = self._look_around()
                until = self._rounds.turn(self._running, self._seated(), hold=hold)
                self._rounds.account()
                self._publish()
                self._lanes.wait(until)
        except SpeclaneError as error:
            failure = error
        except Exception as error:  # the thread's edge: whoever waits must hear of it
            log.exception("the coordinator failed")
            failure = SpeclaneError(f"the coordinator failed: {type(error).__name__}: {error}")
        finally:
            self._end(failure)

    def _start_lanes(self) -> None:
        self._lanes.start(time.monotonic() + self._load_seconds)
        target, *others = (lane.ready for lane in self.lanes)
        if target is None:
            return  # closed while starting
        self._target_vocabulary = self._rounds.vocabulary = target.vocabulary
        self._rounds.verify_tokens = self._max_verify_tokens or target.pass_tokens
        self.controller.costs.rehearsed(target.step_times)
        on_cpu = [lane.spec for lane in self.lanes if lane.device_ids == ("cpu",)]
        if contend(on_cpu, available_cores()):
            self.controller.costs.contend()
        assert self._lanes.memory is not None, "lanes that serve have a plan"
        self._context = min(self.max_model_len, target.max_model_len)
        self.max_model_len = self._rounds.max_model_len = min(self._context, self._lanes.memory.tokens)
        self._room = self._lanes.target.room
        for ready in filter(None, others):
            check_vocabulary(target.vocabulary, ready.vocabulary)

    def _look_around(self) -> bool:
        """Between orders: errands, who came and went, lanes. Returns whether somebody is to make room who is
        still being verified. Raises LaneFailed for a target lost."""
        while self._errands and not self._rounds.waits_for_drafts:
            self._errands.popleft()()
        hold = self._admit()
        target = self._lanes.target
        self._health.note(
            self._lanes.all,
            expected=2 if self._speculates else 1,
            now=time.time(),
            alarm=self._rounds.alarm,
        )
        if target.state is LaneState.DOWN and "target" in self._lanes.supervisor.given_up:
            raise LaneFailed("target", target.down_because, target.stderr_tail)
        return hold

    def _end(self, failure: SpeclaneError) -> None:
        """Everybody who waits gets an answer, then the workers go."""
        with self._lock:
            self._failure = failure
            unanswered = [*self._running, *self._inbox]
            self._inbox.clear()
        self._health.end(str(failure), time.time())
        self._publish()
        for request in unanswered:
            request.outputs.put(failure)
        for swap in list(self._swaps):
            fail(swap, failure)
        try:
            self._lanes.stop()
            self._write_trace()
        finally:
            self._started.set()
            self._ended.set()

    def _write_trace(self) -> None:
        if self._trace is not None:
            try:
                self._trace.write()
            except OSError as error:
                record(WARNING, "trace_not_written", reason=str(error))

    def _admit(self) -> bool:
        """Drop what was cancelled, make room for those that go on, then let in who has room.

        Nobody leaves while he is being verified; returns whether one that is has to make room afterwards.
        """
        for request in [*self._running, *self._inbox]:
            if request.cancelled and not request.verifying:
                request.finish_reason = "cancelled"
                self._finish(request)
        assert self._room is not None, "a lane that serves was told what it holds"
        demand = self._demand(self._room)
        leaving = admission.leaving(self._running, demand)
        for request in leaving:
            if not request.verifying:
                self._preempt(request)
        while self._inbox:
            request = self._inbox[0]
            try:
                # Checked when it was submitted, but perhaps before the target had said how much it holds.
                self.check(request.prompt_len, request.params.max_tokens)
            except InvalidRequest as error:
                self._say(request, error)
            else:
                if not admission.joins(request, self._running, self._max_sequences, demand):
                    break
                self._running.append(request)
            self._inbox.popleft()
        return any(request.verifying for request in leaving)

    def _preempt(self, request: Request) -> None:
        """It waits in front of all others, and will be told to the lanes anew as far as it has got."""
        self._running.remove(request)
        dialogue.forget(self._lanes, request, for_good=False)
        request.unsettled()
        self._inbox.appendleft(request)
        self.stats.preempted += 1
        record(INFO, "sequence_preempted", seq=request.seq, tokens=len(request.tokens))

    def _demand(self, room: KvRoom) -> Demand:
        return Demand(room, self._k, self.max_model_len)

    def _swapped(self) -> None:
        self._speculates = self._lanes.speculator is not None
        self._rounds.accounting.collapse = self._fresh_collapse()

    def _seated(self) -> set[int] | None:
        """The sequences that the speculator has room for; None if there is none to ask."""
        speculator = self._lanes.speculator
        if speculator is None or speculator.room is None:
            return None
        return admission.seated(self._running, self._demand(speculator.room))

    def _fail(self, request: Request, error: RequestFailed) -> None:
        self._running.remove(request)
        dialogue.forget(self._lanes, request)
        self._say(request, error)

    def _finish(self, request: Request) -> None:
        dialogue.forget(self._lanes, request)  # first: who sees it gone may count on its room
        (self._running if request in self._running else self._inbox).remove(request)
        self._say(request, request.completion())

    def _say(self, request: Request, output: Delta | Completion | SpeclaneError) -> None:
        self._outbox.append((request, output))

    def _publish(self) -> None:
        """What was said while the lanes waited for orders. Whoever hears it wakes up, and takes time."""
        while self._outbox:
            request, output = self._outbox.popleft()
            request.outputs.put(output)
