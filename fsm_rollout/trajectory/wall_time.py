"""How long something was under way, by the clock on the wall: what ran side by side counts once.

Invariant: :func:`covered` is the one way in which durations are added up; trajectories, summaries, batches and pages
all say what it says.
"""

from __future__ import annotations

from collections.abc import Sequence


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
