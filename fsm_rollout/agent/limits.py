"""When a trajectory has had enough, in one order.

Order of the checks (each documented limit N allows N and is reached at N + 1):

On entering a working state, after the entry has been charged and before its handler runs:

1. ``max_visits`` of the state
2. the limit that its handler spends: ``assistant_turns``, ``tool_calls``, ``user_turns``
3. ``wall_seconds``, when the time is already up

While the handler runs:

4. ``wall_seconds``, then the state's own ``timeout`` (which raises ``timed_out``), when both are due at once
5. before each generation: ``assistant_turns`` (second and later generations of a visit), then ``response_tokens``, then
   ``context_tokens`` (also when the engine's window is the narrower one). Glue that does not fit is not written at all.
6. after a generation that was cut short of its ``max_tokens``: the token limit that cut it
7. after tool calls: ``bad_calls``

A reached limit raises ``limit_reached``. Rows may route each limit once; from then on it does not hold in states that
have a ``max_visits`` of their own (they live on that alone), and ends the trajectory anywhere else.
"""

from __future__ import annotations

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.trajectory.reasons import LimitName
from fsm_rollout.trajectory.trajectory import Trajectory, routing_key


class LimitReached(Exception):  # control flow between a visit and the scheduler, not an error
    """A limit holds the trajectory back; ``limit`` is its name."""

    def __init__(self, limit: str) -> None:
        self.limit = limit
        super().__init__(limit)


def applies(graph: AgentGraph, trajectory: Trajectory, limit: str) -> bool:
    """Whether ``limit`` holds in the present state: it does until routed, and after that where no max_visits does."""
    return routing_key(limit, trajectory.state) not in trajectory.routed or (
        graph.states[trajectory.state].max_visits is None
    )


def remaining(graph: AgentGraph, trajectory: Trajectory, limit: str, used: float) -> float:
    """Return how much of ``limit`` is left (negative when exceeded), infinity when it does not hold."""
    bound = trajectory.limits.get(limit)
    if bound is None or not applies(graph, trajectory, limit):
        return float("inf")
    return bound - used


def reached_on_entry(graph: AgentGraph, trajectory: Trajectory, spends: str | None, now: float) -> str | None:
    """Return the first limit that keeps the present state's handler from running, or ``None``."""
    max_visits = graph.states[trajectory.state].max_visits
    if max_visits is not None and trajectory.visits[trajectory.state] > max_visits:
        return "max_visits"
    if spends is not None and remaining(graph, trajectory, spends, trajectory.spent.get(spends, 0)) < 0:
        return spends
    if remaining(graph, trajectory, LimitName.WALL_SECONDS, trajectory.elapsed(now)) <= 0:
        return "wall_seconds"
    return None
