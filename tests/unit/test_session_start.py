"""A lane's start as its session reports it: all steps in order, and what a failure in each becomes."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from draws import toy_lane

from ipc.messages import (
    Allocate,
    Configure,
    Failed,
    Loaded,
    Phase,
    PhaseReached,
    Profile,
    Profiled,
    Ready,
    Stop,
)
from workers import lifecycle
from workers.engines.toy import ToyEngine
from workers.session import EXIT_CODES, Session
from workers.workspace import WorkspaceLocked

EPOCH = "e"
TOKENS = 64
PHASES = get_args(Phase)
DONE_BY = {
    "attention_setup": "set_up_attention",
    "profile": "profile",
    "allocate": "allocate",
    "warm_up": "warm_up",
    "capture": "capture",
    "lock": "lock",
}


class Script:
    """The other end: orders in turn, and the facts that came."""

    def __init__(self, *orders) -> None:
        self.orders = list(orders)
        self.facts: list = []

    def receive(self, deadline):
        return self.orders.pop(0)

    def send(self, fact) -> None:
        self.facts.append(fact)

    def close(self) -> None:
        pass


def run(orders=None) -> tuple[int, list]:
    spec = toy_lane("vocabulary=16", 2, 64)
    usual = (Configure(EPOCH, spec), Profile(EPOCH), Allocate(EPOCH, TOKENS), Stop(EPOCH))
    script = Script(*(usual if orders is None else orders))
    return Session("target", EPOCH, script, 0.0).run(), script.facts  # type: ignore[arg-type]


def test_the_order_of_the_facts():
    status, facts = run()
    names = [fact.phase if isinstance(fact, PhaseReached) else type(fact).__name__ for fact in facts]
    assert status == 0
    assert names == [
        *("Greeted", "boot", "load", "attention_setup", "Loaded"),
        *("profile", "Profiled", "capacity", "allocate", "warm_up", "capture", "lock", "serve", "Ready"),
    ]


@pytest.mark.parametrize("phase", ["load", *DONE_BY])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no such thing"), "configuration"),
        (OSError("no such file"), "load"),
        (MemoryError("no room"), "memory"),
        (torch.OutOfMemoryError("no room on the device"), "memory"),
        (WorkspaceLocked("no room after the lock"), "memory"),
        (RuntimeError("whatever"), "internal"),
    ],
)
def test_a_failure_in_any_step_is_typed_and_ends_the_start(monkeypatch, capfd, phase, error, kind):
    def fail(*arguments):
        if phase == "allocate" and arguments[1:] != (TOKENS,):
            return sound(*arguments)  # a toy has a pool from its making on
        raise error

    if phase == "load":
        monkeypatch.setattr(lifecycle, "load", fail)
    else:
        sound = getattr(ToyEngine, DONE_BY[phase])
        monkeypatch.setattr(ToyEngine, DONE_BY[phase], fail)
    status, facts = run()
    failed = facts[-1]
    assert isinstance(failed, Failed)
    assert (failed.kind, status) == (kind, EXIT_CODES[kind])
    assert str(error) in failed.message
    reached = [fact.phase for fact in facts if isinstance(fact, PhaseReached)]
    assert reached == list(PHASES[: PHASES.index(phase)])
    assert not any(isinstance(fact, Ready) for fact in facts)


@pytest.mark.parametrize(
    ("orders", "says"),
    [
        ([Profile(EPOCH)], "Profile is not legal in state greeted"),
        (
            [Configure(EPOCH, toy_lane("", 1, 64)), Allocate(EPOCH, 1)],
            "Allocate is not legal in state loaded",
        ),
        (
            [Configure(EPOCH, toy_lane("", 1, 64)), Profile(EPOCH), Profile(EPOCH)],
            "Profile is not legal in state profiled",
        ),
    ],
)
def test_orders_that_skip_or_repeat_a_step_are_refused(capfd, orders, says):
    status, facts = run(orders)
    assert (facts[-1].kind, status) == ("protocol", EXIT_CODES["protocol"])
    assert says in facts[-1].message


@pytest.mark.parametrize("told", [0, 1, 2])
def test_a_lane_that_is_not_wanted_any_more_goes_without_a_word(told):
    orders = [Configure(EPOCH, toy_lane("", 1, 64)), Profile(EPOCH)][:told]
    status, facts = run([*orders, Stop(EPOCH)])
    assert status == 0
    assert not any(isinstance(fact, Failed | Ready) for fact in facts)
    assert any(isinstance(fact, Loaded) for fact in facts) == (told > 0)
    assert any(isinstance(fact, Profiled) for fact in facts) == (told > 1)
