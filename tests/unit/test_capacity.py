"""The memory plan: the most tokens that fit, never more, and errors whose advice works."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.capacity import MemoryLimits, join
from executor.capacity import solve as solve_ranks
from executor.errors import InvalidConfig
from executor.sizes import parse_size, size
from ipc.messages import MemoryProfile

MB = 1 << 20
BLOCK = 64


def profile(
    *,
    device: str = "cpu",
    process: int = 100 * MB,
    weights: int = 200 * MB,
    per_token: int = 1000,
    block: int = BLOCK,
    useful: int = 8192,
    free: int = 1000 * MB,
) -> MemoryProfile:
    return MemoryProfile(
        device=device,
        device_id=device,
        process=process,
        weights=weights,
        activations=10 * MB,
        workspace=5 * MB,
        graphs=0,
        load_peak=320 * MB,
        kv_bytes_per_token=per_token,
        kv_block=block,
        max_kv_tokens=useful,
        free=free,
        held=300 * MB,
    )


def solve(profiles, limits, standby=()):
    """Of lanes of one rank."""
    return solve_ranks({lane: (its,) for lane, its in profiles.items()}, limits, standby)


PROFILES = st.builds(
    profile,
    device=st.sampled_from(["cuda:0", "cuda:1"]),
    process=st.integers(0, 100 * MB),
    weights=st.integers(0, 500 * MB),
    per_token=st.integers(1, 10**6),
    block=st.sampled_from([1, 64]),
    useful=st.integers(1, 200).map(lambda blocks: blocks * BLOCK),
    free=st.integers(0, 4000 * MB),
)


def taken(plan, device: str, tokens: int) -> int:
    """In other words than the code's."""
    total = 0
    for lane in plan.lanes:
        its = lane.profile
        if its.device_id == device:
            fixed = its.process + its.weights + its.activations + its.workspace + its.graphs
            held = min(tokens, its.max_kv_tokens) * its.kv_bytes_per_token
            total += lane.copies * (fixed + held)
    return total


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    target=PROFILES,
    speculator=st.none() | PROFILES,
    budget=st.none() | st.integers(0, 6000 * MB),
    standby=st.sampled_from([(), ("target",), ("target", "speculator")]),
)
def test_the_plan_is_the_largest_that_fits(target, speculator, budget, standby):
    profiles = {"target": target} | ({"speculator": speculator} if speculator else {})
    limits = MemoryLimits(budget)
    try:
        plan = solve(profiles, limits, standby)
    except InvalidConfig as error:
        # What it advises works.
        needed = parse_size(re.search(r"try (\S+),", str(error))[1])
        assert budget is None or needed > budget
        if len({its.device_id for its in profiles.values()}) == 1:
            assert solve(profiles, MemoryLimits(needed), standby).tokens >= 1
        return
    block = max(its.kv_block for its in profiles.values())
    useful = max(its.max_kv_tokens for its in profiles.values())
    assert plan.tokens % block == 0
    assert [lane.kv_tokens for lane in plan.lanes] == [
        min(plan.tokens, its.max_kv_tokens) for its in profiles.values()
    ]
    assert [lane.copies for lane in plan.lanes] == [1 + (name in standby) for name in profiles]
    for device, its in plan.budgets.items():
        assert taken(plan, device, plan.tokens) == plan.taken(device) <= its
    if plan.tokens < useful:
        assert any(taken(plan, device, plan.tokens + block) > its for device, its in plan.budgets.items())


def test_lanes_on_one_device_share_nine_tenths_of_what_is_free_and_theirs():
    plan = solve({"target": profile(), "speculator": profile()}, MemoryLimits())
    assert plan.budgets == {"cpu": int(1600 * MB * 0.9)}
    assert plan.tokens == 8192
    assert plan.lanes[0].total == 315 * MB + 8192 * 1000
    assert plan.lanes[0].peak == 320 * MB + (plan.lanes[0].total - 320 * MB)


def test_a_lane_may_take_more_while_it_loads_than_when_it_serves():
    (lane,) = solve({"target": profile(per_token=1)}, MemoryLimits()).lanes
    assert (lane.total, lane.peak) == (315 * MB + 8192, 320 * MB)


