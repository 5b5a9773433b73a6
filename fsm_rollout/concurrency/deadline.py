"""Deadlines that can stand still: a visit's timeout does not run while its generation waits for the engine.

Invariant: a deadline expires when it has *run* for its seconds, or when its wall has passed, which nothing holds up;
every ``hold`` is matched by one ``run``. One timer serves both: there are thousands of visits at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

PATIENCE = 30.0
"""Seconds for which a block that was cancelled may clean up before that is worth a word: an engine has some for each
abort, and tools have some to stop."""


def being_cancelled() -> bool:
    """Return whether somebody cancels the present task; if not, a CancelledError is the failure of who raised it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def runs_in(task: asyncio.Task[Any] | None) -> bool:
    """Return whether ``task`` is running; a GeneratorExit in a task that is not comes from its being thrown away."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # there is no loop any more
        return False


class Deadline:
    """The timeout of one visit, as an async context manager. ``None`` seconds never expire.

    ``seconds`` are counted while no hold is in force, those of ``wall`` always. ``expired`` tells, after the block,
    whether it was this deadline that ended it. ``unheard`` is called when the block has not ended
    :data:`PATIENCE` seconds after it was cancelled.
    """

    __slots__ = ("_cancelling", "_holds", "_left", "_since", "_task", "_timer", "_unheard", "_wall", "_when", "expired")

    def __init__(
        self, seconds: float | None, wall: float | None = None, *, unheard: Callable[[], object] | None = None
    ) -> None:
        self._left = seconds
        self._wall = wall
        self._holds = 0
        self._since = 0.0
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.Handle | None = None
        self._when: float | None = None
        self._unheard = unheard
        self.expired = False
        """Whether this deadline ended its block."""

    async def __aenter__(self) -> Deadline:
        """Start counting."""
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._since = asyncio.get_running_loop().time()
        if self._wall is not None:
            self._wall += self._since
        self._reschedule(self._next())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Stop counting; raises TimeoutError in place of the cancellation when the deadline expired."""
        task, self._task = self._task, None
        if self._timer is not None:
            self._timer.cancel()
        assert task is not None
        if self.expired and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    @property
    def walled(self) -> bool:
        """Whether it was its wall that ended the block."""
        return self.expired and self._when == self._wall

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
        return self._task is not None and not self.expired

    def _reschedule(self, when: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._when, self._timer = when, None
        if when is not None:
            loop = asyncio.get_running_loop()
            soon = when <= loop.time()
            self._timer = loop.call_soon(self._expire) if soon else loop.call_at(when, self._expire)

    def _expire(self) -> None:
        assert self._task is not None
        self._task.cancel()
        self.expired = True
        self._timer = None
        if self._unheard is not None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._unheard)
