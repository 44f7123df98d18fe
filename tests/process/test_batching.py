"""Real processes with less memory than they could use: who waits, who is spared work, same text always."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest

from executor import LLM, Completion, InvalidRequest, SamplingParams

TARGET = "vocabulary=64"  # few tokens are quickly sampled
SPECULATORS = ["off", pytest.param("ngram", marks=pytest.mark.slow), "vocabulary=64,agree=0.7"]
COUNT = 256


def toys(speculator: str = "off", **options: Any) -> LLM:
    return LLM(engine="toy", speculator=speculator, threads=1, **options)


def prompt(i: int) -> list[int]:
    """Of 1 to 200 tokens, with beginnings that others have, too."""
    return [(i % 3 + position * position) % 64 for position in range(1 + 37 * i % 200)]


def params(i: int) -> SamplingParams:
    new = 240 if i % 16 < 2 else 1 + 13 * i % 30
    return SamplingParams(temperature=(i % 2) * 0.8, seed=i, max_tokens=new)


def told(completions: list[Completion]) -> list[tuple[list[int], str, str]]:
    return [(c.token_ids, c.text, c.finish_reason) for c in completions]


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], str, str]]:
    """What the target alone says, one request after the other, with all memory that can be of use."""
    with toys(target=TARGET, max_model_len=512, reuse_prefixes=False) as llm:
        return told([llm.generate([prompt(i)], params(i))[0] for i in range(COUNT)])


@pytest.mark.parametrize("speculator", SPECULATORS)
def test_many_sequences_under_a_limit_equal_each_alone(alone, speculator):
    with toys(speculator, target=TARGET, max_sequences=48, max_model_len=512, kv_tokens=14 * 64) as llm:
        together = llm.generate([prompt(i) for i in range(COUNT)], [params(i) for i in range(COUNT)])
        stats = llm.coordinator.stats
        assert told(together) == alone
        assert stats.preempted > 0
        assert not any(llm.coordinator.deaths.values())
        assert max(round_.sequences for round_ in stats.round_times) > 4
        assert llm.coordinator.lanes[0].told == {}


def test_a_sequence_is_preempted_in_the_midst_and_its_stream_goes_on():
    """Two sequences that end in four blocks each begin together in six."""
    asked = [([1] * 60, SamplingParams(temperature=0.9, seed=s, max_tokens=190)) for s in (1, 2)]
    with toys("vocabulary=256,agree=0.7", max_model_len=256) as llm:
        expected = [llm.generate([tokens], its)[0].token_ids for tokens, its in asked]
    with toys("vocabulary=256,agree=0.7", max_model_len=256, kv_tokens=6 * 64) as llm:
        streams = [llm.stream(tokens, its) for tokens, its in asked]
        got = [[token for delta in stream for token in delta.token_ids] for stream in streams]
        assert got == expected
        assert llm.coordinator.stats.preempted >= 1


def test_a_preempted_sequence_may_be_cancelled():
    with toys(max_model_len=256, kv_tokens=6 * 64) as llm:
        first = llm.stream([1] * 60, SamplingParams(temperature=0, max_tokens=190))
        second = llm.stream([2] * 60, SamplingParams(temperature=0, max_tokens=190))
        for _ in first:
            if llm.coordinator.stats.preempted:
                second.close()
        assert [reason for _ in second for reason in ()] == []
        assert second.completion.finish_reason == "cancelled"
        assert first.completion.finish_reason == "length"


def test_a_speculator_short_of_room_drafts_for_the_oldest():
    """Its plan is as long as the target's here, so the bound is shown by what it may draft at the end."""
    with toys("vocabulary=256,agree=1", max_model_len=256, max_sequences=4) as llm:
        speculator = llm.coordinator.lanes[1]
        assert speculator.room is not None
        speculator.room = speculator.room._replace(tokens=2 * 64)
        asked = [([s] * 40, SamplingParams(temperature=0, max_tokens=60)) for s in range(4)]
        limited = llm.generate([tokens for tokens, _ in asked], [its for _, its in asked])
        speculator.room = speculator.room._replace(tokens=64 * 64)
        free = llm.generate([tokens for tokens, _ in asked], [its for _, its in asked])
    assert told(limited) == told(free)
    assert limited[0].acceptance_length == free[0].acceptance_length > 4
    assert limited[3].acceptance_length < free[3].acceptance_length


