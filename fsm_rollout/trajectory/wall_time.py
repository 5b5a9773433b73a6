"""How long something was under way, by the clock on the wall: what ran side by side counts once.

Invariant: :func:`covered` is the one way in which durations are added up; trajectories, summaries, batches and pages
all say what it says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def waits(self, since: float) -> Iterator[tuple[float, float]]:
        """Yield for each generation how long it waited for us, and then for the engine to begin with it.

        It waits for us from the end of what came before (``since``: when the trajectory began) until it is asked for:
        what is done meanwhile is rendering, rules, records, and the work of other trajectories.
        """
        asked_at, ended_at = None, since
        for kind, start, end in self.intervals:
            if kind == "queue":
                asked_at = start
                continue
            if kind == "generate":
                asked, asked_at = start if asked_at is None else asked_at, None
                yield max(0.0, asked - ended_at), start - asked
            ended_at = max(end, ended_at)

    def idle_until(self, asked_at: float, since: float) -> float:
        """Return how long nothing was under way before a generation was asked for, as :meth:`waits` has it."""
        return asked_at - next((end for _, _, end in reversed(self.intervals) if end <= asked_at), since)

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
