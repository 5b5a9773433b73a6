"""INTERACTING: a user (simulated, scripted, or a model) answers the latest turn, may score it, and may end it all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsm_rollout.states.base import State
from fsm_rollout.trajectory.reasons import LimitName, Trigger
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from fsm_rollout.states.context import HandlerContext


class Interact(State):
    """Asks the interaction for a reply to the state's context."""

    triggers = (Trigger.REPLIED, Trigger.INTERACTION_DONE)
    spends = LimitName.USER_TURNS
    keys = ("interaction",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Ask, score the turn that was judged, write the reply."""
        judged = trajectory.last_turn(self.spec.context)
        reply = await ctx.interact(self.spec.context)
        if reply.score is not None and judged is not None:
            ctx.score_turn(reply.score, judged)
        if reply.content is not None:
            ctx.write([{"role": "user", "content": reply.content}], context=self.spec.context)
        return Outcome(Trigger.INTERACTION_DONE if reply.done else Trigger.REPLIED)
