"""What a user's own module may hold: a handler with options, one without, predicates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from fsm_rollout.states import State
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    from fsm_rollout.states.context import HandlerContext


class Options(BaseModel):
    depth: int = Field(ge=1)
    style: str = "plain"


class Search(State):
    """A handler that spends assistant turns and has options."""

    triggers = ("found", "lost")
    spends = "assistant_turns"
    Options = Options

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        await ctx.generate(self.spec.context)
        return Outcome(ctx.rng.choice(self.triggers))


class Free(State):
    """A handler that spends nothing and has no options."""

    triggers = ("done",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        return Outcome("done")


class Undeclared:
    """No handler: it declares no triggers."""


def is_long(trajectory: object) -> int:
    """Return something that is not a bool."""
    return 2


def calls_so_far(trajectory: Trajectory) -> float | None:
    """A score of a state."""
    if "broken" in trajectory.text:
        raise KeyError("broken")
    return float(trajectory.calls_seen) or None


def exceeds(trajectory: object, argument: int) -> bool:
    """Compare the argument alone."""
    return argument > 1


def nothing_at_all() -> bool:
    """A predicate without a parameter."""
    return True


def by_name(trajectory, *, argument) -> bool:  # type: ignore[no-untyped-def]
    """Take the argument by its name."""
    return bool(argument)


NOT_A_FUNCTION = 5


class Impostor(Free):
    """Declares a trigger that is the scheduler's."""

    triggers = ("limit_reached",)


async def waits(trajectory: object) -> bool:
    """Would always hold: a coroutine is true."""
    return False


class WaitsToo:
    """An async predicate as an object."""

    async def __call__(self, trajectory: object) -> bool:
        """Would always hold."""
        return False


waits_too = WaitsToo()


class NotDerived:
    """Looks like a handler."""

    triggers = ("done",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Do nothing."""
        return Outcome("done")


class Abstract(State):
    """Has no run."""

    triggers = ("done",)


class NotAsync(Free):
    """Its run is a plain function."""

    def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:  # type: ignore[override]
        """Do nothing."""
        return Outcome("done")


class TakesOne(Free):
    """Its run takes too little."""

    async def run(self, ctx: HandlerContext) -> Outcome:  # type: ignore[override]
        """Do nothing."""
        return Outcome("done")


an_instance = Undeclared()
