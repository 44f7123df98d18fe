"""The link table, exhaustively: what is legal leads where it should, all else is refused in place."""

from __future__ import annotations

import typing

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ipc import codec
from ipc.errors import ProtocolError
from ipc.link import Link, LinkState, link_table
from ipc.messages import Close, Draft, Drafted, LaneName, Open, Progressed, Verified, Verify

LANES = typing.get_args(LaneName)
NAMES = [*codec.ORDERS, *codec.FACTS]
ALIVE = {
    *("expected", "greeted", "starting", "loaded", "profiling", "profiled", "preparing"),
    *("idle", "busy"),
}


def expected(lane: str, state: str, name: str) -> str | None:
    """The rules again in other words: the state after a message, or None if it is not legal."""
    ask, answer = {"target": ("Verify", "Verified"), "speculator": ("Draft", "Drafted")}[lane]
    if name == "Failed":
        return None if state == "failed" else "failed"
    if name == "Stop":
        return "stopping" if state in ALIVE | {"stopping"} else "failed"
    if state == "stopping":
        late = "PhaseReached", "Loaded", "Profiled", "Ready", "Progressed", "Exported", "Imported"
        return state if name in (answer, *late) else None
    if name in ("Export", "Exported", "Import", "Imported", "Unmap"):
        return state if state in ALIVE - {"expected", "greeted", "starting"} else None
    if name in ("Open", "Close", "Progressed") or (name, lane) == ("Cancel", "speculator"):
        return state if state in ("idle", "busy") else None
    steps = {
        ("expected", "Attach" if lane == "speculator" else ""): "expected",
        ("expected", "Greeted"): "greeted",
        ("greeted", "Configure"): "starting",
        ("starting", "PhaseReached"): "starting",
        ("starting", "Loaded"): "loaded",
        ("loaded", "Profile"): "profiling",
        ("profiling", "PhaseReached"): "profiling",
        ("profiling", "Profiled"): "profiled",
        ("profiled", "Allocate"): "preparing",
        ("preparing", "PhaseReached"): "preparing",
        ("preparing", "Ready"): "idle",
        ("idle", ask): "busy",
        ("busy", answer): "idle",
    }
    return steps.get((state, name))


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("state", list(LinkState))
@pytest.mark.parametrize("name", NAMES)
def test_every_pair_of_state_and_message(lane, state, name):
    after = expected(lane, str(state), name)
    if after is None:
        with pytest.raises(ProtocolError, match=f"link to the {lane}: {name} is not legal in state {state}"):
            link_table(lane).step(state, name)
    else:
        assert link_table(lane).step(state, name) == after


@pytest.mark.parametrize("lane", LANES)
def test_the_table_names_only_states_and_messages_that_exist(lane):
    for (state, name), after in link_table(lane).rows.items():
        assert isinstance(state, LinkState)
        assert isinstance(after, LinkState)
        assert name in NAMES


def test_a_refused_message_leaves_the_link_where_it_is():
    link = Link("target")
    for message in (Close("e", []), Verify("e", 1, []), Verified("e", 1, [], 0), Open("e", [])):
        with pytest.raises(ProtocolError):
            link.passed(message)
        assert link.state is LinkState.EXPECTED


class AskAndAnswer(RuleBasedStateMachine):
    """A serving link against a counter: never two orders in flight, never an answer to none."""

    def __init__(self) -> None:
        super().__init__()
        self.link = Link("speculator")
        self.link.state = LinkState.IDLE
        self.in_flight = 0

    def attempt(self, message, legal: bool) -> bool:
        before = self.link.state
        if not legal:
            with pytest.raises(ProtocolError):
                self.link.passed(message)
            assert self.link.state is before
            return False
        self.link.passed(message)
        return True

    @rule()
    def ask(self):
        self.in_flight += self.attempt(Draft("e", 1, []), self.in_flight == 0)

    @rule()
    def answer(self):
        self.in_flight -= self.attempt(Drafted("e", 1, [], 0), self.in_flight == 1)

    @rule(message=st.sampled_from([Open("e", []), Close("e", []), Progressed("e", 1)]))
    def tell(self, message):
        self.attempt(message, legal=True)

    @rule(message=st.sampled_from([Verify("e", 1, []), Verified("e", 1, [], 0)]))
    def the_other_lane(self, message):
        self.attempt(message, legal=False)

    @precondition(lambda self: self.in_flight == 0)
    @invariant()
    def idle_iff_nothing_is_in_flight(self):
        assert self.link.state is LinkState.IDLE

    @precondition(lambda self: self.in_flight == 1)
    @invariant()
    def busy_iff_one_is_in_flight(self):
        assert self.link.state is LinkState.BUSY


AskAndAnswer.TestCase.settings = settings(
    max_examples=50, stateful_step_count=20, derandomize=True, deadline=None
)
TestAskAndAnswer = AskAndAnswer.TestCase
