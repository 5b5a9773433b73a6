"""The places of a tool: how many of its calls run at once.

Invariant: a place is taken as long as anything of its call runs. A call that is given up can leave a thread behind,
which Python cannot stop (or async code that refuses to); its place comes back when that ends, and not before. So no
more than the limit ever run, and a tool that hangs for good takes its places with it, one by one: once all of them are
gone, whoever waits for one is told so after the tool's ``timeout``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fsm_rollout.tools.call import leftovers

_logger = logging.getLogger(__name__)


class NoPlace(Exception):
    """Every place is held by a call that was given up and still runs."""


class Places:
    """``limit`` places of the tool called ``name``, for one event loop."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._free = asyncio.Semaphore(limit)
        self._lost = 0
        """Places of calls that were given up and still run."""
        self._waiting: dict[asyncio.Timeout, float] = {}
        """The clocks of those who wait, with their seconds; they stand still while any place may come back in time."""

    @asynccontextmanager
    async def one(self, seconds: float | None) -> AsyncIterator[None]:
        """Hold a place, after waiting for one: as long as it takes, but ``seconds`` from when all of them are lost.

        Raises:
            NoPlace: that time is up.
        """
        if self._free.locked() and seconds is not None:
            await self._wait(seconds)
        else:
            await self._free.acquire()
        with leftovers() as left:
            try:
                yield
            finally:
                if left:
                    self._lose(1)
                    left.then = self._come_back
                else:
                    self._free.release()

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(None) as clock:
                self._waiting[clock] = seconds
                self._set(clock)
                try:
                    await self._free.acquire()
                finally:
                    del self._waiting[clock]
        except TimeoutError:
            raise NoPlace from None

    def _lose(self, more: int) -> None:
        self._lost += more
        if more > 0 and self._lost == self._limit:
            _logger.warning(
                "all %d places of tool '%s' are held by calls that were given up and still run", self._limit, self._name
            )
        for clock in self._waiting:
            self._set(clock)

    def _come_back(self) -> None:
        self._lose(-1)
        self._free.release()

    def _set(self, clock: asyncio.Timeout) -> None:
        if not clock.expired():
            now = asyncio.get_running_loop().time()
            clock.reschedule(now + self._waiting[clock] if self._lost == self._limit else None)
