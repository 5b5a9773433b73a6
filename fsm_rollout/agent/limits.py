"""The limits of a trajectory: one table of what each counts, and when it is reached.

Invariant: a counted limit N allows N and is reached at N + 1; time and tokens are reached when nothing is left.
The machine, the proof, handlers, simulations, pictures and pages know of limits only what :data:`LIMITS` says.

The checks, in the table's order. On entering a working state, after the entry has been charged and before its handler
runs:

1. ``max_visits`` of the state
2. the limit that its handler spends: ``assistant_turns``, ``tool_calls``, ``user_turns``
3. ``wall_seconds``, when the time is already up

While the handler runs:

4. ``wall_seconds``, then the state's own ``timeout`` (which raises ``timed_out``), when both are due at once
5. before each generation: ``assistant_turns`` (second and later generations of a visit), then ``response_tokens``, then
   ``context_tokens`` (also when the engine's window is the narrower one). Glue that does not fit is not written at all.
6. after a generation that was cut short of its ``max_tokens``: the token limit that cut it
7. after tool calls: ``bad_calls``

Nothing is written or sampled without room for it, so no stream outgrows what its engine reads.

A reached limit raises ``limit_reached``. Transitions may route each limit once. From then on it no longer holds in
states that have a ``max_visits`` of their own, which alone bounds them, and it ends the trajectory in all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.trajectory.enums import LimitName, routing_key
from fsm_rollout.trajectory.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Limit:
    """One entry of the table; its name says what is counted."""

    name: LimitName
    handler: str | None = None  # the built-in handler that is charged for it, if only one is
    # Whether entering a state is charged at least one of it, so that a termination proof may build on it.
    counted: bool = False
    implied: bool = False  # whether it may be reached although the agent does not set it
    price: Callable[[Trajectory], int] | None = None  # what entering a state that spends it costs, where that is not 1
    # Computes how much of it a trajectory has spent at a given time; `None`: the sum of its charges.
    spent: Callable[[Trajectory, float], float] | None = None


# Every limit, in the order in which they are checked.
LIMITS: Mapping[str, Limit] = {
    limit.name: limit
    for limit in (
        Limit(LimitName.MAX_VISITS, implied=True, spent=lambda t, at: t.entries[t.state]),
        Limit(LimitName.ASSISTANT_TURNS, "generate", counted=True),
        Limit(LimitName.TOOL_CALLS, "call_tools", counted=True, price=lambda t: max(1, len(t.attempts))),
        Limit(LimitName.USER_TURNS, "interact", counted=True),
        Limit(LimitName.WALL_SECONDS, spent=lambda t, at: t.elapsed(at)),
        Limit(LimitName.RESPONSE_TOKENS, spent=lambda t, at: t.response_tokens),
        Limit(
            LimitName.CONTEXT_TOKENS,
            implied=True,  # by the engine's window
            spent=lambda t, at: max((stream.length for stream in t.streams), default=0),
        ),
        Limit(LimitName.BAD_CALLS, "call_tools"),
    )
}
# The limits that a state may be charged for when it is entered.
COUNTED_LIMITS = tuple(name for name, limit in LIMITS.items() if limit.counted)


class LimitReached(Exception):  # control flow between a visit and the scheduler, not an error
    """A limit was reached; ``limit`` is its name, ``detail`` says more where there is more to say."""

    def __init__(self, limit: str, detail: str | None = None) -> None:
        self.limit, self.detail = limit, detail
        super().__init__(limit)


def spent(trajectory: Trajectory, limit: str, at: float) -> float:
    """Return how much of ``limit`` a trajectory has spent at the time ``at``."""
    entry = LIMITS.get(limit)  # a journal of another version, or a damaged one, may name others
    return entry.spent(trajectory, at) if entry and entry.spent else trajectory.spent.get(limit, 0)


def remaining(graph: AgentGraph, trajectory: Trajectory, limit: str, used: float) -> float:
    """Return how much of ``limit`` is left (negative when exceeded), infinity when it does not hold.

    A limit holds until it was routed, and after that in the states that have no ``max_visits``.
    """
    bound = trajectory.limits.get(limit)
    if bound is None:
        return float("inf")
    routed = trajectory.routed_limits and routing_key(limit, trajectory.state) in trajectory.routed_limits
    if routed and graph.states[trajectory.state].max_visits is not None:
        return float("inf")
    return bound - used


def on_entry(graph: AgentGraph, trajectory: Trajectory, spends: str | None, at: float) -> tuple[str | None, float]:
    """Return the first limit that keeps the present state's handler from running, and how many seconds are left."""
    wall, state = float("inf"), trajectory.state
    if trajectory.limits.get(LimitName.WALL_SECONDS) is not None:
        # `trajectory.elapsed(at)`, written out: each visit begins here.
        elapsed = at - trajectory.started_at - trajectory.suspended_seconds
        wall = remaining(graph, trajectory, LimitName.WALL_SECONDS, elapsed)
    max_visits = graph.states[state].max_visits
    if max_visits is not None and trajectory.entries[state] > max_visits:
        return LimitName.MAX_VISITS, wall
    if spends is not None and remaining(graph, trajectory, spends, trajectory.spent.get(spends, 0)) < 0:
        return spends, wall
    return LimitName.WALL_SECONDS if wall <= 0 else None, wall


def room_in_context(graph: AgentGraph, trajectory: Trajectory, window: int, length: int) -> float:
    """Return how many tokens ``context_tokens`` and the engine's ``window`` leave a stream of that length."""
    if trajectory.limits.get(LimitName.CONTEXT_TOKENS) is None:
        return window - length
    return min(window - length, remaining(graph, trajectory, LimitName.CONTEXT_TOKENS, length))


def room_to_sample(
    graph: AgentGraph, trajectory: Trajectory, window: int, engine: str, length: int, added: int = 0
) -> dict[str | None, float]:
    """Return how many tokens each limit allows a stream (``added`` of ``length`` new); LimitReached: none."""
    used = trajectory.response_tokens + added
    room: dict[str | None, float] = {
        LimitName.RESPONSE_TOKENS: remaining(graph, trajectory, LimitName.RESPONSE_TOKENS, used),
        LimitName.CONTEXT_TOKENS: room_in_context(graph, trajectory, window, length),
    }
    if room[LimitName.RESPONSE_TOKENS] < 1:
        raise LimitReached(LimitName.RESPONSE_TOKENS)
    if room[LimitName.CONTEXT_TOKENS] < 1:
        raise token_limit(trajectory, LimitName.CONTEXT_TOKENS, window, engine)
    return room


def token_limit(trajectory: Trajectory, limit: str, window: int, engine: str) -> LimitReached:
    """Return the error for a limit that stops a generation; it says so if the engine's ``window`` is the limit."""
    context_tokens = trajectory.limits.get(LimitName.CONTEXT_TOKENS)
    if limit != LimitName.CONTEXT_TOKENS or (context_tokens is not None and context_tokens <= window):
        return LimitReached(limit)
    setting = "not set" if context_tokens is None else f"{context_tokens:,}"
    return LimitReached(limit, f"the window of engine '{engine}' is {window:,} tokens, and context_tokens is {setting}")
