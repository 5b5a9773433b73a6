"""The limits on entry: each is reached at the very amount that the table says, neither earlier nor later."""

from typing import Any

import pytest

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.limits import LIMITS, on_entry, remaining
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.unit.agent.facts import moved, prompted


def standing(limits: dict[str, float], spent: dict[str, int] | None = None, **state: Any) -> tuple[Any, Trajectory]:
    """An agent, and a trajectory of it that has just entered GENERATING, at 3 s of its time."""
    graph = AgentGraph.model_validate(
        {
            "agent": "a",
            "limits": limits,
            "states": {"PENDING": {}, "GENERATING": state},
            "transitions": [
                {"trigger": "prompted", "source": "PENDING", "dest": "GENERATING"},
                {"trigger": "generated", "source": "GENERATING", "dest": "GENERATING"},
            ],
        }
    )
    first = prompted("PENDING", at=100.0, **graph.limits.model_dump())
    return graph, Trajectory.fold([first, moved("PENDING", "GENERATING", **(spent or {}))])


def reached_at(graph: AgentGraph, trajectory: Trajectory, spends: str | None, now: float) -> str | None:
    return on_entry(graph, trajectory, spends, now)[0]


@pytest.mark.parametrize(
    ("now", "reached"), [(100.0, None), (109.999, None), (110.0, "wall_seconds"), (110.5, "wall_seconds")]
)
def test_time_is_up_to_the_moment(now: float, reached: str | None) -> None:
    graph, trajectory = standing({"wall_seconds": 10.0})
    assert reached_at(graph, trajectory, None, now) == reached


@pytest.mark.parametrize("limit", [name for name, limit in LIMITS.items() if limit.counted])
@pytest.mark.parametrize(("spent", "reached"), [(2, False), (3, False), (4, True)])
def test_a_counted_limit_of_three_allows_three(limit: str, spent: int, reached: bool) -> None:
    graph, trajectory = standing({limit: 3}, {limit: spent})
    assert reached_at(graph, trajectory, limit, 103.0) == (limit if reached else None)
    assert remaining(graph, trajectory, limit, spent) == 3 - spent


@pytest.mark.parametrize(("visits", "reached"), [(1, None), (2, None), (3, "max_visits")])
def test_a_state_is_visited_as_often_as_it_may_be(visits: int, reached: str | None) -> None:
    graph, trajectory = standing({"assistant_turns": 9}, max_visits=2)
    trajectory.entries["GENERATING"] = visits
    assert reached_at(graph, trajectory, None, 103.0) == reached


def test_the_order_of_the_table_decides_which_one_is_named() -> None:
    graph, trajectory = standing({"assistant_turns": 0, "wall_seconds": 1.0}, {"assistant_turns": 1}, max_visits=1)
    assert reached_at(graph, trajectory, "assistant_turns", 103.0) == "assistant_turns"
    trajectory.entries["GENERATING"] = 2
    assert reached_at(graph, trajectory, "assistant_turns", 103.0) == "max_visits"
    trajectory.entries["GENERATING"], trajectory.spent = 1, {}
    assert reached_at(graph, trajectory, "assistant_turns", 103.0) == "wall_seconds"


def test_a_prompt_lowers_a_limit_and_never_raises_one() -> None:
    graph, _ = standing({"assistant_turns": 3, "wall_seconds": 10.0})
    own = graph.limits
    assert own.lowered(own.model_copy(update={"assistant_turns": 2})).assistant_turns == 2
    assert own.lowered(own.model_copy(update={"assistant_turns": 5})).assistant_turns == 3
    assert own.lowered(own.model_copy(update={"assistant_turns": None})).assistant_turns == 3
    assert own.lowered(own.model_copy(update={"tool_calls": 4})).tool_calls == 4
