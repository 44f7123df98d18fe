"""The controller in a world of known costs and acceptance: what it settles on, and what it never does."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from executor.controller import OFF, Controller, Round
from executor.costs import Costs, Line, Outcome, size_class
from executor.setting import Setting
from ipc.messages import StepTime


@dataclass
class World:
    """Seconds: of a verification `fixed` + rows · `row`; of a draft step `step`. `right`: acceptance."""

    fixed: float = 0.010
    row: float = 0.0001
    step: float = 0.001
    right: float = 0.8
    hit: float = 0.6
    between: float = 0.0005
    contention: float = 1.0
    way: float = 0.0005
    """Of a draft there and back, beyond its computing."""
    unread: float = 0.0
    """What its first draft costs besides, after some rounds without: it has to read what was said."""

    def seconds(self, setting: Setting, sequences: int, hits: float) -> float:
        """`hits`: verdicts that were guessed; the others wait, all or alone."""
        if setting.k == 0:
            return self.fixed + self.row * sequences + self.between
        verify = self.fixed + self.row * sequences * (setting.k + 1) + self.between
        draft = setting.k * self.step + self.way
        if not setting.hypotheses:
            return verify + draft
        verify *= self.contention
        wait = draft if hits < sequences else 0.0
        return verify + (wait if sequences == 1 else min(wait, verify * (1 - hits / sequences)))

    def best(self, settings: list[Setting], sequences: int) -> float:
        """Tokens per second of the best fixed setting."""
        rates = []
        for setting in settings:
            expected = sum(self.right**i for i in range(setting.k + 1))
            chances = [
                math.comb(sequences, n) * self.hit**n * (1 - self.hit) ** (sequences - n)
                for n in range(sequences + 1)
            ]
            seconds = sum(
                chance * self.seconds(setting, sequences, hits) for hits, chance in enumerate(chances)
            )
            rates.append(sequences * expected / seconds)
        return max(rates)


class Run:
    def __init__(self, controller: Controller, world: World, sequences: int, seed: int = 0) -> None:
        self.controller, self.world, self.sequences = controller, world, sequences
        self.random = random.Random(seed)
        self.now = 0.0
        self.trace: list[tuple[float, int, Setting]] = []

    def until(self, end: float) -> Run:
        while self.now < end:
            self.round()
        return self

    def round(self) -> None:
        world, sequences = self.world, self.sequences
        setting = self.controller.setting(sequences, self.now)
        outcomes = []
        for _ in range(sequences):
            accepted = 0
            while accepted < setting.k and self.random.random() < world.right:
                accepted += 1
            outcomes.append(Outcome(setting.k, accepted))
        hits = sum(self.random.random() < world.hit for _ in range(sequences)) if setting.hypotheses else 0
        total = world.seconds(setting, sequences, hits)
        waits = setting.k > 0 and hits < sequences
        reading = 0.0
        if setting.k and len(self.trace) and self.trace[-1][2].k == 0:
            reading = self.world.unread
            total += reading
        rows = sequences * (setting.k + 1)
        verify = world.fixed + world.row * rows
        self.now += total
        self.controller.note(
            Round(
                setting=setting,
                running=sequences,
                outcomes=outcomes,
                rows=rows,
                total=total,
                verify=verify * (world.contention if setting.hypotheses else 1.0),
                waited=setting.k * world.step + reading + world.way if waits else 0.0,
                draft_steps=setting.k if waits else 0,
                draft=setting.k * world.step + reading if waits else 0.0,
                hits=hits,
                misses=sequences - hits if setting.hypotheses else 0,
                way=world.way if waits else None,
            ),
            self.now,
        )
        self.trace.append((self.now, sum(outcome.accepted + 1 for outcome in outcomes), setting))

    def rate(self, since: float, until: float) -> float:
        return sum(tokens for at, tokens, _ in self.trace if since <= at < until) / (until - since)


def adaptive() -> Controller:
    return Controller(Setting(7, 8, 1), adapts=True)


@pytest.mark.parametrize("sequences", [1, 4, 16])
@pytest.mark.parametrize(
    "world",
    [
        World(),
        World(right=0.4),
        World(step=0.004, hit=0.8),
        World(row=0.002),
        World(step=0.004, contention=1.6),
    ],
    ids=["usual", "weak", "slow draft", "dear rows", "contention"],
)
def test_it_comes_within_a_twentieth_of_the_best_fixed_setting(world, sequences):
    controller = adaptive()
    run = Run(controller, world, sequences).until(20.0)
    candidates = controller._candidates(sequences)
    assert run.rate(5.0, 20.0) >= 0.95 * world.best(candidates, sequences)


@pytest.mark.parametrize("way", [0.001, 0.005, 0.02, 0.05])
@pytest.mark.parametrize("fixed", [0.005, 0.025, 0.1])
def test_a_speculator_that_is_far_away_is_asked_where_that_pays(fixed, way):
    world = World(fixed=fixed, row=0.0, step=0.0005, way=way)
    controller = Controller(Setting(7, 0, 1), adapts=True)
    run = Run(controller, world, 1).until(30.0)
    best = world.best(controller._candidates(1), 1)
    assert run.rate(3.0, 30.0) >= max(0.95 * world.best([OFF], 1), 0.8 * best)


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("way", [0.0005, 0.02])
def test_a_useless_speculator_costs_less_than_a_twentieth(sequences, way):
    world = World(right=0.0, step=0.002, way=way)
    run = Run(adaptive(), world, sequences).until(20.0)
    plain = world.best([OFF], sequences)
    assert run.rate(2.0, 20.0) >= 0.95 * plain
    for start in range(2, 19):  # a trial over a long way is a larger part of its second
        assert run.rate(start, start + 1) >= (0.9 if way < 0.01 else 0.8) * plain
    assert run.controller.current == OFF


@pytest.mark.parametrize("unread", [0.0, 0.05])
def test_it_settles_again_within_three_seconds(unread):
    world = World(unread=unread)
    run = Run(adaptive(), world, 1).until(10.0)
    assert run.controller.current.k > 0
    world.right = 0.02
    run.until(20.0)
    assert run.rate(13.0, 20.0) >= 0.95 * world.best([OFF], 1)
    world.right = 0.9
    run.until(40.0)
    candidates = run.controller._candidates(1)
    assert run.rate(23.0, 40.0) >= 0.93 * world.best(candidates, 1)


@pytest.mark.parametrize("seed", range(3))
def test_texts_with_good_and_bad_stretches(seed):
    """On two cores that both lanes compute with in turns: neither off for long, nor led astray."""
    stretches = random.Random(seed).choices([0.1, 0.4, 0.7, 0.9], k=200)

    def rate(controller: Controller) -> float:
        world = World(fixed=0.0245, row=0.0006, step=0.0013, hit=0.3, between=0.001, contention=1.5)
        run = Run(controller, world, 1, seed)
        while run.now < 60.0:
            world.right = stretches[int(run.now / 0.3)]
            run.round()
        return run.rate(5.0, 60.0)

    fixed = [rate(Controller(Setting(k), adapts=False)) for k in (0, 1, 2, 3, 5, 7)]
    assert rate(adaptive()) >= 0.9 * max(fixed)


def test_what_was_not_seen_lately_is_taken_from_the_place_before():
    costs = Costs()
    for _ in range(100):
        costs.judged(Outcome(3, 3), 3)
    assert costs.acceptance(2) == pytest.approx(1.0, abs=0.05)
    for _ in range(200):
        costs.passed(0.04)
        costs.judged(Outcome(1, 0), 1)
    assert costs.acceptance(0) == pytest.approx(0.05, abs=0.05)
    assert costs.acceptance(2) == pytest.approx(costs.acceptance(0), abs=0.03)


def test_what_was_seen_in_a_bad_stretch_is_not_believed_for_ever():
    """Without speculation nothing is judged: what is usual is then expected again, not what was seen last."""
    costs = Costs()
    for right in (1, 1, 0) * 100:
        costs.passed(0.03)
        costs.judged(Outcome(1, right), 1)
    usual = costs.acceptance(0)
    for _ in range(30):
        costs.passed(0.03)
        costs.judged(Outcome(1, 0), 1)
    assert costs.acceptance(0) < 0.3
    for _ in range(150):
        costs.passed(0.03)
    assert usual - 0.2 < costs.acceptance(0) < usual


def rehearsed(world: World, most: int) -> Controller:
    controller = adaptive()
    shapes = [(n, n * width) for width in (1, 8) for n in (most, 1)]
    controller.costs.rehearsed([StepTime(n, rows, world.fixed + world.row * rows) for n, rows in shapes])
    return controller


@pytest.mark.parametrize("sequences", [1, 3, 8, 16])
def test_what_the_target_rehearsed_is_not_found_out_at_its_expense(sequences):
    """Rows so dear that nothing pays: plain from the first round on, and trials are few."""
    world = World(fixed=0.002, row=0.010, right=0.5)
    run = Run(rehearsed(world, 16), world, sequences).until(10.0)
    assert run.trace[0][2] == OFF
    assert run.rate(0.0, 10.0) >= 0.95 * world.best([OFF], sequences)


@pytest.mark.parametrize("sequences", [1, 8])
def test_where_it_pays_by_what_was_rehearsed_it_speculates_at_once(sequences):
    world = World(step=0.0005)
    controller = rehearsed(world, 16)
    run = Run(controller, world, sequences).until(10.0)
    assert all(setting.k >= 3 for at, _, setting in run.trace if at < 0.1)
    assert run.rate(0.0, 10.0) >= 0.93 * world.best(controller._candidates(sequences), sequences)


@pytest.mark.parametrize("unread", [0.1, 0.4])
def test_a_trial_that_cost_much_is_not_soon_followed_by_another(unread):
    """By what it did cost, since that is more than it was to."""
    world = World(fixed=0.01, row=0.008, right=0.4, unread=unread)
    run = Run(rehearsed(world, 8), world, 8).until(100.0)
    assert run.rate(40.0, 100.0) >= 0.95 * world.best([OFF], 8)
    assert any(setting != OFF for at, _, setting in run.trace if at > 40.0)


def test_time_without_rounds_is_not_put_down_to_a_trial():
    """Nobody asked for anything, or prompts were read."""
    world = World(fixed=0.01, row=0.008, right=0.4)
    after: list[float] = []
    for pause in (0.0, 20.0):
        run = Run(rehearsed(world, 8), world, 8)
        run.until(60.0)
        while run.controller.setting(8, run.now) == OFF:
            run.round()
        run.now += pause
        while run.controller.setting(8, run.now) != OFF:
            run.round()
        ended = run.now
        while run.controller.setting(8, run.now) == OFF:
            run.round()
        after.append(run.now - ended)
    assert after[1] <= after[0] + 0.5


def test_a_slow_first_draft_is_no_verdict_on_the_speculator():
    world = World()
    run = Run(rehearsed(world, 16), world, 1)
    world.step = 0.3
    run.round()
    world.step = 0.001
    run.until(10.0)
    assert run.rate(3.0, 10.0) >= 0.93 * world.best(run.controller._candidates(1), 1)


def test_what_was_slow_for_a_while_is_tried_again():
    """However dear the trial looks by then."""
    world = World(step=0.5)
    run = Run(rehearsed(world, 16), world, 1).until(8.0)
    assert OFF in {setting for *_, setting in run.trace}
    world.step = 0.001
    run.until(60.0)
    assert run.rate(50.0, 60.0) >= 0.9 * world.best(run.controller._candidates(1), 1)


@pytest.mark.parametrize("fixed", [0.01, 0.4])
def test_looking_whether_plain_decoding_is_better_takes_little(fixed):
    """Also where rounds are long."""
    world = World(fixed=fixed, row=fixed / 100, step=fixed / 10)
    start, end = 10.0, max(40.0, 300 * fixed)
    run = Run(adaptive(), world, 1).until(end)
    plain = [tokens for at, tokens, setting in run.trace if at > start and setting == OFF]
    assert 0 < len(plain) * fixed < 0.06 * (end - start)


def test_a_number_of_sequences_seen_for_the_first_time_costs_as_the_nearest_does():
    costs = Costs()
    costs.rehearsed([StepTime(16, 16, 0.1), StepTime(16, 128, 0.8)])
    costs.verified(8, 8, 0.05)
    assert costs.verify(8, 64) == pytest.approx(0.4, rel=0.1)
    for _ in range(200):  # and is then its own
        costs.verified(8, 8, 0.05)
        costs.verified(8, 64, 0.1)
    assert costs.verify(8, 64) == pytest.approx(0.1, rel=0.02)
    assert costs.verify(16, 128) == pytest.approx(0.8, rel=0.02)


def test_contention_is_told_from_waiting():
    costs = Costs()
    costs.verified(1, 8, 0.030)
    for _ in range(50):
        costs.overlapped(1, 8, 0.045)
    assert costs.contention == pytest.approx(1.5, abs=0.01)
    for _ in range(50):  # it is that of the time in which both compute
        costs.overlapped(1, 8, 0.036, beside=0.012)
    assert costs.contention == pytest.approx(1.5, abs=0.01)
    for _ in range(50):
        costs.overlapped(1, 8, 0.036, beside=0.006)
    assert costs.contention == pytest.approx(2.0, abs=0.01)
    assert costs.verify(1, 8) == pytest.approx(0.030)


def test_rounds_without_an_answer_promise_nothing():
    """A speculator that is dead or far behind makes rounds short, and says nothing of how good it is."""
    run = Run(adaptive(), World(right=0.0), 1).until(3.0)
    controller = run.controller
    assert controller.current == OFF
    for _ in range(2000):
        setting = controller.setting(1, run.now)
        run.now += 0.0106
        plain = Round(
            setting, 1, [Outcome(0, 0)], 1, 0.0106, 0.0101, 0.0, 0, 0.0, 0, 0, answered=setting.k == 0
        )
        controller.note(plain, run.now)
        assert controller.current == OFF


def test_places_left_empty_count():
    """Lookups that find nothing bring nothing, however right they are where they find something."""
    costs = Costs()
    for _ in range(200):
        costs.judged(Outcome(1, 1), 7)
    assert costs.tokens(7) == pytest.approx(2.0, abs=0.1)


def test_it_does_not_waver():
    run = Run(adaptive(), World(), 4).until(60.0)
    settings = [setting for at, _, setting in run.trace if at > 10.0]
    changes = sum(one != other for one, other in pairwise(settings))
    assert changes < 0.05 * len(settings)
    assert run.controller.reason.startswith("promises ")


def test_a_fixed_setting_is_kept():
    controller = Controller(Setting(3, 1), adapts=False)
    run = Run(controller, World(right=0.0), 2).until(5.0)
    assert {setting for *_, setting in run.trace} == {Setting(3, 1)}
    assert controller.reason == "fixed"


def test_a_line_through_noise_promises_nothing_for_next_to_nothing():
    line = Line()
    for rows, seconds in ((28, 0.16), (32, 0.25), (30, 0.20), (31, 0.24)):
        line.note(rows, seconds)
    assert line.at(8) >= 0.21 * 8 / 31
    assert line.at(30) == pytest.approx(0.21, abs=0.01)


def test_lines_and_classes():
    line = Line()
    line.note(4, 2.0)
    assert line.at(100) == 2.0  # one place says nothing of a slope
    line = Line(fade=1.0)
    for x in (1, 2, 3):
        line.note(x, 1 + 2 * x)
    assert line.at(10) == pytest.approx(21)
    falling = Line(fade=1.0)
    for x in (1, 2):
        falling.note(x, 3 - x)
    assert falling.at(100) == pytest.approx(1.5)
    assert [size_class(n) for n in (1, 2, 3, 4, 5, 8, 9, 256)] == [0, 1, 2, 2, 3, 3, 4, 8]
    costs = Costs()
    assert costs.tokens(0) == 1.0
    for _ in range(500):
        costs.judged(Outcome(2, 2), 2)
    assert costs.tokens(2) == pytest.approx(3.0, abs=0.01)
    assert str(Setting(3, 1, 2)) == "K=3, N=1, two ubatches"
    assert str(OFF) == "off"


def test_without_anybody_who_drafts_there_is_nothing_to_choose():
    """A speculator that is dead, or off, from the start; and one that comes later is made use of."""
    controller, longest = Controller(Setting(5), adapts=True), Setting(5)
    now = 0.0
    while now < 30.0:
        setting = controller.setting(1, now)
        assert setting == longest
        plain = Round(setting, 1, [Outcome(0, 0)], 1, 0.0105, 0.010, 0.0, 0, 0.0, 0, 0)
        now += plain.total
        controller.note(plain, now)
    run = Run(controller, World(), 1)
    run.now = now
    run.until(now + 10.0)
    assert controller.current.k > 1


def test_waiting_costs_what_would_be_decoded_meanwhile():
    controller = Controller(Setting(4, 8), adapts=False)
    assert controller.price_of_waiting(4, 2) == math.inf  # nothing is known
    world = World(fixed=0.020, row=0.0, step=0.001, right=1.0, hit=0.0, between=0.0, way=0.001)
    Run(controller, world, 2).until(5.0)
    assert controller.price_of_waiting(0, 2) == math.inf
    assert controller.price_of_waiting(4, 2) == pytest.approx(2 * 5 * 0.005 / 0.020, rel=0.05)


def test_a_draft_is_as_long_as_such_drafts_are():
    """A speculator that ends its drafts early makes long ones cheap to verify."""
    costs = Costs()
    costs.rehearsed([StepTime(1, 1, 0.010), StepTime(1, 8, 0.080)])
    assert costs.verify_drafts(1, 7) == pytest.approx(0.080)
    for _ in range(300):
        costs.ended(2, 7)
    assert costs.verify_drafts(1, 7) == pytest.approx(0.030, rel=0.05)
    assert costs.verify_drafts(1, 1) == pytest.approx(0.020)


def test_lanes_that_share_cores_are_not_taken_to_work_at_once_for_nothing():
    costs = Costs()
    costs.contend()
    assert costs.contention == 2.0
    costs.verified(1, 8, 0.030)
    for _ in range(60):
        costs.overlapped(1, 8, 0.033)
    assert costs.contention == pytest.approx(1.1, abs=0.01)  # what is measured counts
    controller = Controller(Setting(7, 16, 2), adapts=True)
    controller.costs.rehearsed([StepTime(8, rows, 0.001 + 0.001 * rows) for rows in (8, 64)])
    for _ in range(6):
        controller.costs.drafted(8, 3, 0.02)
    apart = controller.promise(Setting(3, 0, 2), 8)
    controller.costs.contend()
    assert controller.promise(Setting(3, 0, 2), 8) < controller.promise(Setting(3), 8) < apart
