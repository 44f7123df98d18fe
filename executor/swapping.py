"""Another speculator in the midst of serving: it loads beside the present one, then takes its place.

Runs in the coordinator's thread, and moves over between rounds, so that no round loses its drafts. Knows no
requests: a new speculator has been told nothing, so the draft step brings it up to date like one that was
started again.
"""

from __future__ import annotations

from logging import INFO
from typing import TYPE_CHECKING

from executor.errors import InvalidConfig, LaneFailed
from executor.events import record

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from executor.errors import SpeclaneError
    from executor.lane import Lane
    from executor.lanes import Lanes
    from ipc.messages import LaneSpec, Vocabulary


class Swapping:
    def __init__(
        self,
        lanes: Lanes,
        between_rounds: Callable[[Callable[[], None]], None],
        on_swapped: Callable[[], None],
    ) -> None:
        """`between_rounds` has something done when no round is under way."""
        self._lanes = lanes
        self._between_rounds = between_rounds
        self._on_swapped = on_swapped

    def begin(self, spec: LaneSpec | None, vocabulary: Vocabulary, done: Future[None]) -> None:
        """`done` is set when the new one has taken over, or fails of what kept it from that.

        `vocabulary`: the target's.
        """
        if spec is not None:
            try:
                self._lanes.supervisor.bring_in(
                    spec, lambda lane: self._between_rounds(lambda: self._arrived(lane, vocabulary, done))
                )
            except LaneFailed as error:
                fail(done, error)
        elif done.set_running_or_notify_cancel():
            before = self._lanes.speculator
            self._let_go(self._lanes.supervisor.dismiss("speculator"))
            self._swapped(before, None)
            done.set_result(None)

    def _arrived(self, lane: Lane, vocabulary: Vocabulary, done: Future[None]) -> None:
        """The new speculator serves, or is down."""
        if not lane.serving or lane.ready is None:
            fail(done, LaneFailed(lane.name, lane.down_because, lane.stderr_tail))
            return
        try:
            check_vocabulary(vocabulary, lane.ready.vocabulary)
        except InvalidConfig as error:
            self._lanes.retire(lane)
            fail(done, error)
            return
        if not done.set_running_or_notify_cancel():
            self._lanes.retire(lane)
            return
        before = self._lanes.speculator
        self._let_go(self._lanes.supervisor.replace(lane))
        self._swapped(before, lane)
        done.set_result(None)

    def _let_go(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            self._lanes.retire(lane)

    def _swapped(self, before: Lane | None, now: Lane | None) -> None:
        record(INFO, "speculator_swapped", before=_what(before), now=_what(now), epoch=now and now.epoch)
        self._on_swapped()


def fail(swap: Future[None], error: SpeclaneError) -> None:
    """Unless nobody wants it any more."""
    if swap.set_running_or_notify_cancel():
        swap.set_exception(error)


def check_vocabulary(target: Vocabulary, speculator: Vocabulary) -> None:
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


def _what(speculator: Lane | None) -> str:
    return "off" if speculator is None else speculator.spec.model or speculator.spec.engine
