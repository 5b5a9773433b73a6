"""How long something was under way, by the clock on the wall: what ran side by side counts once.

Invariant: :func:`covered` is the one way in which durations are added up; trajectories, summaries, batches and pages
all say what it says.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


def covered(stretches: Iterable[tuple[float, float]]) -> float:
    """Return the seconds in which at least one of the stretches ``(start, end)`` was under way."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(stretches):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


class WallTime(msgspec.Struct):
    """How long things of one kind were under way, taken in as they end."""

    before: float = 0.0
    """Seconds of the visits before the present one; nothing of theirs is under way any more."""
    here: list[tuple[float, float]] = []
    """The stretches of the present visit, as they came."""

    @property
    def seconds(self) -> float:
        """All of it so far."""
        return self.before + covered(self.here)

    def end_visit(self) -> None:
        """Add up the present visit's."""
        if self.here:
            self.before += covered(self.here)
            self.here = []
