"""Which setting to speculate with: the one that promises most tokens per second, by what was measured. Pure.

A setting's promise follows from the figures in `executor.costs` and, in so far as it was tried, from how such
promises were kept. Settings are tried for a few rounds now and then; one that disappoints is left at once.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from executor.costs import Costs, Mean, Outcome, size_class
from executor.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OFF = Setting(0)
HYSTERESIS = 1.04
"""Another setting has to promise so many times as much, if it is not to be `OFF`."""
TRIAL_ROUNDS = 4
"""Of one sequence, or of few …"""
LEAST_TRIAL_ROUNDS = 2
"""… and of many, where each round says as much as so many of one."""
TRIAL_EVERY = 1.0
"""Seconds from one trial to the next …"""
TRIAL_SHARE = 0.02
"""… or more, so that trials should lose no larger share of the time than this."""
LONGEST_WITHOUT_TRIAL = 30.0
"""… but no fewer than this, in seconds: what was seen so long ago may have been an accident."""
CHOOSE_EVERY = 0.1
"""Seconds after which promises are compared again."""
STALE_AFTER = 8.0
"""Seconds after which what was seen of a kind of setting should be looked at again …"""
WORTH_A_TRIAL = 0.8
"""… if it promises this share of the best."""
WINDOW = 0.9
"""Seconds over which what a setting brings is compared with no speculation. Texts have stretches where next
to nothing is accepted: a shorter look would take each for the end of speculation."""
LEAST_SHARE = 0.95
"""What it must bring of that, or else it is left …"""
BAN_SECONDS = 0.5
"""… for this long, and twice as long each time that it comes to that again …"""
MOST_BAN_SECONDS = 16.0
FORGIVEN_AFTER = 5.0
"""… unless it had been used for so many seconds in between."""
_LEAST_SECONDS = 1e-6
"""No round is shorter, whatever a line through few observations says."""


class Kind(NamedTuple):
    """Settings whose promises are kept alike, for so many sequences as in `costs.size_class`."""

    size: int
    speculates: bool
    hypotheses: int
    ubatches: int


@dataclass(frozen=True, slots=True)
class Round:
    """What a round came to. Times in seconds.

    setting: by which it was run, while so many sequences were `running`. outcomes: of those that were judged.
    rows: logit rows that the target ran. total: since the round before. verify: computed by the target.
    waited: for drafts. draft_steps, draft: what the speculator was asked for, and computed, in the last
    draft that was waited for. hits, misses: verdicts that were guessed, and that were not. answered: whether
    the speculator had said of each sequence what it drafts, if only that it is nothing. way: what that draft
    took beyond what was computed for it, there and back, and waiting for others; None if there was none.
    """

    setting: Setting
    running: int
    outcomes: Sequence[Outcome]
    rows: int
    total: float
    verify: float
    waited: float
    draft_steps: int
    draft: float
    hits: int
    misses: int
    answered: bool = True
    way: float | None = None

    @property
    def tokens(self) -> int:
        """Accepted ones, and the target's own."""
        return sum(outcome.tokens for outcome in self.outcomes)


@dataclass(slots=True)
class Trial:
    """Of a setting, for so many rounds that are `left`. seconds, tokens: of these rounds. lost: seconds of
    all rounds since it began beyond those in which their tokens would have come otherwise."""

    setting: Setting
    left: int
    seconds: float = 0.0
    tokens: int = 0
    lost: float = 0.0


