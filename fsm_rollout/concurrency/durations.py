"""How long something took, time after time, without keeping every time.

Invariant: memory does not grow with the number of times; what is told of them is at most 10 % too long.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict

LEAST, STEP = 1e-5, 1.1  # seconds of the shortest time that is told apart, and how far apart others are: 10 %


class Durations:
    """Some times in seconds."""

    def __init__(self) -> None:
        self._seen: Counter[int] = Counter()  # by its place on a scale of steps
        self._worst = 0.0

    def add(self, seconds: float) -> None:
        """Count one more; what is less than none counts as none."""
        self._worst = max(self._worst, seconds)
        self._seen[max(0, math.ceil(math.log(max(seconds, LEAST) / LEAST, STEP)))] += 1

    @property
    def count(self) -> int:
        """How many there are."""
        return self._seen.total()

    def figures(self) -> dict[str, float]:
        """Return ``p50``, ``p99`` and ``max`` in seconds, the first two up to 10 % too long; empty: there are none."""
        found, total = dict[str, float](), self.count
        for name, share in (("p50", 0.5), ("p99", 0.99)) if total else ():
            so_far = 0
            for place in sorted(self._seen):
                so_far += self._seen[place]
                if so_far >= share * total:
                    found[name] = min(self._worst, LEAST * STEP**place)
                    break
        return found | ({"max": self._worst} if total else {})


class Phases:
    """A stopwatch: how long the phases of something took, which follow each other on the running event loop."""

    def __init__(self, times: defaultdict[str, Durations]) -> None:
        self._times, self._clock = times, asyncio.get_running_loop().time
        self.start()

    def start(self) -> None:
        """Begin with the first phase now."""
        self._began = self._latest = self._clock()

    def end(self, phase: str, whole: str = "") -> None:
        """Count a phase that has ended, and (``whole``) under another name all since the start."""
        latest, self._latest = self._latest, self._clock()
        self._times[phase].add(self._latest - latest)
        if whole:
            self._times[whole].add(self._latest - self._began)
