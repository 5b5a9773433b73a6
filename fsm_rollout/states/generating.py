"""GENERATING: one assistant turn is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsm_rollout.states.base import State
from fsm_rollout.trajectory.reasons import FinishReason, LimitName, Trigger
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from fsm_rollout.states.context import HandlerContext


class Generate(State):
    """Samples one turn of the state's context. A turn cut at its own ``max_tokens`` raises ``truncated``."""

    triggers = (Trigger.GENERATED, Trigger.TRUNCATED)
    spends = LimitName.ASSISTANT_TURNS
    keys = ("sampling",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Ask the engine and wait for the turn's end."""
        generated = await ctx.generate(self.spec.context)
        return Outcome(Trigger.TRUNCATED if generated.finish_reason == FinishReason.LENGTH else Trigger.GENERATED)
