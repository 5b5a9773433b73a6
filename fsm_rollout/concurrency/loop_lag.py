"""How late an event loop does what is due: the time in which it was at something else.

Invariant: it costs a call each :data:`EVERY` seconds while somebody looks, and nothing in virtual time, whose clock
stands while anything is done.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 0.05  # seconds between two looks
LEAST, STEP = 1e-5, 1.1  # seconds of the shortest lag that is told apart, and how far apart others are: 10 %


class LoopLag:
    """What was seen of the loops of some runs."""

    def __init__(self) -> None:
        self._seen: Counter[int] = Counter()  # by its place on a scale of steps
        self._worst = 0.0
        self._due = 0.0
        self._next: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the running loop, unless somebody does already."""
        loop = asyncio.get_running_loop()
        if self._next is not None or hasattr(loop, "beat"):  # the clock of a simulation is never late
            yield
            return
        self._look_later(loop)
        try:
            yield
        finally:
            assert self._next is not None
            self._next.cancel()
            self._next = None

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = loop.time() + EVERY
        self._next = loop.call_at(self._due, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        late = max(0.0, loop.time() - self._due)
        self._worst = max(self._worst, late)
        self._seen[max(0, math.ceil(math.log(max(late, LEAST) / LEAST, STEP)))] += 1
        self._look_later(loop)

    def figures(self) -> dict[str, float]:
        """Return ``p50``, ``p99``, ``max`` in seconds, the first two up to 10 % too long; empty: nobody has looked."""
        found, total = dict[str, float](), self._seen.total()
        for name, share in (("p50", 0.5), ("p99", 0.99)) if total else ():
            so_far = 0
            for place in sorted(self._seen):
                so_far += self._seen[place]
                if so_far >= share * total:
                    found[name] = min(self._worst, LEAST * STEP**place)
                    break
        return found | ({"max": self._worst} if total else {})
