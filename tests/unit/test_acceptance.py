"""A draft stands as far as it equals what the target samples."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.acceptance import accept


@pytest.mark.parametrize(
    ("draft", "sampled", "verdict"),
    [
        ([], [7], (0, 7)),
        ([1], [1, 2], (1, 2)),
        ([1], [3, 2], (0, 3)),
        ([1, 2, 3], [1, 2, 3, 4], (3, 4)),
        ([1, 2, 3], [1, 9, 3, 4], (1, 9)),
        ([1, 2, 3], [9, 2, 3, 4], (0, 9)),
        ([5, 5, 5], [5, 5, 4, 5], (2, 4)),
    ],
)
def test_the_draft_stands_up_to_its_first_wrong_token(draft, sampled, verdict):
    assert accept(draft, sampled) == verdict


@pytest.mark.parametrize(("draft", "sampled"), [([], []), ([1], [1]), ([1], [1, 2, 3])])
def test_one_more_sample_than_draft_tokens_is_needed(draft, sampled):
    with pytest.raises(ValueError, match=f"{len(draft)} draft tokens need {len(draft) + 1} samples"):
        accept(draft, sampled)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=8), st.data())
def test_what_is_committed_is_what_the_target_sampled(draft, data):
    sampled = data.draw(st.lists(st.integers(0, 2), min_size=len(draft) + 1, max_size=len(draft) + 1))
    n_accepted, next_token = accept(draft, sampled)
    assert [*draft[:n_accepted], next_token] == sampled[: n_accepted + 1]
    assert n_accepted == len(draft) or draft[n_accepted] != next_token
