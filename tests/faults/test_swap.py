"""Another speculator in the midst of serving: no text changes, no draft is missed, a bad one is refused."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from executor import Closed, InvalidConfig, Recovery, RestartPolicy, SamplingParams, SpeclaneError

TOY = "vocabulary=256,agree="
SLOW_TARGET = "vocabulary=256,step_ms=1"


def spec_of(llm, model, engine="toy"):
    """The spec of a speculator beside this target."""
    target = llm.coordinator.lanes[0].spec
    return msgspec.structs.replace(target, lane="speculator", engine=engine, model=model)


def swap(llm, model, engine="toy"):
    spec = None if model is None else spec_of(llm, model, engine)
    llm.coordinator.swap_speculator(spec).result(30.0)


class Traffic:
    """Four requests at a time, over and over, each compared with what was expected."""

    def __init__(self, llm, prompts, params, expected) -> None:
        self._llm = llm
        self._prompts, self._params, self._expected = prompts, params, expected
        self._end = threading.Event()
        self._began = threading.Event()
        self.turns = 0

    def run(self) -> bool:
        while not self._end.is_set():
            completions = self._llm.generate(self._prompts, self._params)
            assert [completion.token_ids for completion in completions] == self._expected
            self.turns += 1
            self._began.set()
        return True

    def __enter__(self):
        self._pool = ThreadPoolExecutor(1)
        self._running = self._pool.submit(self.run)
        self._began.wait(30.0)
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        try:
            assert self._running.result(60.0)
        finally:
            self._pool.shutdown()


@pytest.fixture(scope="module")
def prompts():
    return [f"prompt {i}" for i in range(4)]


@pytest.fixture(scope="module")
def params():
    return SamplingParams(max_tokens=50, temperature=0.9, seed=3)


@pytest.fixture(scope="module")
def expected(undisturbed_outputs, prompts, params):
    return undisturbed_outputs(prompts, params)


def test_under_load(faults, prompts, params, expected):
    """Another toy, a lookup, none, and one again."""
    with faults.toys(target=SLOW_TARGET, speculator=f"{TOY}0.5,step_ms=1") as llm:
        seen = [llm.coordinator.lanes[1].epoch]
        with Traffic(llm, prompts, params, expected) as traffic:
            for model, engine in [
                (f"{TOY}0.9,step_ms=2", "toy"),
                ("", "ngram"),
                (None, ""),
                (f"{TOY}1", "toy"),
            ]:
                swap(llm, model, engine)
                target, *speculators = llm.coordinator.lanes
                assert [lane.spec.model for lane in speculators] == ([] if model is None else [model])
                seen += [lane.epoch for lane in speculators]
                turns = traffic.turns
                faults.wait_for(lambda turns=turns: traffic.turns >= turns + 2)
                assert all(lane.orders for lane in speculators)
        assert len(set(seen)) == len(seen) == 4
        assert llm.coordinator.health.state == "healthy"
        assert llm.coordinator.deaths == {"target": 0, "speculator": 0}
        stats = llm.coordinator.stats
        assert (stats.missed, stats.invalid, stats.quarantined, llm.coordinator.stale) == (0, 0, 0, 0)
        assert target.serving


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        ("orbit=3", SpeclaneError, "a toy has no parameter 'orbit'"),
        ("vocabulary=128", InvalidConfig, "vocabularies differ: target 256 tokens .* speculator 128"),
    ],
)
def test_to_one_that_cannot_be(faults, prompts, params, expected, model, error, says):
    with faults.toys(target=SLOW_TARGET) as llm:
        before = llm.coordinator.lanes
        with Traffic(llm, prompts, params, expected), pytest.raises(error, match=says):
            swap(llm, model)
        assert llm.coordinator.lanes == before
        assert llm.coordinator.deaths == {"target": 0, "speculator": 0}
        assert llm.generate(prompts[0], faults.params)[0].acceptance_length > 1.0
        assert llm.coordinator.health.state == "healthy"
        swap(llm, f"{TOY}1")  # and a good one still can


def test_off_and_on_again(faults, undisturbed):
    with faults.toys() as llm:
        lengths = []
        for model in (None, f"{TOY}0.9", None, None, f"{TOY}0.9"):
            swap(llm, model)
            completion = llm.generate(faults.prompt, faults.params)[0]
            assert completion.token_ids == undisturbed.token_ids
            assert len(llm.coordinator.lanes) == (1 if model is None else 2)
            assert llm.coordinator.health.state == "healthy"
            lengths.append(completion.acceptance_length)
        assert lengths[0] == lengths[2] == lengths[3] == 1.0
        assert lengths[1] == lengths[4] > 1.0


def test_of_an_executor_that_began_without(faults, undisturbed):
    with faults.toys(speculator="off") as llm:
        swap(llm, f"{TOY}0.9")
        completion = llm.generate(faults.prompt, faults.params)[0]
        assert completion.token_ids == undisturbed.token_ids
        assert completion.acceptance_length > 1.0
        _, speculator = llm.coordinator.lanes
        speculator.process.kill(signal.SIGKILL)  # it is looked after like one that was there from the start
        faults.wait_for(lambda: llm.coordinator.lanes[1] is not speculator)
        faults.wait_until_healthy(llm)
        assert llm.generate(faults.prompt, faults.params)[0].acceptance_length > 1.0


def test_the_successor_of_a_swapped_speculator_is_one_like_it(faults):
    with faults.toys(recovery=Recovery(standby=("speculator",))) as llm:
        swap(llm, f"{TOY}1")
        for _ in range(2):
            _, speculator = llm.coordinator.lanes
            speculator.process.kill(signal.SIGKILL)
            faults.wait_for(lambda dead=speculator: llm.coordinator.lanes[1] is not dead)
            faults.wait_for(lambda: llm.coordinator.lanes[1].serving)
            assert llm.coordinator.lanes[1].spec.model == f"{TOY}1"
        assert llm.generate(faults.prompt, faults.params)[0].acceptance_length > 5.0


def test_the_present_one_dies_meanwhile(faults, undisturbed):
    with faults.toys(recovery=Recovery(policy=RestartPolicy(intensity=0))) as llm:
        _, present = llm.coordinator.lanes
        done = llm.coordinator.swap_speculator(spec_of(llm, f"{TOY}1"))
        present.process.kill(signal.SIGKILL)
        done.result(30.0)
        faults.wait_until_healthy(llm)
        completion = llm.generate(faults.prompt, faults.params)[0]
        assert completion.token_ids == undisturbed.token_ids
        assert completion.acceptance_length > 5.0


def test_closed_meanwhile(faults, fake):
    with faults.toys(timeouts={"stop": 0.3}) as llm:
        fake("speculator", "never greets")
        done = llm.coordinator.swap_speculator(spec_of(llm, f"{TOY}1"))
    with pytest.raises(Closed):
        done.result(0.0)
    with pytest.raises(Closed):
        llm.coordinator.swap_speculator(None)


def test_cancelled_in_time(faults, fake):
    with faults.toys(timeouts={"stop": 0.3}) as llm:
        before = llm.coordinator.lanes
        done = llm.coordinator.swap_speculator(spec_of(llm, f"{TOY}1"))
        assert done.cancel()
        faults.wait_for(lambda: len(llm.coordinator._lanes.supervisor._alive) == 2)
        assert llm.coordinator.lanes == before
