"""How many tokens the lanes can hold together: from what each measured to what each allocates. Pure.

Both lanes hold the same sequences, so the answer is one number of tokens; a lane that cannot use so many
holds as many as it can use. Lanes on one device share its budget. Each rank of a lane has its own profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from executor.errors import InvalidConfig
from executor.sizes import size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ipc.messages import LaneName, MemoryProfile

_ADVICE_MARGIN = 0.02
_SHARE = 0.9
"""Of a device's memory that is free or ours already, unless a budget is given."""


class MemoryLimits(NamedTuple):
    """What the user asked for. Bytes per device, and tokens; None: as much as is of use and fits."""

    budget: int | None = None
    kv_tokens: int | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class LanePlan:
    """One lane's share, or that of one of its ranks, in bytes; `copies` counts its spare processes, too."""

    lane: LaneName
    profile: MemoryProfile
    kv_tokens: int
    copies: int = 1
    rank: int = 0

    @property
    def name(self) -> str:
        """`target`; `target/1` is its second rank."""
        return f"{self.lane}/{self.rank}" if self.rank else self.lane

    @property
    def fixed(self) -> int:
        """Bytes without keys and values, per copy."""
        profile = self.profile
        model = profile.weights + profile.activations + profile.workspace + profile.graphs
        return profile.process + model

    @property
    def kv(self) -> int:
        return self.kv_tokens * self.profile.kv_bytes_per_token

    @property
    def total(self) -> int:
        """Bytes per copy when all tokens are held."""
        return self.fixed + self.kv

    @property
    def peak(self) -> int:
        """The most that a copy ever takes: a lane may take more while it loads than when it serves."""
        return max(self.total, self.profile.load_peak)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`tokens` that both lanes hold; `budgets` by the identity of the device, in bytes.

    `lanes`: one for each rank of each lane.
    """

    lanes: tuple[LanePlan, ...]
    tokens: int
    budgets: Mapping[str, int]

    def taken(self, device: str) -> int:
        """Bytes of all lanes on it, spares included."""
        return sum(lane.total * lane.copies for lane in self.lanes if lane.profile.device_id == device)

    @property
    def crowded(self) -> list[str]:
        """Devices that are asked for more than their budget."""
        return [device for device, budget in self.budgets.items() if self.taken(device) > budget]

    @property
    def fits(self) -> bool:
        return not self.crowded


def solve(
    profiles: Mapping[LaneName, Sequence[MemoryProfile]],
    limits: MemoryLimits,
    standby: Sequence[LaneName] = (),
) -> MemoryPlan:
    """The most tokens that all lanes can hold; `profiles`: of the ranks of each lane.

    Raises InvalidConfig with an option and a value that work.
    """
    everyone = list(chain.from_iterable(profiles.values()))
    budgets = _budgets(everyone, limits.budget)
    block = max(profile.kv_block for profile in everyone)
    useful = max(profile.max_kv_tokens for profile in everyone)

    def plan(tokens: int) -> MemoryPlan:
        lanes = [
            share
            for lane, its in profiles.items()
            for share in _shares(lane, its, tokens, 2 if lane in standby else 1)
        ]
        return MemoryPlan(tuple(lanes), tokens, budgets)

    least = min(useful, _rounded_up(limits.max_model_len or block, block))
    most = useful if limits.kv_tokens is None else min(useful, limits.kv_tokens // block * block)
    if most < least:
        raise InvalidConfig(
            "kv_tokens",
            f"kv_tokens {limits.kv_tokens} cannot hold a sequence of {limits.max_model_len or block} tokens; "
            f"try {least}",
        )
    tokens = most
    if not plan(most).fits:
        fitting, over = 0, _rounded_up(most, block) // block  # in blocks
        while over - fitting > 1:
            middle = (fitting + over) // 2
            fitting, over = (middle, over) if plan(middle * block).fits else (fitting, middle)
        tokens = fitting * block
    if tokens < least:
        raise _impossible(plan(least), tokens, limits)
    if limits.kv_tokens is not None and tokens < most:
        where = _crowded(plan(most))
        raise InvalidConfig("kv_tokens", f"kv_tokens {limits.kv_tokens} do not fit: {where}; try {tokens}")
    return plan(tokens)


def join(
    plan: MemoryPlan, lane: LaneName, profiles: Sequence[MemoryProfile], copies: int
) -> tuple[LanePlan, ...]:
    """The shares of a lane that comes to others that run already: it must hold as many tokens as they do.

    Raises InvalidConfig if that does not fit.
    """
    joined = _shares(lane, profiles, plan.tokens, copies)
    budgets = _budgets(profiles, None) | dict(plan.budgets)
    whole = MemoryPlan((*plan.lanes, *joined), plan.tokens, budgets)
    if not whole.fits:
        needed = _advice(whole.taken(whole.crowded[0]))
        raise InvalidConfig(
            "memory_budget", f"memory_budget: {_crowded(whole)}; try {needed}, or a smaller model"
        )
    return joined


def _shares(
    lane: LaneName, profiles: Sequence[MemoryProfile], tokens: int, copies: int
) -> tuple[LanePlan, ...]:
    return tuple(
        LanePlan(lane, profile, min(tokens, profile.max_kv_tokens), copies, rank)
        for rank, profile in enumerate(profiles)
    )


def _budgets(profiles: Sequence[MemoryProfile], budget: int | None) -> dict[str, int]:
    """By device. All lanes are loaded when the first profiles, so that each sees what the others took."""
    shares = {}
    for device in {profile.device_id for profile in profiles}:
        there = [profile for profile in profiles if profile.device_id == device]
        ours = min(profile.free for profile in there) + sum(profile.held for profile in there)
        shares[device] = int(ours * _SHARE) if budget is None else budget
    return shares


def _impossible(plan: MemoryPlan, tokens: int, limits: MemoryLimits) -> InvalidConfig:
    """Why not even the least plan that is of use fits; only `tokens` do."""
    where, needed = _crowded(plan), _advice(plan.taken(plan.crowded[0]))
    if tokens and limits.max_model_len is not None:
        return InvalidConfig(
            "max_model_len",
            f"max_model_len {limits.max_model_len} does not fit: {where}; try {tokens}, "
            f"or --memory-budget {needed}",
        )
    return InvalidConfig("memory_budget", f"memory_budget: {where}; try {needed}, or a smaller model")


def _advice(nbytes: int) -> str:
    """A budget that will do: what a process takes beside its model differs a little from start to start."""
    return size(int(nbytes * (1 + _ADVICE_MARGIN)))


def _crowded(plan: MemoryPlan) -> str:
    """The first device that is asked for too much, and by whom."""
    device = plan.crowded[0]
    there = [lane for lane in plan.lanes if lane.profile.device_id == device]
    lanes = ", ".join(f"{lane.name} {size(lane.total * lane.copies)}" for lane in there)
    needed, budget, name = plan.taken(device), plan.budgets[device], there[0].profile.device
    return f"{plan.tokens} tokens need {size(needed)} of {size(budget)} on {name} ({lanes})"


def _rounded_up(tokens: int, block: int) -> int:
    return -(-tokens // block) * block
