"""Deadlines that can stand still: a visit's timeout does not run while its generation waits for the engine.

Invariant: a deadline expires when it has *run* for its seconds, or when its wall has passed, which nothing holds up;
every ``hold`` is matched by one ``run``. One timer serves both: there are thousands of visits at a time.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


def being_cancelled() -> bool:
    """Return whether somebody cancels the present task; if not, a CancelledError is the failure of who raised it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Deadline:
    """The timeout of one visit, as an async context manager. ``None`` seconds never expire.

    ``seconds`` are counted while no hold is in force, those of ``wall`` always. ``expired`` tells, after the block,
    whether it was this deadline that ended it.
    """

    __slots__ = ("_holds", "_left", "_since", "_timeout", "_wall")

    def __init__(self, seconds: float | None, wall: float | None = None) -> None:
        self._left = seconds
        self._wall = wall
        self._holds = 0
        self._since = 0.0
        self._timeout: asyncio.Timeout | None = None

    async def __aenter__(self) -> Deadline:
        """Start counting."""
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        if self._wall is not None:
            self._wall += self._since
        self._timeout = asyncio.timeout_at(self._next())
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Stop counting; raises TimeoutError in place of the cancellation when the deadline expired."""
        assert self._timeout is not None
        await self._timeout.__aexit__(kind, error, at)

    @property
    def expired(self) -> bool:
        """Whether this deadline ended its block."""
        return self._timeout is not None and self._timeout.expired()

    @property
    def walled(self) -> bool:
        """Whether it was its wall that ended the block."""
        return self.expired and self._timeout is not None and self._timeout.when() == self._wall

    def hold(self) -> None:
        """Stand still until :meth:`run`. Holds nest."""
        self._holds += 1
        if self._holds == 1 and self._left is not None and self._live():
            self._left -= asyncio.get_running_loop().time() - self._since
            self._reschedule(self._wall)

    def run(self) -> None:
        """Undo one :meth:`hold`; with the last one, count on."""
        self._holds -= 1
        if self._holds == 0 and self._left is not None and self._live():
            self._since = asyncio.get_running_loop().time()
            self._left = max(0.0, self._left)
            self._reschedule(self._next())

    def _next(self) -> float | None:
        """Return when it expires unless it is held before."""
        ends = [] if self._left is None else [self._since + self._left]
        return min(ends if self._wall is None else [self._wall, *ends], default=None)

    def _live(self) -> bool:
        return self._timeout is not None and not self._timeout.expired()

    def _reschedule(self, when: float | None) -> None:
        assert self._timeout is not None
        try:
            self._timeout.reschedule(when)
        except RuntimeError:  # expiring or over already: nothing left to move
            return
