"""The machine: only transitions decide, the first that holds wins, limits are routed once, something always fires."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transitions import Machine, MachineError
from transitions.extensions import GraphMachine, HierarchicalMachine, LockedMachine
from transitions.extensions.asyncio import AsyncMachine
from transitions.extensions.markup import MarkupMachine
from transitions.extensions.nesting import NestedState

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.loader import load_agent
from fsm_rollout.agent.machine import AgentMachine
from fsm_rollout.trajectory.events import AnyEvent, Generated, Transitioned
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.kit import CONFIGS
from tests.unit.agent.facts import BROKEN, CALL, folded, generated, prompted

BAD = [{"name": "tests.unit.agent.test_machine:raising"}]


def agent(rows: list[dict[str, Any]], states: dict[str, Any] | None = None, **more: Any) -> AgentGraph:
    states = states or {"PENDING": {}, "GENERATING": {}, "PROCESSING_TOOLS": {}, "SUMMARISING": {"handler": "generate"}}
    return AgentGraph(agent="a", states=states, transitions=[{"source": "GENERATING"} | row for row in rows], **more)


def fire(graph: AgentGraph, subject: Trajectory, outcome: Outcome, *, routed: bool = True) -> Transitioned:
    events: list[AnyEvent] = []

    def emit(event: AnyEvent) -> None:
        subject.apply(event)
        events.append(event)

    AgentMachine(graph).fire(subject, outcome, at=1.0, emit=emit, routed=routed)
    (event,) = events
    assert isinstance(event, Transitioned)
    assert subject.state == event.dest
    return event


ROWS: list[dict[str, Any]] = [
    {"trigger": "generated", "dest": "PROCESSING_TOOLS", "conditions": "has_tool_calls"},
    {"trigger": "generated", "dest": "TERMINATED", "unless": {"text_contains": "wait"}},
    {"trigger": "generated", "source": "*", "dest": "SUMMARISING"},
    {"trigger": "limit_reached", "dest": "SUMMARISING", "conditions": {"limit": "tool_calls"}},
]


@pytest.mark.parametrize(
    ("turn", "dest", "spent"),
    [
        (generated("done"), "TERMINATED", {}),
        (generated("wait"), "SUMMARISING", {"assistant_turns": 1}),
        (generated("wait", CALL, CALL), "PROCESSING_TOOLS", {"tool_calls": 2}),
        (generated("done", BROKEN), "PROCESSING_TOOLS", {"tool_calls": 1}),
    ],
)
def test_the_first_row_that_holds_wins_and_entering_is_charged(
    turn: Generated, dest: str, spent: dict[str, int]
) -> None:
    event = fire(agent(ROWS), folded(turn), Outcome("generated"))
    assert (event.dest, event.spent) == (dest, spent)
    assert event.stop_reason == ("answered" if dest == "TERMINATED" else None)


def test_entering_a_tool_state_without_a_call_is_charged_all_the_same() -> None:
    assert fire(agent([ROWS[0] | {"conditions": []}]), folded(), Outcome("generated")).spent == {"tool_calls": 1}


def raising(_: Trajectory) -> bool:
    raise ZeroDivisionError("oops")


RAISES = [{"trigger": "generated", "dest": "TERMINATED", "conditions": BAD}, *ROWS[1:3]]
RAISES_ON_LIMIT = [
    {"trigger": "limit_reached", "dest": "SUMMARISING", "conditions": BAD}, {"trigger": "failed", "dest": "SUMMARISING"}
]  # fmt: skip
FAILED, LIMIT = {"trigger": "failed", "dest": "SUMMARISING"}, Outcome("limit_reached", limit="tool_calls")


@pytest.mark.parametrize(
    ("rows", "outcome", "ends"),
    [
        (ROWS, Outcome("truncated"), "truncated"),
        (ROWS, Outcome("failed", error="ValueError"), "failed:ValueError"),
        (ROWS, Outcome("failed", error="PromptTooLong"), "prompt_too_long"),
        (ROWS, Outcome("timed_out"), "timed_out"),
        (ROWS, Outcome("limit_reached", limit="user_turns"), "limit:user_turns"),
        (ROWS, Outcome("cancelled"), "cancelled"),
        (ROWS, Outcome("nonsense"), "failed:NoTransition"),
        ([{"trigger": "cancelled", "source": "*", "dest": "GENERATING"}], Outcome("cancelled"), "cancelled"),
        ([{"trigger": "generated", "source": "PENDING", "dest": "GENERATING"}], Outcome("generated"),
         "failed:NoTransition"),
        (RAISES, Outcome("generated"), "failed:PredicateFailed"),
        ([*RAISES, FAILED | {"conditions": BAD}], Outcome("generated"), "failed:PredicateFailed"),
        ([*RAISES, FAILED], Outcome("generated"), None),
        (RAISES_ON_LIMIT, LIMIT, "failed:PredicateFailed"),  # the proof does not count a way round it
        ([FAILED], Outcome("failed", error="X"), None),
    ],
)  # fmt: skip
def test_what_no_row_takes_ends_the_trajectory_with_its_reason(
    rows: list[dict[str, Any]], outcome: Outcome, ends: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    event = fire(agent(rows, limits={"tool_calls": 2}), folded(), outcome)
    assert not caplog.records, "the trajectory says it; the log need not"
    assert (event.dest, event.stop_reason) == ("SUMMARISING" if ends is None else "TERMINATED", ends)
    assert ends != "failed:PredicateFailed" or "ZeroDivisionError: oops" in (event.detail or "")


def test_a_limit_is_routed_once_and_only_if_the_agent_sets_it() -> None:
    """The proof does not know of one that only the prompt set, so it may only end the trajectory."""
    subject, graph = folded(), agent(ROWS, limits={"tool_calls": 2})
    assert fire(graph, subject, LIMIT).dest == "SUMMARISING"
    subject.state = "GENERATING"
    assert fire(graph, subject, LIMIT).stop_reason == "limit:tool_calls"
    assert fire(agent(ROWS), folded(), LIMIT).stop_reason == "limit:tool_calls"


def test_a_stop_is_taken_by_no_row_of_the_user_s() -> None:
    assert fire(agent([FAILED]), folded(), Outcome("failed", error="X"), routed=False).stop_reason == "failed:X"


def test_on_error_is_the_last_row_for_failed() -> None:
    states = {"GENERATING": {"on_error": "SUMMARISING"}, "SUMMARISING": {"handler": "generate"}}
    assert fire(agent([], states), folded(), Outcome("failed", error="X")).dest == "SUMMARISING"
    earlier = [{"trigger": "failed", "dest": "TERMINATED", "stop_reason": "gave_up"}]
    assert fire(agent(earlier, states), folded(), Outcome("failed", error="X")).stop_reason == "gave_up"


STATES = ["PENDING", "GENERATING", "PROCESSING_TOOLS", "SUMMARISING"]
TRIGGERS = ["generated", "prompted", "failed", "timed_out", "truncated"]
HELD = {None: {}, True: {"conditions": {"text_contains": "yes"}}, False: {"unless": {"text_contains": "yes"}}}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(TRIGGERS), st.sampled_from([*STATES, "*"]), st.sampled_from([*STATES, "TERMINATED"]),
            st.sampled_from([*HELD]),
        ),
        max_size=8,
    ),
    st.sampled_from(STATES),
    st.sampled_from(TRIGGERS),
)  # fmt: skip
def test_order_of_rows_is_the_order_in_which_they_are_tried(
    table: list[tuple[str, str, str, bool | None]], state: str, trigger: str
) -> None:
    """Oracle: walk the table by hand. The text has what conditions ask for, and so has not what must not be there."""
    rows = [{"trigger": t, "source": source, "dest": dest} | HELD[holds] for t, source, dest, holds in table]
    subject = folded(generated("yes"), first=prompted(state))
    expected = next((d for t, s, d, h in table if t == trigger and s in (state, "*") and h is not False), None)
    if expected is None:
        failed = next((d for t, s, d, h in table if t == "failed" and s in (state, "*") and h is not False), None)
        implicit = trigger in ("failed", "timed_out", "truncated")
        expected = "TERMINATED" if implicit or failed is None else failed
    assert fire(agent(rows), subject, Outcome(trigger, error="E")).dest == expected


# -- the same machine, of any class of the library --------------------------------------------------------------------


class Model:
    """What a user might give the library: it answers conditions by attributes and methods of their names."""

    has_tool_calls = True

    def __init__(self, **answers: bool) -> None:
        self.__dict__ |= answers


def test_a_machine_of_the_library_is_driven_by_hand() -> None:
    model = Model()
    machine = agent([*ROWS, {"trigger": "prompted", "source": "PENDING", "dest": "GENERATING"}]).machine(model=model)
    assert (model.state, machine.states["TERMINATED"].final) == ("PENDING", True)  # type: ignore[attr-defined]
    for trigger, state in {"prompted": "GENERATING", "generated": "PROCESSING_TOOLS", "failed": "TERMINATED"}.items():
        assert getattr(model, trigger)()
        assert model.state == state  # type: ignore[attr-defined]
    with pytest.raises(MachineError):
        model.generated()  # type: ignore[attr-defined]
    model = Model(**{"has_tool_calls": False, 'text_contains "wait"': False})
    agent(ROWS, initial="GENERATING").machine(model=model).events["generated"].trigger(model)
    assert model.state == "TERMINATED"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match='text_contains "wait"'):
        agent(ROWS[1:], initial="GENERATING").machine(model=(silent := Model())).events["generated"].trigger(silent)


@pytest.mark.parametrize("path", sorted((CONFIGS / "agents").glob("*.yaml")), ids=lambda path: path.stem)
def test_markup_and_pictures_of_the_library_show_every_agent(path: Path) -> None:
    graph = load_agent(path)
    # 1. The markup is plain data that has every transition in its order, and makes the same machine again.
    markup = graph.machine(MarkupMachine).markup
    decides = AgentMachine(graph)
    for state in graph.working_states:
        for event in decides.events.values():
            shown = [t["dest"] for t in markup["transitions"] if (t["source"], t["trigger"]) == (state, event.name)]
            assert shown == [transition.dest for transition in event.transitions.get(state, ())]
    spelt = {str(p) for row in graph.transitions for p in (*row.conditions, *row.unless)}
    assert spelt == {name for t in markup["transitions"] for key in ("conditions", "unless") for name in t.get(key, ())}
    again = MarkupMachine(markup={key: value for key, value in markup.items() if key != "models"})
    assert again.markup["transitions"] == markup["transitions"]
    # 2. The picture has every state, and every transition with its conditions.
    machine = graph.machine(partial(GraphMachine, graph_engine="mermaid", show_conditions=True), model := Model())
    drawn = model.get_graph().draw(None)  # type: ignore[attr-defined]
    assert machine.models == [model]
    for state in (*graph.states, "TERMINATED"):
        assert state in drawn
    for text in (*spelt, *(row.trigger for row in graph.transitions)):
        assert text in drawn


class SlashState(NestedState):
    separator = "/"  # with the library's own, `_`, most names would be two


class NestedMachine(HierarchicalMachine):
    state_cls = SlashState


@pytest.mark.parametrize("machine_class", [LockedMachine, AsyncMachine, NestedMachine])
def test_other_machines_of_the_library_take_it_too(machine_class: type[Machine]) -> None:
    machine = agent(ROWS).machine(machine_class, Model())
    assert isinstance(machine, machine_class)
    assert len(machine.get_transitions("generated", "GENERATING", "PROCESSING_TOOLS")) == 1
