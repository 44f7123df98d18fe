"""Real processes with toys: what is generated never hangs on who speculates, how far, or with whom."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from executor import LLM, Completion, InvalidRequest, SamplingParams, Timeouts

PROMPTS = [f"prompt number {i}" for i in range(16)]
SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05, "top_k": 100, "top_p": 0.95},
]
SPECULATORS = ["ngram", "suffix", *(f"vocabulary=256,agree={agree}" for agree in ("0", "0.5", "0.8", "1"))]


def toys(speculator: str = "off", **options: Any) -> LLM:
    return LLM(engine="toy", speculator=speculator, threads=1, **options)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 40, "seed": 7} | values))


def mixed() -> list[SamplingParams]:
    """Sixteen requests of unlike sampling, seed and length."""
    return [
        params(seed=i, max_tokens=1 + 7 * i % 50, **SAMPLINGS[i % len(SAMPLINGS)])
        for i in range(len(PROMPTS))
    ]


def told(completions: list[Completion]) -> list[tuple[Any, ...]]:
    """What a caller sees, without how it came about."""
    return [
        (c.prompt_token_ids, c.token_ids, c.text, c.finish_reason, c.seed, c.logprobs) for c in completions
    ]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[tuple[Any, ...]]]:
    """What the target alone says, one request at a time."""
    with toys() as llm:
        alone = [llm.generate(p, its)[0] for p, its in zip(PROMPTS, mixed(), strict=True)]
        return {
            "mixed": told(alone),
            "single": told([llm.generate("once", params(**sampling))[0] for sampling in SAMPLINGS]),
            "logprobs": told(llm.generate(PROMPTS[:4], params(logprobs=3, temperature=0.7))),
        }


@pytest.mark.parametrize("speculator", SPECULATORS)
def test_sixteen_at_once_equal_each_alone_without_speculation(plain, speculator):
    with toys(speculator, max_sequences=4) as llm:
        completions = llm.generate(PROMPTS, mixed())
    assert told(completions) == plain["mixed"]
    if "agree=1" in speculator:
        # The same model with the same noise guesses every token.
        assert all(sum(c.acceptance.accepted) == sum(c.acceptance.drafted) for c in completions)


@pytest.mark.parametrize("k", range(1, 9))
def test_any_draft_length(plain, k):
    with toys("vocabulary=256,agree=0.7", num_speculative_tokens=k) as llm:
        completions = [llm.generate("once", params(**sampling))[0] for sampling in SAMPLINGS]
    assert told(completions) == plain["single"]
    assert all(len(c.acceptance.drafted) == k for c in completions)
    assert all(1.0 < c.acceptance_length <= k + 1 for c in completions)


def test_a_better_speculator_is_accepted_more():
    lengths = []
    for agree in ("0", "0.5", "1"):
        with toys(f"vocabulary=256,agree={agree}", num_speculative_tokens=4) as llm:
            lengths.append(llm.generate("x", params(temperature=0, max_tokens=100))[0].acceptance_length)
    assert lengths[0] < 1.1
    assert lengths[0] < lengths[1] < lengths[2] == 5.0


def test_logprobs_do_not_hang_on_speculation(plain):
    for speculator in ("ngram", "vocabulary=256,agree=0.6"):
        with toys(speculator) as llm:
            completions = llm.generate(PROMPTS[:4], params(logprobs=3, temperature=0.7))
        assert told(completions) == plain["logprobs"]
        for completion in completions:
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids) == 40
            assert all(len(entry.top) == 3 for entry in completion.logprobs)


def test_seeds():
    with toys("vocabulary=256,agree=0.8") as llm:
        first, again, other = llm.generate(["x"] * 3, [params(seed=1), params(seed=1), params(seed=2)])
        assert first.token_ids == again.token_ids != other.token_ids
        drawn = llm.generate("x", SamplingParams(max_tokens=20))[0]
        repeated = llm.generate("x", SamplingParams(max_tokens=20, seed=drawn.seed))[0]
        assert drawn.token_ids == repeated.token_ids


def test_a_stream_is_the_completion_in_parts():
    with toys("vocabulary=256,agree=0.8") as llm:
        whole = llm.generate("stream", params(stop="zz"))[0]
        stream = llm.stream("stream", params(stop="zz"))
        with pytest.raises(RuntimeError, match="not ended"):
            _ = stream.completion
        deltas = list(stream)
        assert told([stream.completion]) == told([whole])
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
        assert len(deltas) == stream.completion.acceptance.rounds
        assert list(stream) == []  # ended, however often it is asked


def test_stop_strings_and_tokens_end_the_same_text_earlier():
    with toys("vocabulary=256,agree=0.8") as llm:
        whole = llm.generate("stops", params(temperature=0.5))[0]
        cut = whole.text[17:20]
        end = whole.text.index(cut)
        by_string = llm.generate("stops", params(temperature=0.5, stop=cut))[0]
        assert (by_string.text, by_string.finish_reason) == (whole.text[:end], "stop")
        assert by_string.token_ids == whole.token_ids[: end + 3]

        token = whole.token_ids[11]
        place = whole.token_ids.index(token)
        by_token = llm.generate("stops", params(temperature=0.5, stop_token_ids=(token,)))[0]
        assert (by_token.token_ids, by_token.finish_reason) == (whole.token_ids[: place + 1], "stop")
        assert by_token.text == whole.text[:place]


@pytest.mark.parametrize("speculator", ["off", "ngram", "vocabulary=256,agree=0.8"])
def test_no_stop_token_is_sampled_before_min_tokens(speculator):
    stops = tuple(range(128))
    with toys(speculator) as llm:
        for least in (0, 1, 10):
            completion = llm.generate("x", params(min_tokens=least, stop_token_ids=stops, seed=5))[0]
            assert completion.finish_reason == "stop"
            assert all(token >= 128 for token in completion.token_ids[:-1])
            assert completion.token_ids[-1] < 128
            assert len(completion.token_ids) > least


def test_the_end_of_the_context():
    with toys("vocabulary=256,agree=0.8", target="vocabulary=256,context=20") as llm:
        completion = llm.generate([list(range(12))], params())[0]
        assert (len(completion.token_ids), completion.finish_reason) == (8, "length")
        assert len(llm.generate([list(range(19))], params())[0].token_ids) == 1
        with pytest.raises(InvalidRequest, match="20 tokens, the context 20; shorten it to 19"):
            llm.generate([list(range(20))], params())


def test_a_speculator_with_a_smaller_context_than_the_target():
    prompts = [[1, 2, 3], list(range(14)), list(range(50))]
    with toys() as llm:
        alone = llm.generate(prompts, params())
    with toys("vocabulary=256,agree=0.9,context=20") as llm:
        together = llm.generate(prompts, params())
        assert llm.coordinator.stats.invalid == llm.coordinator.stale == 0
    assert told(together) == told(alone)
    drafted = [sum(c.acceptance.drafted) for c in together]
    assert drafted[0] > drafted[1] > drafted[2] == 0


def test_a_stream_left_early_frees_its_seat_in_both_lanes_and_harms_nobody():
    """More streams than seats are begun and left; a seat that was not freed would end the target."""
    with toys("vocabulary=256,agree=0.8", max_sequences=2) as llm:
        expected = llm.generate("bystander", params(max_tokens=300))[0]
        bystander = llm.stream("bystander", params(max_tokens=300))
        for i in range(6):
            for delta in llm.stream(f"left {i}", params(max_tokens=4000)):
                assert delta.token_ids
                break
        unread = llm.stream("never read", params(max_tokens=4000))
        unread.close()
        for _ in unread:
            pass
        assert unread.completion.finish_reason == "cancelled"
        for _ in bystander:
            pass
        assert told([bystander.completion]) == told([expected])
        for lane in llm.coordinator.lanes:
            assert lane.serving
            assert lane.told == {}


def test_a_request_cancelled_while_it_waits_never_runs():
    with toys(max_sequences=1) as llm:
        first = llm.stream("first", params(max_tokens=2000))
        waiting = llm.stream("waiting", params())
        waiting.close()
        assert list(waiting) == []
        assert (waiting.completion.finish_reason, waiting.completion.token_ids) == ("cancelled", [])
        first.close()


def test_requests_from_several_threads():
    with toys("vocabulary=256,agree=0.8", max_sequences=3) as llm:
        alone = told([llm.generate(p, its)[0] for p, its in zip(PROMPTS, mixed(), strict=True)])
        with ThreadPoolExecutor(8) as pool:
            together = pool.map(lambda pair: llm.generate(*pair)[0], zip(PROMPTS, mixed(), strict=True))
            assert told(list(together)) == alone


def test_the_first_use_from_several_threads_starts_one_executor():
    llm = toys("ngram")
    barrier = threading.Barrier(4)

    def use(_: int) -> int:
        barrier.wait()
        return len(llm.generate("x", params(max_tokens=3))[0].token_ids)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, range(4))) == [3] * 4
    llm.close()


def test_two_executors_in_one_process():
    with toys("ngram") as one, toys("vocabulary=256,agree=1", target="vocabulary=256") as two:
        results = [llm.generate(PROMPTS[:4], params()) for llm in (one, two, one)]
    assert told(results[0]) == told(results[1]) == told(results[2])


def test_bad_requests_are_refused_before_anything_runs():
    with toys("ngram") as llm:
        rounds = llm.coordinator.stats.rounds
        for prompts, its, says in [
            (["fine", ""], params(), "empty"),
            ([[1], [256]], params(), "token 256 is not in the vocabulary, 0 to 255"),
            (["a", "b"], [params()], "1 params for 2 prompts"),
            ("a", params(stop_token_ids=(256,)), "token 256 is not in the vocabulary"),
        ]:
            with pytest.raises(InvalidRequest, match=says):
                llm.generate(prompts, its)
        assert llm.coordinator.stats.rounds == rounds
        assert llm.generate([]) == []


def test_chats_are_prompts():
    with toys("ngram") as llm:
        assert llm.chat([{"role": "user", "content": "hello"}], params()).token_ids
        with pytest.raises(InvalidRequest, match="empty"):
            llm.chat([])


def test_statistics_add_up():
    patient = Timeouts(draft=60.0, draft_least=60.0, hang=60.0)
    with toys("vocabulary=256,agree=0.8", timeouts=patient) as llm:
        completions = llm.generate(PROMPTS[:3], params())
        stats, lanes = llm.coordinator.stats, llm.coordinator.lanes
        assert stats.acceptance.tokens >= sum(len(c.token_ids) for c in completions) == 120
        assert stats.acceptance.rounds == sum(c.acceptance.rounds for c in completions)
        assert stats.rounds == len(stats.round_times) == lanes[0].orders
        assert (stats.missed, stats.invalid, llm.coordinator.stale) == (0, 0, 0)
        assert all(lane.busy_ns > 0 for lane in lanes)
        assert all(0 < time.verify + time.draft < time.total for time in stats.round_times)