def test_each_device_has_a_budget_and_the_scarcest_decides():
    big = profile(device="cuda:0", per_token=100_000, useful=65536)
    small = profile(device="cuda:1", per_token=10, useful=65536)
    plan = solve({"target": big, "speculator": small}, MemoryLimits(1000 * MB))
    assert plan.tokens == (1000 - 315) * MB // 100_000 // BLOCK * BLOCK
    assert [lane.kv_tokens for lane in plan.lanes] == [plan.tokens, plan.tokens]


def test_tokens_can_be_limited():
    profiles = {"target": profile(), "speculator": profile(useful=512)}
    plan = solve(profiles, MemoryLimits(kv_tokens=1000))
    assert [lane.kv_tokens for lane in plan.lanes] == [960, 512]
    assert solve(profiles, MemoryLimits(kv_tokens=10**9)).tokens == 8192


@pytest.mark.parametrize(
    ("limits", "field", "message"),
    [
        (MemoryLimits(kv_tokens=100, max_model_len=1000), "kv_tokens", "a sequence of 1000 tokens; try 1024"),
        (MemoryLimits(kv_tokens=10), "kv_tokens", "kv_tokens 10 cannot hold a sequence of 64 tokens; try 64"),
        (MemoryLimits(316 * MB, kv_tokens=2048), "kv_tokens", "kv_tokens 2048 do not fit: .*; try 1024"),
        (
            MemoryLimits(316 * MB, max_model_len=2048),
            "max_model_len",
            r"2048 tokens need 333MB of 332MB on cpu \(target 333MB\); try 1024, or --memory-budget 339MB",
        ),
        (
            MemoryLimits(100 * MB),
            "memory_budget",
            "64 tokens need 331MB of 105MB .*; try 337MB, or",
        ),
    ],
)
def test_what_cannot_be_names_an_option_and_a_value_that_works(limits, field, message):
    with pytest.raises(InvalidConfig, match=message) as refused:
        solve({"target": profile()}, limits)
    assert refused.value.field == field


def test_a_lane_that_comes_later_holds_what_the_others_hold_or_is_refused():
    plan = solve({"target": profile()}, MemoryLimits(700 * MB, kv_tokens=1024))
    for its, tokens in ((profile(), 1024), (profile(useful=128), 128), (profile(device="cuda:0"), 1024)):
        (share,) = join(plan, "speculator", [its], 1)
        assert share.kv_tokens == tokens
    with pytest.raises(InvalidConfig, match=r"1024 tokens need .* of 735MB on cpu \(target .*, speculator"):
        join(plan, "speculator", [profile(weights=400 * MB)], 1)


def test_ranks_have_shares_of_their_own_and_hold_the_same_tokens():
    """Two heads of keys and values here, one there, and a device for each."""
    ranks = [profile(device="cuda:0", per_token=2000), profile(device="cuda:1", per_token=1000)]
    plan = solve_ranks({"target": ranks, "speculator": [profile(device="cuda:1")]}, MemoryLimits(633 * MB))
    assert [(lane.name, lane.profile.device) for lane in plan.lanes] == [
        ("target", "cuda:0"),
        ("target/1", "cuda:1"),
        ("speculator", "cuda:1"),
    ]
    # The second device, which two share, decides: 3 MB are left there for 2,000 bytes a token.
    assert plan.tokens == 3 * MB // 2000 // BLOCK * BLOCK
    assert [lane.kv for lane in plan.lanes] == [plan.tokens * size for size in (2000, 1000, 1000)]
    assert plan.taken("cuda:1") == 630 * MB + 2000 * plan.tokens <= 633 * MB
    with pytest.raises(InvalidConfig, match=r"on cuda:1 \(target/1 .*, speculator .*\); try 674MB"):
        solve_ranks({"target": ranks, "speculator": [profile(device="cuda:1")]}, MemoryLimits(600 * MB))


def test_ranks_on_one_device_share_its_budget():
    plan = solve_ranks({"target": [profile(), profile()]}, MemoryLimits(), ("target",))
    assert plan.taken("cpu") == 4 * (315 * MB + plan.tokens * 1000)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GB", 4 * 10**9), ("512MiB", 512 * MB), ("1.5g", 1_500_000_000), ("7", 7), (" 2 kb ", 2000)],
)
def test_sizes_are_read(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "much", "-1GB", "4XB", "4iB", "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is no size; try 4GB or 512MiB"):
        parse_size(text)


@given(st.integers(0, 10**13))
def test_a_size_that_is_said_is_enough_and_little_more(nbytes):
    said = parse_size(size(nbytes))
    assert nbytes <= said <= nbytes * 1.01 + 1