class Controller:
    """Of one executor. `reason` says why the present setting was chosen."""

    def __init__(self, longest: Setting, *, adapts: bool) -> None:
        """`longest`: the setting to use, or if it `adapts` that with the longest drafts and most hypotheses
        that may be used."""
        self._longest = longest
        self._adapts = adapts
        self.costs = Costs()
        self.current = longest if not adapts else Setting(longest.k)
        self.reason = "fixed" if not adapts else "not measured yet"
        self._kept: dict[Kind, Mean] = {}
        self._seen: dict[Kind, float] = {}
        self._banned_until = float("-inf")
        self._ban = BAN_SECONDS
        self._since = 0.0
        self._judged_at: float | None = None
        self._spoke = True
        self._next_choice = 0.0
        self._trial: Trial | None = None
        self._next_trial = 0.0
        self._tried_at = 0.0
        self._lost = {True: 0.0, False: 0.0}
        """Seconds, by the last trial from plain decoding, which has the speculator read first, and by the
        last one from speculation."""
        self._window: deque[tuple[float, int]] = deque()
        self._size = -1

    def setting(self, sequences: int, now: float) -> Setting:
        """What to do while so many sequences run; `now` in seconds, monotonic."""
        if not self._adapts or sequences == 0:
            return self.current
        if self._size < 0:
            self._tried_at = now
        if size_class(sequences) != self._size:
            self._size = size_class(sequences)
            self._window.clear()
            self._choose(sequences, now)
        # When a round is noted the next one has its order already: of the last one nothing is to follow.
        if self._trial is not None and self._trial.left > 1:
            return self._trial.setting
        return self.current

    def note(self, done: Round, now: float) -> None:
        """A round has ended."""
        sequences = len(done.outcomes)
        if sequences == 0:
            return
        if self._trial is not None:
            self._trial.lost += done.total - done.tokens / self.promise(self.current, done.running)
        catches_up, self._spoke = done.setting.k > 0 and not self._spoke, done.setting.k > 0
        if catches_up:
            # The speculator first had to read all that was said without it, which it will not have to again.
            return
        costs = self.costs
        # While the speculator computes, too, the target may be slower.
        if done.setting.hypotheses and costs.known:
            costs.overlapped(sequences, done.rows, done.verify)
        elif done.setting.ubatches == 2 and costs.known:
            beside = costs.draft(done.running - sequences, done.setting.k)
            costs.overlapped(sequences, done.rows, done.verify, beside)
        else:
            costs.verified(sequences, done.rows, done.verify)
        costs.rest(max(0.0, done.total - done.verify - done.waited))
        if done.draft_steps:
            costs.drafted(sequences, done.draft_steps, done.draft)
        if done.way is not None:
            costs.fetched(done.way)
        if done.hits + done.misses:
            costs.guessed(done.setting.hypotheses, hits=done.hits, misses=done.misses)
        # Without speculation, too: what was seen last fades, and what is usual is to be expected again.
        costs.passed(0.0 if self._judged_at is None else now - self._judged_at)
        self._judged_at = now
        if done.answered and done.setting.k:
            for outcome in done.outcomes:
                costs.ended(outcome.drafted, done.setting.k)
                # What is prepared can be cut short; what is waited for ends where its speculator wants.
                costs.judged(outcome, outcome.drafted if done.setting.hypotheses else done.setting.k)
        # Where verdicts are guessed or parts take turns, few rounds have all sequences.
        several = done.setting.hypotheses > 0 or done.setting.ubatches == 2
        if self._adapts and (sequences == done.running or several):
            self._judge(done, now)
            self._look(done.setting, done.running, now)

    def worth_finishing(self, sequences: int) -> bool:
        """Whether drafts that are being prepared are worth waiting for once their verdicts are there.

        Another step of the speculator costs what could be decoded meanwhile, and brings a token if the
        verdict was guessed and all guesses before it are right.
        """
        costs, k = self.costs, self.current.k
        if not costs.known or k == 0:
            return False
        reach = costs.tokens(k) - costs.tokens(k - 1)
        brings = costs.hit(self.current.hypotheses) * reach * costs.verify_drafts(sequences, k)
        return brings > costs.tokens(k) * costs.draft(sequences, k) / k

    def worth_waiting(self, ready: int, missing: int) -> bool:
        """Whether those that have a draft are to wait for the others', rather than go without them.

        All after a wait are more tokens than those that are ready at once, but in more time.
        """
        costs, sequences, k = self.costs, ready + missing, self.current.k
        if ready == 0 or not costs.known or k == 0:
            return True
        verify = costs.verify_drafts(sequences, k) + costs.between
        wait = costs.draft(missing, k) + costs.way
        return sequences * verify > ready * (verify + wait)

    def price_of_waiting(self, k: int, sequences: int) -> float:
        """How many tokens are lost while all sequences wait for a draft of k of one of them; without end as
        long as that is not known."""
        costs = self.costs
        if not costs.known or k == 0:
            return math.inf
        verify = costs.verify_drafts(sequences, k) + costs.between
        return sequences * costs.tokens(k) * (costs.draft(1, k) + costs.way) / verify

    # ------------------------------------------------------------ judging

    def _judge(self, done: Round, now: float) -> None:
        """How the promise was kept."""
        sequences = done.running
        kind = _kind(done.setting, sequences)
        self._seen[kind] = now
        if self.costs.known and done.answered:
            # Rounds differ by luck in what is accepted, which is in the figures already: compare times.
            promised = self._seconds(done.setting, sequences)
            if done.setting.ubatches == 1:  # with two, that is of a part
                promised *= len(done.outcomes) / sequences
            if done.total > 0:
                self._kept.setdefault(kind, Mean(1.0, 0.9)).note(min(2.0, promised / done.total))
        if self._trial is not None and done.setting == self._trial.setting:
            self._trial.seconds += done.total
            self._trial.tokens += done.tokens
        if done.setting == self.current:
            self._window.append((done.total, done.tokens))
            while sum(total for total, _ in self._window) > WINDOW and len(self._window) > 1:
                self._window.popleft()

    def _look(self, setting: Setting, sequences: int, now: float) -> None:
        if self._trial is not None:
            own = setting == self._trial.setting  # the round before may have been under way
            self._trial.left -= own
            if self._trial.left <= 0 or (self._trial.seconds and not own):
                self._end_trial(self._trial, sequences, now)
            return
        if self._disappoints(sequences):
            self._ban = BAN_SECONDS if now - self._since > FORGIVEN_AFTER else self._ban
            self._banned_until = now + self._ban
            self._ban = min(2 * self._ban, MOST_BAN_SECONDS)
            self._use(OFF, "it brought less than no speculation", now)
            self._next_trial = max(self._next_trial, now + TRIAL_EVERY)
        elif now >= self._next_choice:
            promises = self._choose(sequences, now)
            if promises and now >= self._next_trial:
                self._try_another(promises, sequences, now)

    def _use(self, setting: Setting, reason: str, now: float) -> None:
        if (setting == OFF) != (self.current == OFF):
            self._since = now
        self.current, self.reason = setting, reason
        self._window.clear()

    def _end_trial(self, trial: Trial, sequences: int, now: float) -> None:
        """What it brought counts for more than what figures from other times promise."""
        self._trial = None
        self._lost[self.current == OFF] = trial.lost
        brought = trial.tokens / trial.seconds if trial.seconds else 0.0
        if self.current == OFF and brought > HYSTERESIS * self.promise(OFF, sequences):
            self._use(trial.setting, "it brought more than no speculation", now)
        else:
            self._choose(sequences, now)

    def _disappoints(self, sequences: int) -> bool:
        seconds = sum(total for total, _ in self._window)
        if self.current == OFF or seconds < 0.9 * WINDOW or not self.costs.comparable:
            return False
        brought = sum(tokens for _, tokens in self._window) / seconds
        return brought < LEAST_SHARE * self.promise(OFF, sequences)

    # ------------------------------------------------------------ choosing

    def promise(self, setting: Setting, sequences: int) -> float:
        """Tokens per second that a setting should bring, all sequences together."""
        # Plain rounds are measured as they are; what was promised of them before they were seen is no matter.
        kept = self._kept.get(_kind(setting, sequences)) if setting.k else None
        share = kept.value if kept is not None else 1.0
        parts = 2 if setting.ubatches == 2 else 1
        expected = sequences * self.costs.tokens(setting.k) / parts
        return share * expected / max(_LEAST_SECONDS, self._seconds(setting, sequences))

    def _seconds(self, setting: Setting, sequences: int) -> float:
        """Of a round. With two ubatches it has half of the sequences, and two rounds run at once."""
        costs, k = self.costs, setting.k
        if k == 0:
            return costs.verify(sequences, sequences) + costs.between
        if setting.ubatches == 2:
            half = -(-sequences // 2)
            verify = costs.verify_drafts(half, k) + costs.between
            # Each lane does one of the two parts while the other lane does the other.
            computed = costs.draft(half, k)
            return max(verify, computed + costs.way) + (costs.contention - 1) * min(verify, computed)
        verify = costs.verify_drafts(sequences, k) + costs.between
        draft = costs.draft(sequences, k) + costs.way
        if setting.hypotheses == 0:
            return verify + draft
        verify += (costs.contention - 1) * (verify - costs.between)
        hit = costs.hit(setting.hypotheses)
        # One that was not guessed is waited for by all, or sits out a round while its draft is made.
        waits = verify + (1 - hit**sequences) * draft
        return waits if sequences == 1 else min(waits, verify * (2 - hit))

    def _choose(self, sequences: int, now: float) -> dict[Setting, float]:
        """Returns what each candidate promises; nothing as long as they cannot be compared."""
        self._next_choice = now + CHOOSE_EVERY
        if not self.costs.comparable:
            return {}
        # Kinds of speculation differ in their time, which is known, and share what is accepted.
        promises = {setting: self.promise(setting, sequences) for setting in self._candidates(sequences)}
        best = OFF if now < self._banned_until else max(promises, key=promises.__getitem__)
        enough = self.promise(self.current, sequences) * (1.0 if best == OFF else HYSTERESIS)
        if best != self.current and promises[best] > enough:
            self._use(best, "", now)
        share = self.promise(self.current, sequences) / promises[OFF]
        self.reason = f"promises {share:.2f} times plain decoding"
        return promises

    def _last(self, setting: Setting, sequences: int) -> float:
        """When settings of its kind were last seen."""
        return self._seen.get(_kind(setting, sequences), float("-inf"))

    def _candidates(self, sequences: int) -> list[Setting]:
        longest = self._longest
        lengths = sorted({k for k in (1, 2, 3, 5, 7, 10, 14, 20, 32) if k < longest.k} | {longest.k})
        budgets = sorted({0, min(1, longest.hypotheses), longest.hypotheses})
        parts = (1, 2) if sequences > 1 and longest.ubatches > 1 else (1,)
        return [OFF] + [Setting(k, n, parts_) for k in lengths for n in budgets for parts_ in parts]

    def _try_another(self, promises: Mapping[Setting, float], sequences: int, now: float) -> None:
        """Now and then a kind of setting that was not seen for long: plain rounds, or the best of a kind.

        So much time has to have passed that what it should cost, or what the last such did, is but a small
        share of it.
        """
        self._next_trial = now + CHOOSE_EVERY
        trial = self._worth_trying(promises, sequences, now)
        if trial is None:
            return
        rounds = max(LEAST_TRIAL_ROUNDS, TRIAL_ROUNDS // sequences) * trial.ubatches
        lost = 0.0  # without plain rounds nothing is known of what they would bring
        if trial != OFF or _kind(OFF, sequences) in self._seen:
            worse = 1 - promises[trial] / self.promise(self.current, sequences)
            lost = max(self._lost[self.current == OFF], worse * rounds * self._seconds(trial, sequences))
        if now - self._tried_at >= min(lost / TRIAL_SHARE, LONGEST_WITHOUT_TRIAL):
            self._trial = Trial(trial, rounds)
            self._tried_at, self._next_trial = now, now + TRIAL_EVERY
            if self.current == OFF:
                self.costs.doubt_drafts()

    def _worth_trying(self, promises: Mapping[Setting, float], sequences: int, now: float) -> Setting | None:
        """The one seen longest ago that may be better than the present one, or plain decoding to compare."""
        if self.current == OFF:
            # By what it was left for, only the shortest drafts look good.
            return max((s for s in promises if s.k >= min(3, self._longest.k)), key=promises.__getitem__)
        enough = WORTH_A_TRIAL * max(promises.values())
        stale = [
            setting
            for setting, promise in promises.items()
            if now - self._last(setting, sequences) > STALE_AFTER
            and setting != self.current
            and (promise > enough or setting == OFF)
        ]
        oldest = min((self._last(setting, sequences) for setting in stale), default=0.0)
        them = [s for s in stale if self._last(s, sequences) == oldest]
        return OFF if OFF in them else max(them, key=promises.__getitem__, default=None)


def _kind(setting: Setting, sequences: int) -> Kind:
    return Kind(size_class(sequences), setting.k > 0, min(setting.hypotheses, 2), setting.ubatches)
