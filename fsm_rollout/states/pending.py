"""PENDING: the trajectory's opening prompt becomes the first tokens of its context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsm_rollout.states.base import State
from fsm_rollout.trajectory.reasons import Trigger
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from fsm_rollout.states.context import HandlerContext


class OpenPrompt(State):
    """Opens the state's context with the prompt's messages (or the state's own template)."""

    triggers = (Trigger.PROMPTED,)
    keys = ()

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Open the stream, unless entering the state has done so."""
        ctx.open_context(self.spec.context)
        return Outcome(Trigger.PROMPTED)
