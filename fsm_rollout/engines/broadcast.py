"""New weights by broadcast: this process is rank 0 of a process group, and each server has its ranks; on any host.

Invariant: a group is used while the same servers take part, and is formed anew when they change, or when anything in it
has failed: whoever then waits in the old one hears of its end at once. A server that refuses or dies, or hangs while a
group forms, costs the others nothing but time: they are asked for the same bucket again, in a group without it. (Who
hangs with a bucket takes along those to which the backend passes it on from there.)
"""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from fsm_rollout.engines.protocol import HalfLoaded, TokenSource
from fsm_rollout.engines.updating import Addressed
from fsm_rollout.engines.weight_sources import (
    BUCKET_BYTES,
    UPDATE_WITHIN,
    Bucket,
    BucketSink,
    NamedTensors,
    Tensors,
    answers,
)
from fsm_rollout.errors import EngineError

if TYPE_CHECKING:
    import torch

PATIENCE = 120.0  # seconds that the others have to join, and to take a bucket
# Seconds in which all find a group that forms. It is not given up before: SGLang looks for one that is gone for 30 min.
FOUND_WITHIN = 5.0
HEARD_WITHIN = 5.0  # seconds in which who waits in a group says that it has ended; who hangs does not


class _Interrupted(HalfLoaded):
    """A server could not because another one, or its process, has failed."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A server's place in a group: its first rank, and where the group meets; in SGLang's words."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


@runtime_checkable
class BroadcastSink(Addressed, BucketSink, Protocol):
    """An engine that can have ranks in a group."""

    async def join_group(self, seat: Seat) -> None:
        """Take its ranks; returns when all are there. HalfLoaded: it could not."""

    async def leave_group(self, group: str) -> None:
        """Give them back."""

    async def receive_bucket(self, bucket: Bucket, group: str) -> None:
        """Load a bucket that rank 0 broadcasts as it is (:attr:`Bucket.flat`). HalfLoaded: it could not."""


class BroadcastGroup:
    """Rank 0 of a group that other processes' engines join; a trainer has one, for all its updates.

    Args:
        host: the address of this host that servers reach; default: the one from which this host reaches them.
        backend: of torch.distributed; default: gloo for tensors on a CPU, NCCL for those on a GPU.
        patience: seconds that the others have to join, and to take a bucket.
    """

    def __init__(self, host: str | None = None, *, backend: str | None = None, patience: float = PATIENCE) -> None:
        self.host, self.backend, self.patience = host, backend, patience
        self.name = ""
        self._members: tuple[object, ...] = ()
        self._store: Any = None
        self._group: Any = None

    async def form(self, engines: Sequence[BroadcastSink], device: str, seconds: float) -> list[Exception | None]:
        """Be in a group with these engines and no others; return for each why it could not join."""
        backend = self.backend or ("nccl" if device == "cuda" else "gloo")
        members = (backend, *(engine.address for engine in engines))
        if members == self._members or not engines:
            return [None] * len(engines)
        if name := self.name:
            self.close()
            await answers([engine.leave_group(name) for engine in engines], seconds)  # those that were in it
        *offsets, size = accumulate((engine.address.ranks for engine in engines), initial=1)
        self.name = f"fsm-rollout-{secrets.token_hex(4)}"
        host = self.host or _address_towards([engine.address.url for engine in engines])
        port = await asyncio.to_thread(self._listen, size)
        ours = asyncio.to_thread(self._join, port, size, backend)
        seats = [Seat(host, port, rank, size, self.name, backend) for rank in offsets]
        asked = [engine.join_group(seat) for engine, seat in zip(engines, seats, strict=True)]
        results = await self._together(asked, ours, seconds, FOUND_WITHIN if len(engines) > 1 else 0.0)
        if not any(results):
            self._members = members
            return results
        return [result or _Interrupted("another server could not join the group") for result in results]

    def _listen(self, size: int) -> int:
        self._store = self._store_at("0.0.0.0", 0, size, ours=True)
        return int(self._store.port)

    def _store_at(self, host: str, port: int, size: int, *, ours: bool) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        return TCPStore(host, port, size, ours, timedelta(seconds=self.patience), wait_for_workers=False)

    def _join(self, port: int, size: int, backend: str) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper

        # As servers do it: beside the default group, which this process may have or not; and by a connection to the
        # store, so that nothing but `_store` keeps it: without it everybody who waits there fails.
        self._group, _ = _new_process_group_helper(
            size,
            0,
            [],
            Backend(backend),
            PrefixStore(self.name, self._store_at("127.0.0.1", port, size, ours=False)),
            group_name=GroupName(self.name),
            backend_options=None,
            timeout=timedelta(seconds=self.patience),
        )

    async def send(self, bucket: Bucket, engines: Sequence[BroadcastSink], seconds: float) -> list[Exception | None]:
        """Broadcast a bucket; return for each engine why it does not have it."""
        asked = [engine.receive_bucket(bucket, self.name) for engine in engines]
        return await self._together(asked, asyncio.to_thread(self._broadcast, bucket.flat), seconds)

    def _broadcast(self, flat: torch.Tensor) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([flat], options).wait()
        if flat.is_cuda:
            import torch

            torch.cuda.synchronize(flat.device)

    async def _together(
        self, asked: Sequence[Awaitable[None]], ours: Awaitable[None], seconds: float, found_within: float = 0.0
    ) -> list[Exception | None]:
        """Wait for what all do at once; when one fails, none waits for it any longer: it is _Interrupted."""
        failed: list[Exception] = []  # in this order

        async def rank_0() -> None:
            try:
                await ours
            except Exception as error:  # whatever torch raises, with where in C++ it did
                raise HalfLoaded(f"rank 0 could not broadcast: {str(error).partition(chr(10))[0]}") from error

        async def each(step: Awaitable[None], within: float) -> Exception | None:
            (error,) = await answers([step], within)
            if error is not None:
                failed.append(error)
                if failed[0] is error:
                    await asyncio.sleep(found_within)
                    self.close()
            return error

        patience = min(seconds, self.patience)
        # Who waits for one that hangs says so then.
        over = asyncio.get_running_loop().call_later(patience, self.close)
        within = patience + HEARD_WITHIN
        try:
            mine, *results = await asyncio.gather(each(rank_0(), math.inf), *(each(step, within) for step in asked))
        except asyncio.CancelledError:
            self.close()  # rank 0 still sends what the next update would take for its own
            raise
        finally:
            over.cancel()
        # Who is lost has ended it, however fast the others have noticed.
        causes = [error for error in failed if not isinstance(error, HalfLoaded)] or failed[:1]
        if mine in causes:
            return [mine for _ in results]
        return [_Interrupted(str(error)) if error is not None and error not in causes else error for error in results]

    def close(self) -> None:
        """Leave the group; safe to call twice."""
        group, self._group, self._store, self._members = self._group, None, None, ()
        if group is not None:
            with suppress(Exception):  # a backend that cannot is left to the collector
                group.abort()


class Broadcast(Tensors):
    """New weights as :class:`Tensors`, which reach servers on any host by a broadcast.

    Args:
        tensors: see :class:`Tensors`.
        group: that of the trainer's earlier updates; default: one of its own, which ends with it.
        bucket_bytes: how much is loaded at a time.

    Engines of this process, and on Ray, have no ranks: :class:`Tensors` are theirs.
    """

    local = False

    def __init__(
        self,
        tensors: NamedTensors | Callable[[], NamedTensors],
        group: BroadcastGroup | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(tensors, bucket_bytes=bucket_bytes)
        self.group = group or BroadcastGroup()

    async def deliver(
        self, engines: Sequence[TokenSource], version: int, seconds: float = UPDATE_WITHIN
    ) -> list[Exception | None]:
        """See :class:`Tensors`."""
        able = [engine for engine in engines if isinstance(engine, BroadcastSink)]
        results: dict[TokenSource, Exception | None] = dict.fromkeys(
            engines, EngineError("a broadcast is for servers, and this engine is none; give its weights as Tensors")
        )
        results |= zip(able, await super().deliver(able, version, seconds), strict=True)
        return list(results.values())

    def _memory(self, size: int, like: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.empty(size, dtype=torch.uint8, device=like.device)

    async def _load(self, bucket: Bucket, seconds: float, engines: Sequence[Any]) -> list[Exception | None]:
        results, going = dict[Any, Exception | None](), engines
        while going:
            found = await self.group.form(going, bucket.flat.device.type, seconds)
            if not any(found):
                found = await self.group.send(bucket, going, seconds)
            results |= zip(going, found, strict=True)
            going = [engine for engine in going if isinstance(results[engine], _Interrupted)]
        return [results[engine] for engine in engines]


def _address_towards(urls: Sequence[str]) -> str:
    """Return the address of this host that servers reach, one that is not for this host alone if any is not here."""
    found = []
    for url in urls:
        parts = urlsplit(url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname or "", parts.port or 80))  # sends nothing
            found.append(str(probe.getsockname()[0]))
    return next((address for address in found if not address.startswith("127.")), found[0])
