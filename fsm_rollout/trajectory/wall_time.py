"""How long something was under way, by the clock on the wall: what ran side by side counts once.

Invariant: :func:`covered` is the one way in which durations are added up; trajectories, summaries, batches and pages
all say what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import msgspec


def covered(stretches: Sequence[tuple[float, float]]) -> float:
    """Return the seconds in which at least one of the stretches ``(start, end)`` was under way."""
    if len(stretches) == 1:  # as nearly always
        ((start, end),) = stretches
        return end - start
    total, reached = 0.0, float("-inf")
    for start, end in sorted(stretches):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


class TimeSpent(msgspec.Struct):
    """What a trajectory has spent time in: ``queue``, ``generate``, ``tool`` and ``interact``."""

    earlier: dict[str, float] = {}
    """Seconds until it was resumed, by kind, and in ``any`` of the kinds."""
    intervals: list[tuple[str, float, float]] = []
    """``(kind, start, end)`` of what it has spent time in since then, in the order in which it was recorded."""

    def settle(self) -> None:
        """Count what was spent so far: another process's clock may go on from here."""
        self.earlier = {
            kind: self.seconds(kind) for kind in {*self.earlier, "any", *map(itemgetter(0), self.intervals)}
        }
        self.intervals = []

    def seconds(self, kind: str) -> float:
        """Return the seconds in which something of the kind, or of ``any``, was under way."""
        since = [(start, end) for name, start, end in self.intervals if kind in (name, "any")]
        return self.earlier.get(kind, 0.0) + covered(since)
