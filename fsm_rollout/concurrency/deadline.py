"""Deadlines that can stand still: a visit's timeout does not run while its generation waits for the engine.

Invariant: a deadline expires when it has *run* for its seconds, or when its wall has passed, which only
:meth:`Deadline.away` holds up; every ``hold`` is matched by one ``run``. One timer serves both, and a hold does not
touch it (there are thousands of visits at a time): a timer that fires before the deadline expires sets the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Seconds that a block may take to clean up after its cancellation before that is reported. Aborting requests and
# stopping tools take some.
PATIENCE = 30.0


class Deadline:
    """The timeout of one visit, as a context manager. ``None`` seconds never expire.

    One that expires cancels its block, and the cancellation ends with the block: what stands after it runs, and finds
    ``expired`` true.

    ``seconds`` are counted while no hold is in force, those of ``wall`` always. ``unheard`` is called when the block
    has not ended :data:`PATIENCE` seconds after it was cancelled.
    """

    def __init__(
        self, seconds: float | None, wall: float | None = None, *, unheard: Callable[[], object] | None = None
    ) -> None:
        self._remaining = seconds
        self._wall = wall
        self._holds = 0
        self._since = 0.0
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when that fires: uvloop's round it, and one that is due at once does not say it
        self._unheard = unheard
        self.expired = False  # whether this deadline ended its block
        self.walled = False  # whether it was its wall that ended the block

    def __enter__(self) -> Deadline:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._since = self._task.get_loop().time()
        if self._wall is not None:
            self._wall += self._since
        self._schedule()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> bool:
        """Stop counting; the cancellation of a deadline that expired ends here, with the block."""
        task, self._task = self._task, None
        if self._timer is not None:
            self._timer.cancel()
        assert task is not None
        if not self.expired:
            return False
        return task.uncancel() <= self._cancelling and kind in (asyncio.CancelledError, TimeoutError)

    def hold(self) -> None:
        """Stop the count until :meth:`run`. Holds nest."""
        self._holds += 1
        if self._holds == 1 and self._remaining is not None and self._task is not None and not self.expired:
            self._remaining -= asyncio.get_running_loop().time() - self._since

    def run(self) -> None:
        """Undo one :meth:`hold`; after the last one, the deadline counts again."""
        self._holds -= 1
        if self._holds == 0 and self._remaining is not None and self._task is not None and not self.expired:
            self._since = asyncio.get_running_loop().time()
            self._remaining = max(0.0, self._remaining)
            self._schedule()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Stop both counts, the wall's too, within the block: the trajectory is suspended meanwhile."""
        loop = asyncio.get_running_loop()
        since, wall, self._wall = loop.time(), self._wall, None
        self.hold()
        try:
            yield
        finally:
            if wall is not None:
                self._wall = wall + loop.time() - since
            self.run()
            self._schedule()

    def _next(self) -> float | None:
        """Return when it expires unless it is held, or run, before."""
        if self._remaining is None or self._holds:
            return self._wall
        end = self._since + self._remaining
        return end if self._wall is None or end < self._wall else self._wall

    def _schedule(self) -> None:
        """Make the timer fire no later than the deadline expires; one that fires too early sets the next."""
        when, timer = self._next(), self._timer
        if when is not None and not self.expired and (timer is None or self._due > when):
            if timer is not None:
                timer.cancel()
            self._timer, self._due = asyncio.get_running_loop().call_at(when, self._fire), when

    def _fire(self) -> None:
        when, now = self._next(), asyncio.get_running_loop().time()
        if self._timer is not None:
            now = max(now, self._due)  # a loop may be early by its clock's resolution
        self._timer = None
        if when is None or when > now:
            self._schedule()
            return
        assert self._task is not None
        self._task.cancel()
        self.expired, self.walled = True, when == self._wall
        if self._unheard is not None:
            self._due = now + PATIENCE
            self._timer = asyncio.get_running_loop().call_at(self._due, self._unheard)
