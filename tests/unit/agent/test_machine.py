"""The machine: only rows decide, the first that holds wins, limits are routed once, and something always fires."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.machine import AgentMachine
from fsm_rollout.trajectory.events import (
    AnyEvent,
    ContextOpened,
    Generated,
    MalformedCall,
    Prompted,
    ToolCall,
    Transitioned,
)
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory


def agent(rows: list[dict[str, Any]], states: dict[str, Any] | None = None, **more: Any) -> AgentGraph:
    states = states or {"PENDING": {}, "GENERATING": {}, "PROCESSING_TOOLS": {}, "SUMMARISING": {"handler": "generate"}}
    return AgentGraph(agent="a", states=states, transitions=rows, **more)


def trajectory(state: str = "GENERATING") -> Trajectory:
    first = Prompted(
        at=0.0, trajectory_id="t", group_id="g", sample=0, agent="a", initial=state, seed=0, date="2026-01-01",
        messages=[{"role": "user", "content": "?"}], extra={}, limits={},
    )  # fmt: skip
    return Trajectory.fold([first])


def generated(text: str = "", attempts: list[ToolCall | MalformedCall] | None = None) -> Generated:
    return Generated(
        at=0.0, context="main", state="GENERATING", ids=array("i", [7]), logprobs=array("f", [-1.0]), versions=[(1, 0)],
        finish_reason="stop", message={"role": "assistant", "content": text}, attempts=attempts or [],
    )  # fmt: skip


def opened() -> ContextOpened:
    return ContextOpened(
        at=0.0, context="main", state="PENDING", messages=[], ids=array("i", [1]), trained=True, engine="policy"
    )


def fire(machine: AgentMachine, subject: Trajectory, outcome: Outcome) -> Transitioned:
    events: list[AnyEvent] = []

    def emit(event: AnyEvent) -> None:
        subject.apply(event)
        events.append(event)

    machine.fire(subject, outcome, at=1.0, emit=emit)
    (event,) = events
    assert isinstance(event, Transitioned)
    return event


CALLS, WAIT = [{"name": "has_tool_calls"}], [{"name": "text_contains", "argument": "wait"}]
TOO_MANY = [{"name": "limit", "argument": "tool_calls"}]
ROWS = [
    {"trigger": "generated", "source": "GENERATING", "dest": "PROCESSING_TOOLS", "conditions": CALLS},
    {"trigger": "generated", "source": "GENERATING", "dest": "TERMINATED", "unless": WAIT},
    {"trigger": "generated", "source": "*", "dest": "SUMMARISING"},
    {"trigger": "limit_reached", "source": "GENERATING", "dest": "SUMMARISING", "conditions": TOO_MANY},
]
CALL = ToolCall(id="c", name="x", arguments={})
BROKEN = MalformedCall(id="b", kind="unclosed", message="?")


@pytest.mark.parametrize(
    ("text", "attempts", "dest", "spent"),
    [
        ("done", [], "TERMINATED", {}),
        ("wait", [], "SUMMARISING", {"assistant_turns": 1}),
        ("wait", [CALL, CALL], "PROCESSING_TOOLS", {"tool_calls": 2}),
        ("done", [BROKEN], "PROCESSING_TOOLS", {"tool_calls": 1}),
    ],
)
def test_the_first_row_that_holds_wins_and_entering_is_charged(
    text: str, attempts: list[Any], dest: str, spent: dict[str, int]
) -> None:
    subject = trajectory()
    subject.apply(opened())
    subject.apply(generated(text, attempts))
    event = fire(AgentMachine(agent(ROWS)), subject, Outcome("generated"))
    assert (event.dest, event.spent, subject.state) == (dest, spent, dest)
    assert event.stop_reason == ("answered" if dest == "TERMINATED" else None)


def test_entering_a_tool_state_without_a_call_is_charged_all_the_same() -> None:
    machine = AgentMachine(agent([{"trigger": "generated", "source": "GENERATING", "dest": "PROCESSING_TOOLS"}]))
    assert fire(machine, trajectory(), Outcome("generated")).spent == {"tool_calls": 1}


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome("truncated"), "truncated"),
        (Outcome("failed", error="ValueError"), "failed:ValueError"),
        (Outcome("failed", error="PromptTooLong"), "prompt_too_long"),
        (Outcome("timed_out"), "timed_out"),
        (Outcome("limit_reached", limit="user_turns"), "limit:user_turns"),
        (Outcome("cancelled"), "cancelled"),
        (Outcome("nonsense"), "failed:NoTransition"),
    ],
)
def test_what_no_row_takes_ends_the_trajectory_with_its_reason(outcome: Outcome, reason: str) -> None:
    event = fire(AgentMachine(agent(ROWS)), trajectory(), outcome)
    assert (event.dest, event.stop_reason) == ("TERMINATED", reason)


def test_each_limit_is_routed_once() -> None:
    machine, subject = AgentMachine(agent(ROWS, limits={"tool_calls": 2})), trajectory()
    reached = Outcome("limit_reached", limit="tool_calls")
    assert fire(machine, subject, reached).dest == "SUMMARISING"
    subject.state = "GENERATING"
    event = fire(machine, subject, reached)
    assert (event.dest, event.stop_reason) == ("TERMINATED", "limit:tool_calls")


def test_a_limit_that_only_the_prompt_set_is_not_routed() -> None:
    """The proof does not know of it, so it may only end the trajectory."""
    event = fire(AgentMachine(agent(ROWS)), trajectory(), Outcome("limit_reached", limit="tool_calls"))
    assert event.stop_reason == "limit:tool_calls"


def test_a_predicate_that_fails_on_a_limit_cannot_be_routed_around() -> None:
    rows = [
        {
            "trigger": "limit_reached", "source": "GENERATING", "dest": "SUMMARISING",
            "conditions": [{"name": "tests.unit.agent.test_machine:raising"}],
        },
        {"trigger": "failed", "source": "GENERATING", "dest": "SUMMARISING"},
    ]  # fmt: skip
    machine = AgentMachine(agent(rows, limits={"tool_calls": 2}))
    event = fire(machine, trajectory(), Outcome("limit_reached", limit="tool_calls"))
    assert (event.dest, event.stop_reason) == ("TERMINATED", "failed:PredicateFailed")


def test_cancelled_takes_no_row_even_if_one_is_written() -> None:
    rows = [{"trigger": "cancelled", "source": "*", "dest": "GENERATING"}]
    assert fire(AgentMachine(agent(rows)), trajectory(), Outcome("cancelled")).dest == "TERMINATED"


def test_on_error_is_the_last_row_for_failed() -> None:
    states = {"GENERATING": {"on_error": "SUMMARISING"}, "SUMMARISING": {"handler": "generate"}}
    assert fire(AgentMachine(agent([], states)), trajectory(), Outcome("failed", error="X")).dest == "SUMMARISING"


def raising(_: Trajectory) -> bool:
    raise ZeroDivisionError("oops")


def test_a_raising_predicate_is_a_failure_that_rows_may_take() -> None:
    bad = [{"name": "tests.unit.agent.test_machine:raising"}]
    rows = [
        {"trigger": "generated", "source": "GENERATING", "dest": "TERMINATED", "conditions": bad},
        {"trigger": "generated", "source": "GENERATING", "dest": "TERMINATED"},
    ]
    event = fire(AgentMachine(agent(rows)), trajectory(), Outcome("generated"))
    assert event.stop_reason == "failed:PredicateFailed"
    assert "ZeroDivisionError: oops" in (event.detail or "")
    routed = [*rows, {"trigger": "failed", "source": "GENERATING", "dest": "SUMMARISING"}]
    assert fire(AgentMachine(agent(routed)), trajectory(), Outcome("generated")).dest == "SUMMARISING"
    worse = [*rows, {"trigger": "failed", "source": "GENERATING", "dest": "SUMMARISING", "conditions": bad}]
    event = fire(AgentMachine(agent(worse)), trajectory(), Outcome("generated"))
    assert (event.dest, event.stop_reason) == ("TERMINATED", "failed:PredicateFailed")


STATES = ["PENDING", "GENERATING", "PROCESSING_TOOLS", "SUMMARISING"]
TRIGGERS = ["generated", "prompted", "failed", "timed_out", "truncated"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(TRIGGERS), st.sampled_from([*STATES, "*"]), st.sampled_from([*STATES, "TERMINATED"]),
            st.sampled_from([None, True, False]),
        ),
        max_size=8,
    ),
    st.sampled_from(STATES),
    st.sampled_from(TRIGGERS),
)  # fmt: skip
def test_order_of_rows_is_the_order_in_which_they_are_tried(
    table: list[tuple[str, str, str, bool | None]], state: str, trigger: str
) -> None:
    """Oracle: walk the table by hand. A condition is text_contains of something that is, or is not, in the text."""
    rows = []
    for row_trigger, source, dest, holds in table:
        conditions = [] if holds is None else [{"name": "text_contains", "argument": "yes" if holds else "no"}]
        rows.append({"trigger": row_trigger, "source": source, "dest": dest, "conditions": conditions})
    subject = trajectory(state)
    subject.apply(opened())
    subject.apply(generated("yes"))
    expected = next((d for t, s, d, h in table if t == trigger and s in (state, "*") and h is not False), None)
    if expected is None:
        failed = next((d for t, s, d, h in table if t == "failed" and s in (state, "*") and h is not False), None)
        implicit = trigger in ("failed", "timed_out", "truncated")
        expected = "TERMINATED" if implicit or failed is None else failed
    assert fire(AgentMachine(agent(rows)), subject, Outcome(trigger, error="E")).dest == expected
