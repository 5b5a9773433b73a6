"""How much room a visit has for tokens, by the trajectory's limits and the engine's window.

Invariant: whoever writes or samples asks here first, so no stream outgrows what its engine reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fsm_rollout.agent.limits import LimitReached, remaining
from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.states.active_trajectory import ActiveTrajectory
from fsm_rollout.states.bound_agent import BoundAgent, BoundContext
from fsm_rollout.tools.toolbox import LEAST_TOKENS
from fsm_rollout.trajectory.enums import LimitName
from fsm_rollout.trajectory.events import AnyEvent, Message
from fsm_rollout.trajectory.stream import Stream
from fsm_rollout.trajectory.trajectory import Trajectory


class Visit(Protocol):
    """What is needed here of the visit that asks (:class:`fsm_rollout.states.context.HandlerContext`)."""

    active: ActiveTrajectory
    trajectory: Trajectory
    agent: BoundAgent
    state: str
    deadline: Deadline
    clock: Callable[[], float]
    take_in: Callable[[AnyEvent], None]

    async def opened(self, context: str) -> Stream:
        """Return the open stream of a context."""

    async def open(self, bound: BoundContext, messages: list[Message], *, instead_of_glue: bool = False) -> Stream:
        """Open a context's next stream."""

    def remaining(self, limit: str) -> float:
        """Return how much of a limit is left."""


def room_in_context(visit: Visit, bound: BoundContext, length: int) -> float:
    """Return how many tokens ``context_tokens`` and the engine's window leave a stream of that length."""
    window = bound.client.facts.max_context - length
    if visit.trajectory.limits.get(LimitName.CONTEXT_TOKENS) is None:
        return window
    return min(window, remaining(visit.agent.graph, visit.trajectory, LimitName.CONTEXT_TOKENS, length))


def room_to_sample(visit: Visit, bound: BoundContext, length: int, added: int = 0) -> dict[str | None, float]:
    """Return how many tokens each limit allows a stream (``added`` of ``length`` new); LimitReached: none."""
    trajectory = visit.trajectory
    room: dict[str | None, float] = {
        LimitName.RESPONSE_TOKENS: remaining(
            visit.agent.graph, trajectory, LimitName.RESPONSE_TOKENS, trajectory.response_tokens + added
        ),
        LimitName.CONTEXT_TOKENS: room_in_context(visit, bound, length),
    }
    if room[LimitName.RESPONSE_TOKENS] < 1:
        raise LimitReached(LimitName.RESPONSE_TOKENS)
    if room[LimitName.CONTEXT_TOKENS] < 1:
        raise limit_reached(visit, bound, LimitName.CONTEXT_TOKENS)
    return room


def room_for_result(visit: Visit, bound: BoundContext) -> int:
    """Return how many tokens one of a turn's tool results may have, so that all leave half of what there is."""
    trajectory, stream = visit.trajectory, visit.trajectory.stream(bound.name)
    left = room_in_context(visit, bound, 0 if stream is None else stream.length)
    spent = trajectory.response_tokens
    left = min(left, remaining(visit.agent.graph, trajectory, LimitName.RESPONSE_TOKENS, spent))
    return max(LEAST_TOKENS, int(left / 2 / max(1, len(trajectory.attempts))))


def limit_reached(visit: Visit, bound: BoundContext, limit: str) -> LimitReached:
    """Return the error for a limit that stops a generation; it says so if the engine's window is the limit."""
    context_tokens = visit.trajectory.limits.get(LimitName.CONTEXT_TOKENS)
    window = bound.client.facts.max_context
    if limit != LimitName.CONTEXT_TOKENS or (context_tokens is not None and context_tokens <= window):
        return LimitReached(limit)
    setting = "not set" if context_tokens is None else f"{context_tokens:,}"
    detail = f"the window of engine '{bound.spec.engine}' is {window:,} tokens, and context_tokens is {setting}"
    return LimitReached(limit, detail)
