"""What the visits of users' handlers came to in a simulated run, seen from outside.

Invariant: a watched handler does exactly what it does unwatched.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.concurrency.cancellation import being_cancelled
from fsm_rollout.errors import place_of
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class HandlerVisit:
    """One visit of a user's handler: how it came out."""

    trajectory_id: str
    state: str
    handler: str
    outcome: object  # what it returned, or the exception that it raised
    where: str  # where it was when it was stopped, or where it raised: `file:line, in function`
    declared: tuple[str, ...]
    cancelled: bool  # whether it had been told to stop: by a timeout, or because its trajectory was

    @property
    def stopped(self) -> bool:
        """Whether it was told to stop, and did."""
        return self.cancelled and isinstance(self.outcome, asyncio.CancelledError)

    @property
    def undeclared(self) -> bool:
        """Whether it returned something that is not one of its outcomes."""
        if isinstance(self.outcome, BaseException):
            return False
        return not isinstance(self.outcome, Outcome) or self.outcome.trigger not in self.declared


def watch_visits(handler: State, visits: list[HandlerVisit]) -> None:
    """Note each visit of a handler in a list."""
    run = handler.run
    name = f"{type(handler).__module__}:{type(handler).__qualname__}"

    def note(trajectory: Trajectory, outcome: object, where: str = "") -> None:
        visit = HandlerVisit(
            trajectory.trajectory_id, handler.name, name, outcome, where, tuple(handler.triggers), being_cancelled()
        )
        visits.append(visit)

    async def watched(trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        try:
            outcome = await run(trajectory, ctx)
        except LimitReached:
            raise
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            note(trajectory, error, place_of(error))
            raise
        note(trajectory, outcome)
        return outcome

    handler.run = watched  # type: ignore[method-assign]
