"""The servers that all shards share: their driver loads new weights into them, once; shards take them as they are then.

Invariant: while the driver loads, no shard has a request in any of them. A shard samples from a server again when the
driver has all of the new weights in it, and the server says so, if it says its version at all. What a shard has lost is
looked at by the driver first, which alone can load weights again; so no server that was started anew, or has a part of
an update, is mistaken for the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast

from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import TokenSource
from fsm_rollout.engines.replica import Replica, ping
from fsm_rollout.engines.weight_sources import WeightsGone, answers
from fsm_rollout.errors import EngineError


class SharedServer(TokenSource, Protocol):
    """An engine whose server others may have loaded."""

    @property
    def url(self) -> str:
        """Where it is."""

    async def adopt(self, version: int, *, doubted: bool = False, adapted: bool | None = None) -> None:
        """Go on with weights of this version that others have loaded; HalfLoaded where the server has others.

        Args:
            version: theirs.
            doubted: it may have been started anew, so one that does not say its version is not believed.
            adapted: whether that version is an adapter; ``None``: as is known already.
        """


class LoadedByDriver:
    """New weights as a shard is given them: its servers have them already.

    Args:
        whole: waits until the driver has all present weights in a server that was lost, and returns their version.
        adapted: whether they are an adapter.
    """

    names = touched = None
    again = True

    def __init__(self, whole: Callable[[str], Awaitable[int]], adapted: bool) -> None:
        self._whole, self._adapted, self._fresh = whole, adapted, True

    def check(self) -> None:
        """Leave it to the driver."""

    async def deliver(self, engines: Sequence[TokenSource], version: int, seconds: float) -> Sequence[Exception | None]:
        """See :class:`~fsm_rollout.engines.protocol.WeightSource`."""
        fresh, self._fresh = self._fresh, False
        return await answers([self._take(cast(SharedServer, engine), version, fresh) for engine in engines], seconds)

    async def _take(self, server: SharedServer, version: int, fresh: bool) -> None:
        if not fresh and await self._whole(server.url) != version:
            raise WeightsGone("others have replaced them, of which this shard is about to hear")
        await server.adopt(version, adapted=self._adapted)


class SharedServers:
    """The driver's own way to them, by which no request goes; nobody watches them here, as shards do."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool

    def apart(self) -> list[str]:
        """Return those that do not have the present weights, as far as is known here."""
        return [url for url, replica in servers_of(self.pool).items() if replica.state != "up"]

    @property
    def urls(self) -> list[str]:
        """Where they are, those that have left apart."""
        return list(servers_of(self.pool))

    def up(self) -> list[str]:
        """Return those that have the present weights, as far as is known here."""
        return [url for url, replica in servers_of(self.pool).items() if replica.state == "up"]

    async def ready(self) -> None:
        """Look at all, and return once one has the present weights; EngineError: none ever will."""
        replicas = servers_of(self.pool).values()
        looks = [asyncio.ensure_future(self._settled(replica, doubted=False)) for replica in replicas]
        try:
            for look in asyncio.as_completed(looks):
                await look
                if self.up():
                    return
        finally:
            for task in looks:
                task.cancel()
        raise EngineError("all servers are lost for good: " + "; ".join(replica.cause for replica in replicas))

    async def _settled(self, replica: Replica, *, doubted: bool) -> None:
        async def look(server: TokenSource) -> None:
            await ping(server)
            await cast(SharedServer, server).adopt(self.pool.weight_version, doubted=doubted)

        await self.pool.here().settle(replica, look)

    async def whole(self, url: str) -> int:
        """Return the present version, once a server that a shard has lost has it; EngineError: it never will."""
        replica = servers_of(self.pool).get(url)
        if replica is None:
            raise EngineError(f"{url} has left")
        await self._settled(replica, doubted=True)
        if replica.state != "up":
            raise EngineError(f"{url} is lost: {replica.cause}")
        replica.losses = 0  # it finishes no request here, by which others are known to be well
        return self.pool.weight_version


def servers_of(pool: EnginePool) -> dict[str, Replica]:
    """Return the replicas of a pool that have not left, by their urls."""
    urls = [url.rstrip("/") for url in pool.urls or ()]
    return {url: replica for url, replica in zip(urls, pool.replicas, strict=True) if replica.state != "left"}
