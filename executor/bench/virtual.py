"""Both lanes in this process and a clock of their own: what the scheduler does where nothing but the steps of
the lanes takes time.

The coordinator's rounds and the workers' lanes are the real ones. A lane's order runs in a thread of its own
that only goes on when the clock says so, one at a time; so a run has one outcome, on any machine.
"""

from __future__ import annotations

import heapq
import importlib
import itertools
import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from executor import dialogue, toy_text
from executor.config import Timeouts
from executor.controller import Controller
from executor.lane import Lane, LaneEvent
from executor.lane_times import LaneTimes
from executor.lanes import WireCounts
from executor.leases import Leases
from executor.request import Request
from executor.rounds import Rounds
from executor.sampling import SamplingParams
from executor.stats import Stats
from executor.text import TextStream
from ipc.link import LinkState
from ipc.messages import Cancel, Close, Draft, Drafted, Open, Ready, SamplingSpec, Verified, Verify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from executor.setting import Setting
    from executor.stats import RoundTime
    from ipc.messages import LaneSpec, Order

_PATIENCE = 1e6


class VirtualClock:
    """Seconds. Whoever sleeps is woken in his turn, and nobody else runs until he sleeps again or ends."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleepers: list[tuple[float, int, threading.Event]] = []
        self._numbers = itertools.count()
        self._back = threading.Event()
        self._error: BaseException | None = None

    def now(self) -> float:
        return self._now

    def sleep_until(self, then: float) -> None:
        """Called in the thread of what `run` runs."""
        wake = threading.Event()
        heapq.heappush(self._sleepers, (then, next(self._numbers), wake))
        self._back.set()
        wake.wait()

    def run(self, work: Callable[[], None]) -> None:
        """Run it in a thread until it first sleeps or ends."""

        def whole() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  raised where it is waited for
                self._error = error
            finally:
                self._back.set()

        self._back.clear()
        threading.Thread(target=whole, daemon=True).start()
        self._wait()

    def advance(self) -> bool:
        """Wake whoever is next; False if nobody sleeps."""
        if not self._sleepers:
            return False
        self._now, _, wake = heapq.heappop(self._sleepers)
        self._back.clear()
        wake.set()
        self._wait()
        return True

    def _wait(self) -> None:
        """Until whoever runs sleeps or has ended. Raises what it failed of."""
        self._back.wait()
        if self._error is not None:
            raise self._error


class VirtualLanes:
    """As `executor.lanes.Lanes` for rounds: lanes that serve from the beginning, and never die."""

    def __init__(self, specs: Sequence[LaneSpec], clock: VirtualClock) -> None:
        """Of toys, the target's spec first."""
        self._clock = clock
        self.now = clock.now
        self.counts = WireCounts()
        self.times = LaneTimes()
        self._runs = {spec.lane: _runs(spec, clock) for spec in specs}
        self.all = [_serving(spec, self._runs[spec.lane].served) for spec in specs]
        self.target = self.all[0]
        self.speculator = self.all[1] if len(self.all) > 1 else None
        self.transport = SimpleNamespace(leases=Leases(_PATIENCE), arena_for=lambda *_: "")
        self._cancelled: set[int] = set()

    def tell(self, lane: Lane, order: Order) -> None:
        lane.link.passed(order)
        runs = self._runs[lane.name]
        match order:
            case Open():
                runs.open(order.sequences)
            case Close():
                runs.close(order.seqs)
            case Cancel():
                self._cancelled.add(order.order)

    def ask(self, lane: Lane, order: Draft | Verify) -> None:
        lane.in_flight, lane.reply, lane.asked_at = order.order, None, self.now()
        lane.link.passed(order)
        self._clock.run(lambda: self._answer(lane, order))

    def take(self, lane: Lane) -> Drafted | Verified | None:
        reply, lane.reply = lane.reply, None
        return reply

    def _answer(self, lane: Lane, order: Draft | Verify) -> None:
        began, runs = self.now(), self._runs[lane.name]
        fact: Drafted | Verified
        if isinstance(order, Draft):
            items = runs.draft(order.items, order.budget, "", lambda: order.order in self._cancelled)
            fact = Drafted(lane.epoch, order.order, items, self._since(began))
        else:
            verdicts, pending = runs.verify(order.items, order.prefill)
            fact = Verified(lane.epoch, order.order, verdicts, self._since(began), pending)
        lane.link.passed(fact)
        lane.reply, lane.in_flight, lane.answered_at = fact, None, self.now()
        self.times.answered(lane.name, self.now() - began, fact.busy_ns)

    def _since(self, began: float) -> int:
        return round((self.now() - began) * 1e9)


class Run(NamedTuple):
    """`setting`: the last one. hits, misses: verdicts that were guessed, and that were not."""

    round_times: list[RoundTime]
    setting: Setting
    hits: int
    misses: int


def run(specs: Sequence[LaneSpec], setting: Setting, *, adapts: bool, batch: int, new_tokens: int) -> Run:
    """Decode so many tokens of each of `batch` sequences by toys of these specs, the target's first; twice,
    of which the second time counts.

    setting, adapts: see Controller. Raises ValueError for specs that are wrong.
    """
    clock = VirtualClock()
    lanes: Any = VirtualLanes(specs, clock)  # all that rounds need of lanes
    controller = Controller(setting, adapts=adapts)
    stats = Stats()
    running: list[Request] = []

    def finish(request: Request) -> None:
        dialogue.forget(lanes, request)
        running.remove(request)

    def fail(request: Request, error: Exception) -> None:
        raise error

    patience = Timeouts(draft=_PATIENCE, draft_least=_PATIENCE, hang=_PATIENCE)
    rounds = Rounds(
        *(lanes, patience, stats, controller, 1), say=lambda request, delta: None, finish=finish, fail=fail
    )
    ready = lanes.target.ready
    rounds.vocabulary, rounds.max_model_len = ready.vocabulary, ready.max_model_len
    for first in (0, batch):
        stats.round_times.clear()
        hits, misses = stats.hits, stats.misses
        running += [_request(seq, new_tokens) for seq in range(first, first + batch)]
        while running:
            rounds.turn(running, None, hold=False)
            rounds.account()
            if not clock.advance():
                raise RuntimeError("no lane has anything to do, and sequences are left")
            rounds.collect()
        rounds.account()
        while clock.advance():  # what nobody waits for any more
            rounds.collect()
    return Run(list(stats.round_times), controller.current, stats.hits - hits, stats.misses - misses)


def _serving(spec: LaneSpec, served: Any) -> Lane:
    lane = Lane(spec)
    lane.step(LaneEvent.READY)
    lane.link.state = LinkState.IDLE
    lane.ready = Ready(lane.epoch, served.vocabulary, served.max_model_len, [])
    return lane


def _runs(spec: LaneSpec, clock: VirtualClock) -> Any:
    """What a worker would run for a lane."""
    # By name, like the process that is otherwise started: the executor depends on no worker's code.
    engine = importlib.import_module("workers.engines.toy").ToyEngine(spec, clock)
    if spec.lane == "target":
        return importlib.import_module("workers.target").TargetLane(engine, None)
    draft = importlib.import_module("workers.speculators.draft").DraftSpeculator(engine)
    return importlib.import_module("workers.speculator").SpeculatorLane(draft)


def _request(seq: int, new_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    tokens = toy_text.encode(f"prompt {seq}", 256)
    spec = SamplingSpec(0.0, 1.0, 0, 0.0, seq, 0, (), None)
    text = TextStream(toy_text.ToyDetokenizer(), ())
    return Request(seq, 0, len(tokens), tokens, params, spec, text, outputs=SimpleQueue())
