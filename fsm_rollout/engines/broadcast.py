"""New weights by broadcast: this process is rank 0 of a process group, and each server has its ranks; on any host.

Invariant: a group is used while the same servers take part, and is formed anew when they change, or when anything in it
has failed: whoever then waits in the old one hears of its end at once.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, slots=True)
class Seat:
    """A server's place in a group: its first rank, and where the group meets."""

    host: str
    port: int
    rank: int
    world_size: int
    group: str
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
        ours = asyncio.ensure_future(asyncio.to_thread(self._join, size, backend))
        seats = [Seat(host, port, rank, size, self.name, backend) for rank in offsets]
        asked = [engine.join_group(seat) for engine, seat in zip(engines, seats, strict=True)]
        results = await self._together(asked, ours, seconds)
        if not any(results):
            self._members = members
        return results

    def _listen(self, size: int) -> int:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore("0.0.0.0", 0, size, True, timedelta(seconds=self.patience), wait_for_workers=False)
        return int(self._store.port)

    def _join(self, size: int, backend: str) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper

        # As servers do it: beside the default group, which this process may have or not.
        self._group, _ = _new_process_group_helper(
            size,
            0,
            [],
            Backend(backend),
            PrefixStore(self.name, self._store),
            group_name=GroupName(self.name),
            backend_options=None,
            timeout=timedelta(seconds=self.patience),
        )

    async def send(self, bucket: Bucket, engines: Sequence[BroadcastSink], seconds: float) -> list[Exception | None]:
        """Broadcast a bucket; return for each engine why it does not have it."""
        ours = asyncio.ensure_future(asyncio.to_thread(self._broadcast, bucket.flat))
        asked = [engine.receive_bucket(bucket, self.name) for engine in engines]
        return await self._together(asked, ours, seconds)

    def _broadcast(self, flat: torch.Tensor) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([flat], options).wait()
        if flat.is_cuda:
            import torch

            torch.cuda.synchronize(flat.device)

    async def _together(
        self, asked: Sequence[Any], ours: asyncio.Future[None], seconds: float
    ) -> list[Exception | None]:
        """Wait for what all do at once; when one fails, none waits for it any longer."""

        async def theirs(step: Any) -> Exception | None:
            (result,) = await answers([step], seconds)
            if result is not None:
                self.close()
            return result

        results = await asyncio.gather(*map(theirs, asked))
        try:
            await ours
        except Exception as error:  # whatever torch raises
            self.close()
            failed = HalfLoaded(f"rank 0 could not broadcast: {error}")
            return [failed if result is None else result for result in results]
        return results

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

    async def _load(self, bucket: Bucket, seconds: float, engines: Sequence[Any]) -> Sequence[Exception | None]:
        joined = await self.group.form(engines, bucket.flat.device.type, seconds)
        if any(joined):
            return [result or HalfLoaded("others could not join the group") for result in joined]
        return await self.group.send(bucket, engines, seconds)


def _address_towards(urls: Sequence[str]) -> str:
    """Return the address of this host that servers reach, one that is not for this host alone if any is not here."""
    found = []
    for url in urls:
        parts = urlsplit(url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname or "", parts.port or 80))  # sends nothing
            found.append(str(probe.getsockname()[0]))
    return next((address for address in found if not address.startswith("127.")), found[0])
