"""Something that happens once, and those who wait for it.

Invariant: who waits goes on when it has happened, and at once if it has before. An ``asyncio.Event`` does that too, in
ten times the memory: there are thousands of requests at a time, with one or two of these each.
"""

from __future__ import annotations

import asyncio


class Once:
    """An event that is never taken back; whether it has ``happened`` may be read."""

    __slots__ = ("_waiting", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._waiting: tuple[asyncio.Future[None], ...] = ()

    def set(self) -> None:
        """Let it have happened."""
        waiting, self._waiting, self.happened = self._waiting, (), True
        for future in waiting:
            if not future.done():  # cancelled
                future.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        """Return what is awaited until it has happened."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.happened:
            future.set_result(None)
        else:
            self._waiting = (*self._waiting, future)
        return future
