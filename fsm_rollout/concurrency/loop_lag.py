"""How late an event loop does what is due: the time in which it was at something else.

Invariant: it costs a call each :data:`EVERY` seconds while somebody looks, and nothing in virtual time, whose clock
stands while anything is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from fsm_rollout.concurrency.durations import Durations

EVERY = 0.05  # seconds between two looks


class LoopLag(Durations):
    """By how many seconds the loops of some runs were late."""

    def __init__(self) -> None:
        super().__init__()
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
        self.add(loop.time() - self._due)
        self._look_later(loop)
