"""New weights that a trainer loads into servers by means of its own: NIXL, Mooncake, checkpoint-engine, RDMA.

Invariant: while it does, the servers have no request of ours; they sample again only when it has ended well, as the
version that it was to be. When it has not, they are as those that have a part of new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from fsm_rollout.engines.protocol import HalfLoaded, TokenSource, WeightSource
from fsm_rollout.engines.weight_sources import WeightsGone, answers
from fsm_rollout.errors import EngineError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server that is held for its trainer."""

    url: str
    api_key: str | None
    ranks: int
    """How many processes hold a part of its model each."""


@runtime_checkable
class Addressed(Protocol):
    """An engine whose server others can reach and load."""

    @property
    def address(self) -> ServerAddress:
        """Where it is."""

    async def begin_update(self, known: Mapping[str, torch.Tensor], *, local: bool) -> None:
        """See :class:`~fsm_rollout.engines.weight_sources.BucketSink`."""

    async def end_update(self, version: int | None) -> None:
        """See there."""


class _Elsewhere:
    """The source of such weights: engines are told that an update begins and ends; nothing of it comes from here."""

    names = touched = None
    again = False

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.held: asyncio.Future[Sequence[Addressed]] = loop.create_future()
        self.loaded: asyncio.Future[Collection[Addressed]] = loop.create_future()  # which were not

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
        self.held.set_result(going)
        failed = await self.loaded
        loaded = [engine for engine in going if engine not in failed]
        ended: dict[Any, Any] = dict(zip(able, results, strict=True))
        ended |= dict.fromkeys(failed, HalfLoaded("the trainer's own update has failed"))
        ended |= zip(loaded, await answers([e.end_update(version) for e in loaded], seconds), strict=True)
        return list(ended.values())


@asynccontextmanager
async def updating(update: Callable[[WeightSource], Awaitable[int]]) -> AsyncGenerator[Sequence[ServerAddress]]:
    """Do what :func:`servers_held` does, and give the servers' addresses."""
    async with servers_held(update) as (servers, _):
        yield [server.address for server in servers]


@asynccontextmanager
async def servers_held(
    update: Callable[[WeightSource], Awaitable[int]],
) -> AsyncGenerator[tuple[Sequence[Addressed], set[Addressed]]]:
    """Hold servers, give them and a set for those of them that fail, and have the others go on after the block.

    ``update`` is what loads a source (of a rollout, or a client). A block that fails leaves servers that sample
    nothing until they are given whole weights: those from before, where these can be had again.

    Raises:
        EngineError: an engine is no server, or a server did not come back well.
    """
    source = _Elsewhere()
    task, failed = asyncio.ensure_future(update(source)), set[Addressed]()
    try:
        first: list[asyncio.Future[Any]] = [task, source.held]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield source.held.result(), failed
    except BaseException:
        if not source.loaded.done():
            source.loaded.set_result(source.held.result() if source.held.done() else ())
        with suppress(EngineError):
            await task
        raise
    source.loaded.set_result(failed)
    await task
