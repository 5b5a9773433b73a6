"""What a user's own module may hold: a handler with options, one without, predicates."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Options(BaseModel):
    depth: int = Field(ge=1)
    style: str = "plain"


class Search:
    """A handler that spends assistant turns and has options."""

    triggers = ("found", "lost")
    spends = "assistant_turns"
    Options = Options


class Free:
    """A handler that spends nothing and has no options."""

    triggers = ("done",)


class Undeclared:
    """No handler: it declares no triggers."""


def is_long(trajectory: object) -> int:
    """Return something that is not a bool."""
    return 2


def exceeds(trajectory: object, argument: int) -> bool:
    """Compare the argument alone."""
    return argument > 1


NOT_A_FUNCTION = 5