def test_a_long_prompt_is_run_in_parts_between_the_rounds_of_others():
    long = [(7 * i) % 256 for i in range(3000)]
    with toys(max_model_len=4096, max_sequences=2) as llm:
        expected = llm.generate([long], SamplingParams(temperature=0, max_tokens=5))[0]
        stream = llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=4000))
        next(iter(stream))
        rounds = llm.coordinator.stats.rounds
        done: list[Completion] = []
        thread = threading.Thread(
            target=lambda: done.extend(
                llm.generate([long[::-1]], SamplingParams(temperature=0, max_tokens=1))
            )
        )
        thread.start()
        thread.join()
        between = llm.coordinator.stats.rounds - rounds
        stream.close()
        assert between >= 3000 // 256
        again = llm.generate([long], SamplingParams(temperature=0, max_tokens=5))[0]
    assert told([again]) == told([expected])


def test_a_prompt_that_begins_like_an_earlier_one_is_not_computed_again():
    shared = [(3 * i) % 256 for i in range(200)]
    with toys("vocabulary=256,agree=0.7", max_model_len=512) as llm:
        texts = [
            llm.generate([[*shared, i]], SamplingParams(temperature=0.5, seed=i, max_tokens=9))[0].token_ids
            for i in range(3)
        ]
        assert [lane.reused_tokens for lane in llm.status().lanes] == [2 * 192, 2 * 192]
    with toys(max_model_len=512, reuse_prefixes=False) as llm:
        for i in range(3):
            params = SamplingParams(temperature=0.5, seed=i, max_tokens=9)
            assert llm.generate([[*shared, i]], params)[0].token_ids == texts[i]
        assert [lane.reused_tokens for lane in llm.status().lanes] == [0]


def test_what_can_never_fit_is_refused_at_once_with_what_works():
    with toys(kv_tokens=192) as llm:
        with pytest.raises(
            InvalidRequest, match=r"the prompt has 192 tokens, .* 192; .* 191 .* kv_tokens 320"
        ):
            llm.generate([[1] * 192])
        with pytest.raises(InvalidRequest, match=r"max_tokens 93 .* 192; try 92, or kv_tokens 256"):
            llm.generate([[1] * 100], SamplingParams(max_tokens=93))
        assert len(llm.generate([[1] * 100], SamplingParams(max_tokens=92, seed=1))[0].token_ids) == 92


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "executor", "generate", "--engine", "toy", "--max-tokens", "20", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_the_command_answers_several_prompts_as_it_does_each_alone(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("three", "four")))
    done = command("--prompt", "one", "--prompt", "two", "--prompts", str(file), "--json")
    together = json.loads(done.stdout)
    alone = [
        json.loads(command("--prompt", text, "--json").stdout) for text in ("one", "two", "three", "four")
    ]
    assert [c["token_ids"] for c in together["completions"]] == [c["token_ids"] for c in alone]
    assert (together["tokens"], together["preempted"]) == (80, 0)

    shown = command("--prompt", "one", "--prompts", str(file))
    assert (
        shown.stdout
        == "\n\n".join(
            f"--- {i}: {text}\n{answer['text']}"
            for i, (text, answer) in enumerate(
                zip(("one", "three", "four"), (alone[0], *alone[2:]), strict=True), 1
            )
        )
        + "\n"
    )
    assert "prompts            3" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompts", "nowhere.jsonl"), "--prompts file nowhere.jsonl cannot be read: No such file"),
        (("--prompt", "a", "--prompt", ""), "the prompt is empty; try --prompt"),
        (("--prompt", "a" * 300, "--kv-tokens", "256"), "try --kv-tokens 320"),
    ],
)
def test_the_command_refuses_prompts_that_cannot_be_run(arguments, message):
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]
