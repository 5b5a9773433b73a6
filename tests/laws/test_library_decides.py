"""The ``transitions`` library decides: every transition of a run comes out of its own ``execute``.

The oracle is a plain machine of the library, built here from the agent alone and driven beside the run: one model per
trajectory, whose state the library sets. It is given what each visit came to, and must go where the run goes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import transitions
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.agent.graph import AgentGraph, Predicate
from fsm_rollout.agent.loader import load_agent
from fsm_rollout.agent.machine import AgentMachine, AgentTransition
from fsm_rollout.agent.predicates import compile_predicate
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.testing.simulation.plan import Fault, Plan, ToolFate
from fsm_rollout.testing.simulation.simulate import Simulation, simulate
from fsm_rollout.testing.strategies.calls import WRITERS
from fsm_rollout.trajectory.events import Transitioned
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.graphs import graphs
from tests.kit import CONFIGS
from tests.laws.agents import agents
from tests.laws.test_laws import WORKERS, _tokenizer, drawn  # noqa: F401  # its fixture, too
from tests.paired_shards import sharing

Step = tuple[str, str, str]  # source, trigger, dest
Kept = dict[str, list[Step]]  # by trajectory
UNSET = {"max_visits", "context_tokens"}  # limits that hold without the agent's setting them
IMPLICIT = ("truncated", "failed", "timed_out", "limit_reached", "cancelled")


def stock_machine(graph: AgentGraph) -> transitions.Machine:
    """Return the agent's machine, row by row; conditions are asked with the trajectory and its outcome."""
    machine = transitions.Machine(
        model=None, states=[*graph.states, "TERMINATED"], initial=graph.initial, auto_transitions=False
    )
    working = [name for name, state in graph.states.items() if not state.final and name != "TERMINATED"]

    def plain(predicate: Predicate) -> Callable[..., bool]:
        holds = compile_predicate(predicate, graph)
        return lambda trajectory, outcome, by_user: bool(holds(trajectory, outcome))

    def by_users(trajectory: Trajectory, outcome: Outcome, by_user: bool) -> bool:
        return by_user

    for row in graph.transitions:
        if row.trigger != "cancelled":
            machine.add_transition(
                row.trigger, working if "*" in row.source else list(row.source), row.dest,
                conditions=[by_users, *map(plain, row.conditions)], unless=[*map(plain, row.unless)],
            )  # fmt: skip
    for name in working:
        if graph.states[name].on_error is not None:
            machine.add_transition("failed", name, graph.states[name].on_error, conditions=[by_users])
    for trigger in IMPLICIT:
        machine.add_transition(trigger, working, "TERMINATED")
    return machine


class Model:
    """One trajectory, as the library knows it: a state."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.routed: set[object] = set()


class Oracle:
    """Goes where the library leads, and keeps every step."""

    def __init__(self) -> None:
        self.machines: dict[int, tuple[AgentGraph, transitions.Machine]] = {}
        self.models: dict[str, Model] = {}
        self.steps: Kept = {}

    def fire(self, graph: AgentGraph, trajectory: Trajectory, outcome: Outcome, routed: bool) -> None:
        _, machine = self.machines.setdefault(id(graph), (graph, stock_machine(graph)))
        model = self.models.setdefault(trajectory.trajectory_id, Model(graph.initial))
        source, limit, trigger = model.state, outcome.limit, outcome.trigger
        if limit is not None:
            key = (limit, source) if limit == "max_visits" else limit
            is_set = limit in UNSET or limit in graph.limits.model_dump(exclude_none=True)
            routed = routed and is_set and key not in model.routed
            model.routed.add(key)
        event = machine.events.get(trigger)
        if event is None or source not in event.transitions or not event.trigger(model, trajectory, outcome, routed):
            trigger = "failed"
            assert machine.events[trigger].trigger(model, trajectory, Outcome(trigger), routed and limit is None)
        self.steps.setdefault(trajectory.trajectory_id, []).append((source, trigger, model.state))


@contextmanager
def watched() -> Iterator[tuple[Oracle, Kept]]:
    """Drive an oracle beside every machine, and keep what comes out of the library's ``execute`` for ours."""
    oracle, executed = Oracle(), Kept()
    execute, fire = transitions.Transition.execute, AgentMachine.fire

    def watched_execute(self: transitions.Transition, event_data: Any) -> bool:
        done = execute(self, event_data)
        if done and isinstance(event_data.machine, AgentMachine):
            step = (self.source, event_data.event.name, str(self.dest))
            executed.setdefault(event_data.model.trajectory_id, []).append(step)
        return done

    def watched_fire(self: AgentMachine, trajectory: Trajectory, outcome: Outcome, **how: Any) -> None:
        oracle.fire(self.graph, trajectory, outcome, how.get("routed", True))
        fire(self, trajectory, outcome, **how)

    with (
        patch.object(transitions.Transition, "execute", watched_execute),
        patch.object(AgentMachine, "fire", watched_fire),
    ):
        yield oracle, executed


