"""The slots of a tool: how many of its calls run at once.

Invariant: a slot is held as long as anything of its call runs. A call that is given up can leave a thread behind, which
Python cannot stop (or async code that refuses to); its slot comes back when that ends, and not before. So no more than
the limit ever run, and a tool that hangs for good loses its slots one by one: once all of them are lost, a call that
waits for one fails after the tool's ``timeout``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fsm_rollout.tools.call import LEFTOVERS, Leftovers

_logger = logging.getLogger(__name__)


class NoSlot(Exception):
    """Every slot is held by a call that was given up and still runs."""


class Slots:
    """``limit`` slots of the tool called ``name``, for one event loop."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._free = asyncio.Semaphore(limit)
        self._lost = 0
        """Slots of calls that were given up and still run."""
        self._waiting: dict[asyncio.Timeout, float] = {}
        """The timeouts of those who wait, with their seconds; they run only while every slot is lost."""

    @asynccontextmanager
    async def hold(self, seconds: float | None) -> AsyncIterator[None]:
        """Hold a slot, after waiting for one: as long as it takes, but ``seconds`` from when all of them are lost.

        Raises:
            NoSlot: that time is up.
        """
        try:
            async with asyncio.timeout(None) as timeout:
                if self._free.locked() and seconds is not None:
                    self._waiting[timeout] = seconds
                    self._set(timeout)
                try:
                    await self._free.acquire()
                finally:
                    self._waiting.pop(timeout, None)
        except TimeoutError:
            raise NoSlot from None
        leftovers = Leftovers()
        token = LEFTOVERS.set(leftovers)
        try:
            yield
        finally:
            LEFTOVERS.reset(token)
            if leftovers:
                self._lose(1)
                leftovers.then = self._come_back
            else:
                self._free.release()

    def _lose(self, change: int) -> None:
        self._lost += change
        if change > 0 and self._lost == self._limit:
            _logger.warning(
                "all %d slots of tool '%s' are held by calls that were given up and still run", self._limit, self._name
            )
        for timeout in self._waiting:
            self._set(timeout)

    def _come_back(self) -> None:
        self._lose(-1)
        self._free.release()

    def _set(self, timeout: asyncio.Timeout) -> None:
        if not timeout.expired():
            now = asyncio.get_running_loop().time()
            timeout.reschedule(now + self._waiting[timeout] if self._lost == self._limit else None)
