"""New weights that a trainer loads into servers by means of its own: NIXL, Mooncake, checkpoint-engine, RDMA.

Invariant: while it does, the servers have no request of ours; they sample again only when it has ended well, as the
version that it was to be. When it has not, they are as those that have a part of new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from fsm_rollout.engines.protocol import HalfLoaded, TokenSource, WeightSource
from fsm_rollout.engines.weight_sources import BucketSink, WeightsGone, answers
from fsm_rollout.errors import EngineError


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server that is held for its trainer."""

    url: str
    api_key: str | None
    ranks: int
    """How many processes hold a part of its model each."""


@runtime_checkable
class Addressed(BucketSink, Protocol):
    """An engine whose server others can reach."""

    @property
    def address(self) -> ServerAddress:
        """Where it is."""


class _Elsewhere:
    """The source of such weights: engines are told that an update begins and ends; nothing of it comes from here."""

    names = touched = None
    again = False

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.held: asyncio.Future[list[ServerAddress]] = loop.create_future()
        self.loaded: asyncio.Future[bool] = loop.create_future()  # whether all went well

    def check(self) -> None:
        """Leave it to the trainer."""

    async def deliver(self, engines: Sequence[TokenSource], version: int, seconds: float) -> Sequence[Exception | None]:
        """See :class:`~fsm_rollout.engines.protocol.WeightSource`."""
        if self.held.done():
            raise WeightsGone("these weights were loaded by the trainer's own means, and cannot be had again from here")
        able = [engine for engine in engines if isinstance(engine, Addressed)]
        if len(able) < len(engines):
            raise EngineError("an engine of these is no server that a trainer could reach; give its weights as Tensors")
        results = await answers([engine.begin_update({}, local=False) for engine in able], seconds)
        going = [engine for engine, result in zip(able, results, strict=True) if result is None]
        if not going:
            return results
        self.held.set_result([engine.address for engine in going])
        well = await self.loaded
        ends: list[Any] = [HalfLoaded("the trainer's own update has failed")] * len(going)
        if well:
            ends = await answers([engine.end_update(version) for engine in going], seconds)
        return list((dict(zip(able, results, strict=True)) | dict(zip(going, ends, strict=True))).values())


@asynccontextmanager
async def updating(update: Callable[[WeightSource], Awaitable[int]]) -> AsyncGenerator[Sequence[ServerAddress]]:
    """Hold servers, give their addresses, and have them go on when the block has ended.

    ``update`` is what loads a source (of a rollout, or a client). A block that fails leaves servers that sample
    nothing until they are given whole weights: those from before, where these can be had again.

    Raises:
        EngineError: an engine is no server, or a server did not come back well.
    """
    source = _Elsewhere()
    task = asyncio.ensure_future(update(source))
    try:
        first: list[asyncio.Future[Any]] = [task, source.held]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield source.held.result()
    except BaseException:
        if not source.loaded.done():
            source.loaded.set_result(False)
        with suppress(EngineError):
            await task
        raise
    source.loaded.set_result(True)
    await task
