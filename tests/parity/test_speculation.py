"""The text of a real model does not depend on the speculator: real processes, native engine, every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from executor import LLM, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.mark.structures import ParameterSet

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NEW_TOKENS = 16
PROMPTS = [
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 4, 5, 6,",
    "a b c a b c a b c a b c",
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True),
]


def slow(value: int | str) -> ParameterSet:
    return pytest.param(value, marks=pytest.mark.slow)


def texts(llm: LLM, *, together: bool) -> list[list[int]]:
    """Token ids for each of PARAMS and PROMPTS; all at once, or one prompt after the other."""
    jobs = [(prompt, params) for params in PARAMS for prompt in PROMPTS]
    if together:
        prompts, params = zip(*jobs, strict=True)
        return [c.token_ids for c in llm.generate(list(prompts), list(params), progress=False)]
    return [llm.generate([p], params, progress=False)[0].token_ids for p, params in jobs]


# On a CPU both dtypes of a bf16 checkpoint are one computation, so the quick run takes one of them.
@pytest.fixture(scope="module", params=[slow("fp32"), "bf16"])
def plain(request: pytest.FixtureRequest, checkpoint: Path) -> tuple[str, list[list[int]]]:
    """The dtype and what the target alone says, one prompt after the other."""
    with LLM(target=str(checkpoint), speculator="off", dtype=request.param, threads=1) as llm:
        alone = texts(llm, together=False)
        assert texts(llm, together=True) == alone
    assert all(len(ids) == NEW_TOKENS for ids in alone)
    return request.param, alone


@pytest.mark.parametrize("k", [*map(slow, range(1, 4)), 4, *map(slow, range(5, 9))])
def test_prompt_lookup_changes_no_token(plain, checkpoint, k):
    dtype, expected = plain
    with LLM(
        target=str(checkpoint), speculator="ngram", num_speculative_tokens=k, dtype=dtype, threads=1
    ) as llm:
        assert texts(llm, together=True) == expected
        assert sum(llm.coordinator.stats.acceptance.accepted) > 0
        assert texts(llm, together=False) == expected


@pytest.mark.parametrize("k", [1, *map(slow, range(2, 7)), 7, slow(8)])
def test_a_draft_model_changes_no_token(plain, checkpoint, pruned, k):
    dtype, expected = plain
    with LLM(
        target=str(checkpoint), speculator=str(pruned), num_speculative_tokens=k, dtype=dtype, threads=1
    ) as llm:
        assert texts(llm, together=True) == expected
        acceptance = llm.coordinator.stats.acceptance
        drafted, accepted = acceptance.drafted, acceptance.accepted
        # Every position was accepted at times and refused at times; nonsense is seldom guessed for long.
        assert len(accepted) == k
        assert all(accepted[: 3 if checkpoint.name == "thin" else k])
        assert all(a < d for a, d in zip(accepted, drafted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("k", [3, 8])
def test_a_draft_model_changes_no_token_of_a_lone_prompt(plain, checkpoint, pruned, k):
    dtype, expected = plain
    with LLM(
        target=str(checkpoint), speculator=str(pruned), num_speculative_tokens=k, dtype=dtype, threads=1
    ) as llm:
        assert texts(llm, together=False) == expected


@pytest.mark.slow
def test_threads_change_no_token(plain, checkpoint):
    dtype, expected = plain
    with LLM(target=str(checkpoint), speculator="ngram", dtype=dtype, threads=2) as llm:
        assert texts(llm, together=True) == expected


@pytest.mark.parametrize("checkpoint", ["smollm2"], indirect=True, scope="session")  # whose head it is
@pytest.mark.parametrize(
    ("speculator", "k"),
    [
        ("cascade", 7),
        *(pytest.param(name, k, marks=pytest.mark.slow) for name, k in (("eagle", 4), ("suffix", 7))),
    ],
)
def test_the_shipped_speculators_change_no_token(plain, checkpoint, speculator, k):
    dtype, expected = plain
    with LLM(
        target=str(checkpoint), speculator=speculator, num_speculative_tokens=k, dtype=dtype, threads=1
    ) as llm:
        assert texts(llm, together=True) == expected
        assert sum(llm.coordinator.stats.acceptance.accepted) > 0
        assert texts(llm, together=False) == expected


@pytest.mark.parametrize(
    ("checkpoint", "speculator"),
    [
        ("thin", "pruned"),
        *(
            pytest.param("smollm2", name, marks=pytest.mark.slow)
            for name in ("pruned", "cascade", "suffix", "eagle")
        ),
    ],
    indirect=["checkpoint"],
    scope="session",
)
@pytest.mark.parametrize("mode", ["outcomes", slow("ahead"), slow("auto")])
def test_modes(plain, pruned, checkpoint, speculator, mode):
    """Drafts made for verdicts that are still to come, on branches that share their beginnings."""
    dtype, expected = plain
    chosen = str(pruned) if speculator == "pruned" else speculator
    options = {"mode": mode, "ubatches": 2, "num_speculative_tokens": 3}
    with LLM(target=str(checkpoint), speculator=chosen, dtype=dtype, threads=1, **options) as llm:
        assert texts(llm, together=True) == expected
        assert texts(llm, together=False) == expected
        assert llm.coordinator.stats.hits > 0 or speculator != "pruned"
