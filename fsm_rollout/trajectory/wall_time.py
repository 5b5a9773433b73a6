"""How long something was under way, by the clock on the wall: what ran side by side counts once.

Invariant: :func:`covered` is the one way in which durations are added up; trajectories, summaries, batches and pages
all say what it says.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """Seconds in earlier visits, by kind, and in ``any`` of the kinds."""
    intervals: list[tuple[str, float, float]] = []
    """``(kind, start, end)`` of what the present visit has spent time in, in the order in which it was recorded."""

    def end_visit(self) -> None:
        """Add the present visit's times to those of the earlier ones; clocks may differ from one to the next."""
        stretches: dict[str, list[tuple[float, float]]] = {"any": []}
        for kind, start, end in self.intervals:
            stretches["any"].append((start, end))
            stretches.setdefault(kind, []).append((start, end))
        for kind, of_kind in stretches.items():
            self.earlier[kind] = self.earlier.get(kind, 0.0) + covered(of_kind)
        self.intervals = []

    def seconds(self, kind: str) -> float:
        """Return the seconds in which something of the kind, or of ``any``, was under way."""
        earlier = self.earlier.get(kind, 0.0)
        if not self.intervals:
            return earlier
        return earlier + covered([(start, end) for name, start, end in self.intervals if kind in (name, "any")])