def transitioned(run: Simulation) -> Kept:
    steps: Mapping[str, list[Step]] = {
        name: [(e.source, e.trigger, e.dest) for e in events if isinstance(e, Transitioned)]
        for name, events in run.events.items()
    }
    return {name: taken for name, taken in steps.items() if taken}


def the_library_decides(graph: AgentGraph, plan: Plan, workers: int = 1) -> Kept:
    """Run a plan; what was recorded is what the library executed, and where a machine of its own goes, too."""
    with watched() as (oracle, executed):
        run = simulate(graph, plan, around=sharing(workers))
    assert run.crash is None
    recorded = transitioned(run)
    assert executed == recorded
    assert oracle.steps == recorded
    return recorded


@st.composite
def forks(draw: st.DrawFn) -> AgentGraph:
    """Draw an agent whose every step is a choice among rows that hold and rows that do not, in some order."""
    names = ["A", "B", "C"]
    visits = st.builds(lambda most: {"name": "visits_over", "argument": most}, st.integers(0, 2))
    said = st.builds(lambda text: {"name": "text_contains", "argument": text}, st.sampled_from("ae"))
    dests, kinds = st.sampled_from([*names, "TERMINATED"]), st.sampled_from(["conditions", "unless"])
    rows: list[dict[str, Any]] = []
    for name in names:
        for trigger in ("generated", "limit_reached", "failed"):
            for kind in draw(st.lists(kinds, min_size=1, max_size=2)):
                asked = draw(st.lists(visits | said, min_size=1, max_size=2))
                rows.append({"source": name, "trigger": trigger, "dest": draw(dests), kind: asked})
            rows.append({"source": name, "trigger": trigger, "dest": draw(dests)})
    state = {"handler": "generate", "prompt": "Go on.", "timeout": 5.0, "max_visits": draw(st.integers(1, 3))}
    limits = {"assistant_turns": draw(st.integers(3, 9))}
    return AgentGraph(agent="forks", initial="A", limits=limits, states=dict.fromkeys(names, state), transitions=rows)


@given(st.one_of(drawn(agents()), drawn(forks()), drawn(graphs(max_states=6, plain=True), max_prompts=1)), WORKERS)
def test_the_library_decides_every_transition_and_the_stock_one_agrees(
    case: tuple[AgentGraph, Plan], workers: int
) -> None:
    the_library_decides(*case, workers)


CALL = WRITERS["hermes"]("calculate", {"left": 1, "operator": "+", "right": 1})
CALLS = {"tool_agent/main": (Turn(text=CALL),), "tool_user/main": (Turn(text=CALL), Turn(text="2"))}
OVERLOAD = {f"{name}/main": (Turn(error="Overload: full"),) for name in ("tool_agent", "reflect")}
LATE = {"tool_agent/main": (Turn(text=CALL, delay=100.0),)}


@pytest.mark.parametrize(
    ("agent", "plan", "raised"),
    [
        ("single_turn", Plan(prompts=2, n=2), {"prompted", "generated"}),
        ("tool_agent", Plan(says=(CALLS,)), {"tools_done", "limit_reached"}),
        ("tool_user", Plan(says=(CALLS,)), {"tools_done"}),
        ("tool_agent", Plan(says=(CALLS,), tools=(ToolFate(error="OSError"),)), {"tools_done"}),
        ("tool_agent", Plan(says=(OVERLOAD,)), {"failed"}),
        ("tool_agent", Plan(says=(LATE,)), {"timed_out"}),
        ("tool_agent", Plan(n=2, says=(LATE,), faults=(Fault(at=1.0, kind="cancel"),)), {"cancelled"}),
        ("reflect", Plan(), {"written"}),
        ("delegate", Plan(), {"prompted"}),
    ],
)
def test_agents_failures_stops_and_limits_go_through_the_library(agent: str, plan: Plan, raised: set[str]) -> None:
    recorded = the_library_decides(load_agent(CONFIGS / f"agents/{agent}.yaml"), plan)
    assert raised <= {trigger for steps in recorded.values() for _, trigger, _ in steps}


def test_what_decides_is_the_library_s_own() -> None:
    own = vars(AgentTransition).keys() | vars(AgentMachine).keys()
    theirs = {"execute", "_eval_conditions", "trigger", "_trigger", "_process", "check", "callbacks", "get_model_state"}
    assert not own & theirs
    assert AgentMachine.event_cls is transitions.Event
    assert AgentTransition.condition_cls is transitions.core.Condition
