"""The memory plan of real lanes: shown without serving, kept while serving, refused where it cannot be."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from executor import LLM, Config, InvalidConfig, SamplingParams

TOYS = ("--engine", "toy", "--target", "vocabulary=128,context=512", "--speculator", "vocabulary=128")


def speclane(*arguments: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "executor", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def toys(**options) -> Config:
    both = {"engine": "toy", "target": "vocabulary=128,context=512", "speculator": "vocabulary=128"}
    return Config(**(both | options))


def test_the_plan_as_json() -> None:
    done = speclane("plan", *TOYS, "--batch", "4", "--standby", "speculator", "--json")
    assert done.returncode == 0
    plan = json.loads(done.stdout)
    assert plan["tokens"] == 4 * 512
    assert [lane["lane"] for lane in plan["lanes"]] == ["target", "speculator"]
    for lane, copies in zip(plan["lanes"], (1, 2), strict=True):
        assert (lane["device"], lane["kv_tokens"], lane["kv_bytes_per_token"]) == ("cpu", 2048, 8)
        assert (lane["weights"], lane["graphs"], lane["copies"]) == (0, 0, copies)
        parts = ("process", "weights", "activations", "workspace", "graphs", "kv")
        assert lane["total"] == sum(lane[part] for part in parts) <= lane["peak"]
    assert plan["budgets"]["cpu"] > sum(lane["total"] * lane["copies"] for lane in plan["lanes"])


def test_the_plan_as_a_table() -> None:
    done = speclane("plan", *TOYS)
    assert done.returncode == 0
    for words in (
        "target (cpu)",
        "speculator (cpu)",
        "weights",
        "kv per token",
        "4096 tokens fit on all lanes",
    ):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--memory-budget", "1MB"), "speclane: error: --memory-budget: 64 tokens need"),
        (("--memory-budget", "plenty"), "--memory-budget 'plenty' is no size; try 4GB or 512MiB"),
        (
            ("--kv-tokens", "100", "--max-model-len", "512"),
            "--kv-tokens 100 cannot hold a sequence of 512 tokens; try 512",
        ),
    ],
)
def test_a_plan_that_cannot_be_names_the_option_and_a_value(options, says) -> None:
    done = speclane("plan", *TOYS, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_what_is_advised_works() -> None:
    done = speclane("plan", *TOYS, "--memory-budget", "1MB")
    advised = done.stderr.split("try ")[1].split(",")[0]
    done = speclane("plan", *TOYS, "--memory-budget", advised, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["tokens"] >= 1


def test_an_executor_starts_with_the_plan_or_not_at_all() -> None:
    with pytest.raises(InvalidConfig, match="kv_tokens 8 cannot hold a sequence of 64 tokens; try 64"):
        LLM(toys(kv_tokens=8, max_model_len=64)).start()
    with LLM(toys(kv_tokens=128, max_sequences=2)) as llm:
        plan = llm.coordinator.memory
        assert plan is not None
        assert (plan.tokens, [lane.kv_tokens for lane in plan.lanes]) == (128, [128, 128])
        # Nobody asked for longer sequences than the KV holds, so they are shorter.
        assert llm.max_model_len == 128


def test_lanes_that_start_again_or_come_later_hold_what_the_plan_says() -> None:
    params = SamplingParams(max_tokens=200, seed=1)
    with LLM(toys(kv_tokens=400)) as llm:
        before = llm.coordinator.memory
        expected = llm.generate("one", params)[0].token_ids
        old = llm.coordinator.lanes[1]
        assert old.process is not None
        old.process.kill()
        stream = llm.stream("one", params)
        assert [token for delta in stream for token in delta.token_ids] == expected
        llm.swap_speculator("vocabulary=128,agree=0.5,context=256")
        after = llm.coordinator.memory
        assert before is not None
        assert after is not None
        assert after.tokens == before.tokens == 384
        assert [lane.kv_tokens for lane in after.lanes] == [384, 384]
        assert after.lanes[0] == before.lanes[0]


@pytest.mark.model
@pytest.mark.timeout(300)
def test_lanes_take_what_was_planned(thin) -> None:
    """Both lanes a model with weights, their KV full."""
    options = ("--batch", "2", "--max-model-len", "384", "--threads", "1", "--target", str(thin))
    done = speclane("bench", "memory", *options, "--speculator", str(thin), "--json", seconds=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["held_tokens"] == result["tokens"] == 768
    for lane in result["lanes"]:
        assert lane["plan"]["weights"] > 100 << 20
        assert lane["measured"] == pytest.approx(lane["planned"], rel=0.1)
