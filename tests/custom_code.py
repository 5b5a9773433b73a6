"""What a user's own module may hold: a handler with options, one without, predicates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from fsm_rollout.states import State
from fsm_rollout.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from fsm_rollout.visit import Visit


class Options(BaseModel):
    depth: int = Field(ge=1)
    style: str = "plain"


class Search(State):
    """A handler that spends assistant turns and has options."""

    triggers = ("found", "lost")
    spends = "assistant_turns"
    Options = Options

    async def run(self, trajectory: Trajectory, visit: Visit) -> Outcome:
        await visit.generate(self.spec.context)
        return Outcome(visit.rng.choice(self.triggers))


class Free(State):
    """A handler that spends nothing and has no options."""

    triggers = ("done",)

    async def run(self, trajectory: Trajectory, visit: Visit) -> Outcome:
        return Outcome("done")


class Undeclared:
    """No handler: it declares no triggers."""


def is_long(trajectory: object) -> int:
    """Return something that is not a bool."""
    return 2


def exceeds(trajectory: object, argument: int) -> bool:
    """Compare the argument alone."""
    return argument > 1


NOT_A_FUNCTION = 5


class Impostor(Free):
    """Declares a trigger that is the scheduler's."""

    triggers = ("limit_reached",)
