"""What fault tests share: toys, what they say undisturbed, fake workers, and waiting with a deadline."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from executor import LLM, Completion, SamplingParams, Timeouts, process

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = "a prompt"
PARAMS = SamplingParams(max_tokens=120, temperature=0.9, top_p=0.95, seed=11)


class Faults:
    """The tools of a fault test."""

    prompt = PROMPT
    params = PARAMS

    @staticmethod
    def toys(**options: Any) -> LLM:
        """Two toys whose waits are long unless `timeouts` says otherwise: no test hangs on one by chance."""
        defaults = {"engine": "toy", "speculator": "vocabulary=256,agree=0.8", "threads": 1}
        timeouts = Timeouts(
            **{"draft": 60.0, "draft_least": 60.0, "hang": 60.0, "stop": 20.0} | options.pop("timeouts", {})
        )
        return LLM(**(defaults | options), timeouts=timeouts)

    @staticmethod
    def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> None:
        """Returns as soon as the condition holds; fails if it does not in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.002)

    @classmethod
    def wait_until_healthy(cls, llm: LLM) -> None:
        """After a death that was seen: until all lanes serve again and the coordinator says so."""
        cls.wait_for(lambda: all(lane.serving for lane in llm.coordinator.lanes))
        cls.wait_for(lambda: llm.coordinator.health.state == "healthy")


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture(scope="session")
def undisturbed() -> Completion:
    """What the target says alone to PROMPT with PARAMS."""
    with LLM(engine="toy", speculator="off", threads=1) as llm:
        return llm.generate(PROMPT, PARAMS)[0]


@pytest.fixture(scope="session")
def start_seconds() -> float:
    """How long two toys take to start here and now: what a test's load limit must be well above."""
    began = time.monotonic()
    with LLM(engine="toy", speculator="vocabulary=256", threads=1):
        return time.monotonic() - began


@pytest.fixture(scope="session")
def undisturbed_outputs() -> Callable[[list[str]], list[list[int]]]:
    """`undisturbed_outputs(prompts, params)`: what the target says alone to each prompt."""

    def outputs(prompts: list[Any], params: Any = PARAMS) -> list[list[int]]:
        with LLM(engine="toy", speculator="off", threads=1, max_sequences=16) as llm:
            return [completion.token_ids for completion in llm.generate(prompts, params)]

    return outputs


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """`fake(lane, behaviour)`: that lane's workers are fake ones from now on."""
    real = process.command

    def install(lane: str, behaviour: str) -> None:
        def command(its_lane: Any, *rest: Any) -> list[str]:
            whole = real(its_lane, *rest)
            if its_lane != lane:
                return whole
            script = str(Path(__file__).with_name("fake_worker.py"))
            return [sys.executable, script, behaviour, *whole[whole.index("--lane") :]]

        monkeypatch.setattr(process, "command", command)

    return install


class Fault:
    """The one fault of a faulty worker, as the test holds it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def arm(self) -> None:
        """From now on it may strike."""
        (self._directory / "armed").touch()

    def let_go(self) -> None:
        """End its wait in the phase `drain`."""
        (self._directory / "go").touch()

    @property
    def fired(self) -> bool:
        return (self._directory / "fired").exists()


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str, str], Fault]:
    """`inject(lane, fault, phase)`: that lane's workers are faulty ones from now on, the other's sound ones.

    See faulty_worker.py.
    """
    real = process.command
    script = str(Path(__file__).with_name("faulty_worker.py"))

    def install(lane: str, fault: str, phase: str) -> Fault:
        def command(its_lane: Any, *rest: Any) -> list[str]:
            whole = real(its_lane, *rest)
            its = [fault, phase] if its_lane == lane else ["none", "none"]
            return [sys.executable, script, *its, str(tmp_path), *whole[whole.index("--lane") :]]

        monkeypatch.setattr(process, "command", command)
        return Fault(tmp_path)

    return install
