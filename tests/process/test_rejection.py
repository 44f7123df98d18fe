"""Drafts judged by rejection, between real processes: where the text is determined it is the target's own."""

from __future__ import annotations

import pytest

from executor import LLM, InvalidConfig, SamplingParams, Timeouts

TARGET = "vocabulary=64,order=1"
PATIENT = Timeouts(draft=60.0, draft_least=60.0, hang=60.0)
PROMPTS = ["one", "another", "another, longer one one one"]
DETERMINED = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(temperature=0.9, top_k=1, max_tokens=40, logprobs=2, seed=3),
    SamplingParams(temperature=0.9, top_k=1, max_tokens=40, presence_penalty=0.7, frequency_penalty=0.4),
]
"""Greedy, and by rejection from a distribution that leaves one token."""
SPECULATORS = [f"{TARGET},agree=0.6", "ngram"]


def toys(**options) -> LLM:
    return LLM(**({"engine": "toy", "target": TARGET, "threads": 1, "timeouts": PATIENT} | options))


@pytest.fixture(scope="module")
def expected():
    with toys(speculator="off") as llm:
        return [llm.generate(PROMPTS, params) for params in DETERMINED]


@pytest.mark.parametrize("speculator", SPECULATORS)
@pytest.mark.parametrize(("acceptance", "q_rows"), [("rejection", "full"), ("block", "sparse")])
def test_a_determined_text_is_the_targets_own(expected, speculator, acceptance, q_rows):
    with toys(speculator=speculator, acceptance=acceptance, q_rows=q_rows) as llm:
        for params, wanted in zip(DETERMINED, expected, strict=True):
            for found, its in zip(llm.generate(PROMPTS, params), wanted, strict=True):
                assert (found.token_ids, found.logprobs) == (its.token_ids, its.logprobs)
        accepted = llm.coordinator.stats.acceptance.accepted
        assert sum(accepted) > 0
        assert llm.coordinator.stats.quarantined == 0


@pytest.mark.parametrize(
    ("acceptance", "q_rows", "others"),
    [
        ("rejection", "sparse", {}),
        ("block", "full", {}),
        ("block", "sparse", {"lanes": "inline"}),
        ("block", "sparse", {"mode": "ahead"}),
        ("rejection", "full", {"mode": "outcomes"}),
        ("rejection", "sparse", {"target_ranks": 2}),
    ],
)
def test_what_is_drawn_from_the_targets_own_distribution_always_stands(acceptance, q_rows, others):
    """So it is only if q gets there: of a token that was looked up p decides alone."""
    drafts = {"speculator": f"{TARGET},agree=1.0", "acceptance": acceptance, "q_rows": q_rows}
    with toys(**drafts, **others) as llm:
        params = [SamplingParams(temperature=1.2, seed=seed, max_tokens=61) for seed in range(3)]
        for completion in llm.generate(PROMPTS, params):
            assert completion.acceptance.accepted == completion.acceptance.drafted
            assert len(completion.token_ids) == 61


def test_large_rows_go_by_arena():
    """And come back: nothing is left lent. They are drawn from all tokens, so all of them stand."""
    large = "vocabulary=17000"
    options = {"target": large, "speculator": f"{large},agree=1.0", "acceptance": "block", "q_rows": "full"}
    with toys(**options, num_speculative_tokens=2, max_sequences=1) as llm:
        transport = llm.coordinator._lanes.transport
        assert transport.chosen == "memfd"
        lent = []
        real = transport.leases.lend
        transport.leases.lend = lambda ref, *rest: (lent.append(ref), real(ref, *rest))
        completion = llm.generate("one", SamplingParams(temperature=1.2, seed=1, max_tokens=7))[0]
        assert completion.acceptance.outcomes == {(2, 2): 2, (0, 0): 1}
        assert len(lent) == 4
        assert transport.leases.count() == {"kept": 0, "lent": 0, "quarantined": 0}
        assert llm.coordinator.stats.invalid == 0


def test_a_draft_that_is_cut_keeps_its_rows():
    """A verification that has no room for all guesses."""
    drafts = {"speculator": f"{TARGET},agree=1.0", "acceptance": "rejection"}
    with toys(**drafts, max_sequences=3, max_verify_tokens=9) as llm:
        params = [SamplingParams(temperature=1.2, seed=seed, max_tokens=40) for seed in range(3)]
        for completion in llm.generate(PROMPTS, params):
            assert completion.acceptance.accepted == completion.acceptance.drafted
        assert llm.coordinator.stats.spared > 0


def test_the_same_run_once_more_is_the_same():
    drafts = {"speculator": f"{TARGET},agree=0.5", "acceptance": "block"}
    texts = []
    for _ in range(2):
        with toys(**drafts) as llm:
            params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=40) for seed in range(3)]
            texts.append([completion.token_ids for completion in llm.generate(PROMPTS, params)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (
            {"acceptance": "typical"},
            "acceptance must be one of coupled, rejection, block, got 'typical'; try coupled",
        ),
        ({"q_rows": "dense"}, "q-rows must be one of sparse, full, got 'dense'; try sparse"),
    ],
)
def test_what_there_is_not(option, says):
    with pytest.raises(InvalidConfig, match=says):
        toys(**option)
