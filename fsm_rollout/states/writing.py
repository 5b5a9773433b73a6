"""A state that only writes: its ``prompt`` was appended on entry, and nothing else happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsm_rollout.states.base import State
from fsm_rollout.trajectory.reasons import Trigger
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from fsm_rollout.states.context import HandlerContext


class Write(State):
    """Says that its prompt has been written (every working state writes its prompt on entry)."""

    triggers = (Trigger.WRITTEN,)
    keys = ()

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Nothing is left to do."""
        return Outcome(Trigger.WRITTEN)
