"""Where a text ends: tokens, text and log-probabilities at the same place, whatever the drafts were."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import request

from executor.commit import commit
from executor.request import Acceptance, Delta
from ipc.messages import TokenLogprobs, VerifiedItem

A, B, C, D, E, F = range(6)
ROOM = 1000


def verdict(n_accepted: int, next_token: int, logprobs: list[TokenLogprobs] | None = None) -> VerifiedItem:
    return VerifiedItem(0, 0, 0, n_accepted, next_token, logprobs or [])


def run(draft, judged, room=ROOM, prompt=(9,), done=(), **params):
    """Commits once; returns the delta and the request."""
    its = request(list(prompt), **params)
    for token in done:
        commit(its, [], verdict(0, token), ROOM)
    return commit(its, draft, judged, room), its


def test_accepted_drafts_then_the_targets_own_token():
    delta, its = run([A, B, C], verdict(2, D))
    assert delta == Delta("abd", [A, B, D], drafted=2, drafted_text=2)
    assert its.tokens == [9, A, B, D]
    assert its.generated == 3
    assert its.finish_reason is None
    assert (its.acceptance.drafted, its.acceptance.accepted) == ([1, 1, 1], [1, 1, 0])


def test_a_plain_step():
    delta, its = run([], verdict(0, C))
    assert delta == Delta("c", [C])
    assert its.acceptance.length == 1.0


def test_max_tokens_cuts_and_says_length():
    delta, its = run([A, B, C], verdict(3, D), max_tokens=2)
    assert delta == Delta("ab", [A, B], drafted=2, drafted_text=2)
    assert its.finish_reason == "length"
    assert its.completion().token_ids == [A, B]


def test_the_end_of_the_context_cuts_and_says_length():
    delta, its = run([A, B, C], verdict(3, D), room=3)
    assert delta == Delta("ab", [A, B], drafted=2, drafted_text=2)
    assert its.finish_reason == "length"


def test_a_stop_token_is_kept_but_not_shown():
    delta, its = run([A, B, C], verdict(3, D), stop_token_ids=(B,))
    assert delta == Delta("a", [A, B], drafted=2, drafted_text=1)
    assert its.finish_reason == "stop"
    assert its.completion().text == "a"


def test_a_stop_token_waits_for_min_tokens():
    delta, its = run([B, A, B], verdict(3, D), stop_token_ids=(B,), min_tokens=2, max_tokens=9)
    assert delta.token_ids == [B, A, B]
    assert its.finish_reason == "stop"


def test_a_stop_beats_the_length_cap():
    for params in ({"stop_token_ids": (B,)}, {"stop": "b"}):
        _, its = run([A], verdict(1, B), max_tokens=2, **params)
        assert its.finish_reason == "stop"
        _, its = run([A], verdict(1, B), room=3, **params)
        assert its.finish_reason == "stop"


def test_a_stop_string_over_several_tokens_and_rounds():
    delta, its = run([C, D, E], verdict(3, F), done=(A, B), stop="bcd")
    assert delta == Delta("", [C, D], drafted=2)
    assert its.finish_reason == "stop"
    assert its.completion().text == "a"
    assert its.completion().token_ids == [A, B, C, D]


def test_text_that_may_become_a_stop_string_is_held_back_and_given_out_at_the_end():
    its = request([9], max_tokens=3, stop="bcd")
    assert commit(its, [], verdict(0, A), ROOM).text == "a"
    assert commit(its, [], verdict(0, B), ROOM).text == ""
    assert commit(its, [], verdict(0, C), ROOM).text == "bc"
    assert its.completion().text == "abc"
    assert its.finish_reason == "length"


def test_a_stop_string_waits_for_min_tokens_but_may_begin_before():
    delta = run([A, B, A, B], verdict(4, C), stop="ab", min_tokens=3)[0]
    assert delta == Delta("ab", [A, B, A, B], drafted=4, drafted_text=2)
    delta = run([C, A, B], verdict(3, D), stop="ab", min_tokens=3)[0]
    assert delta == Delta("c", [C, A, B], drafted=3, drafted_text=1)
    delta = run([A, B, C], verdict(3, D), stop="ab", min_tokens=3)[0]
    assert delta == Delta("abcd", [A, B, C, D], drafted=3, drafted_text=3)


def test_logprobs_are_cut_with_the_tokens():
    reported = [TokenLogprobs(-float(i), [(i, -float(i))]) for i in range(4)]
    for params in ({"max_tokens": 2}, {"stop_token_ids": (B,)}, {"stop": "b"}, {"stop": "ab"}):
        _, its = run([A, B, C], verdict(3, D, reported), logprobs=1, **params)
        assert its.completion().token_ids == [A, B]
        assert its.completion().logprobs == reported[:2]


def test_no_logprobs_unless_asked_for():
    assert run([A], verdict(1, B), max_tokens=2)[1].completion().logprobs is None


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=12, max_size=12),
    st.lists(st.integers(0, 4), min_size=12, max_size=12),
    st.integers(1, 12),
    st.integers(0, 3),
    st.lists(st.text("abcd", min_size=1, max_size=3), max_size=2),
    st.lists(st.integers(0, 3), max_size=1),
)
def test_rounds_of_any_length_commit_what_single_steps_do(
    tokens, cuts, max_tokens, min_tokens, stop, stop_ids
):
    """How many drafts stood in which round must not show in tokens, text or the reason to end."""
    params = {
        "max_tokens": max_tokens,
        "min_tokens": min(min_tokens, max_tokens),
        "stop": tuple(stop),
        "stop_token_ids": tuple(stop_ids),
    }
    plain, drafted = request([9], **params), request([9], **params)
    texts = {id(plain): "", id(drafted): ""}
    for its, lengths in ((plain, [0] * 12), (drafted, cuts)):
        left = list(tokens)
        for length in lengths:
            if its.finish_reason is not None or not left:
                break
            n_accepted = min(length, len(left) - 1)
            [*draft, last] = left[: n_accepted + 1]
            del left[: n_accepted + 1]
            texts[id(its)] += commit(its, [*draft, 0, 0], verdict(n_accepted, last), ROOM).text
    if plain.finish_reason is not None:
        assert drafted.completion().token_ids == plain.completion().token_ids
        assert drafted.completion().text == plain.completion().text == texts[id(drafted)] == texts[id(plain)]
        assert drafted.finish_reason == plain.finish_reason


def test_acceptance_counts_add_up():
    first, second = Acceptance(), Acceptance()
    first.record(2, 1)
    second.record(3, 3)
    second.record(0, 0)
    first.add(second)
    assert (first.rounds, first.tokens) == (3, 7)
    assert (first.drafted, first.accepted) == ([2, 2, 1], [2, 1, 1])
    assert first.by_position == pytest.approx([1.0, 0.5, 1.0])
    assert first.length == pytest.approx(7 / 3)
    assert Acceptance().length == 0.0
    assert Acceptance().by_position == []
