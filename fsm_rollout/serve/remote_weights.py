"""New weights on their way from a trainer to the engines of a service.

Invariant: the trainer's own source says what is sent, as it does to engines of this process. Of folders the service is
told where they are; tensors are sent over HTTP; servers that the trainer reaches by itself are held for it meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsm_rollout.engines.adapters import Adapter
from fsm_rollout.engines.broadcast import Seat
from fsm_rollout.engines.protocol import HalfLoaded, WeightSource
from fsm_rollout.engines.updating import ServerAddress
from fsm_rollout.engines.weight_sources import UPDATE_WITHIN, Bucket, Loaded, Tensors
from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import EMBEDDED
from fsm_rollout.serve.remote_run import ServiceLine

if TYPE_CHECKING:
    import torch

ROOM = 2**16  # bytes that a body has beside the tensors in it


async def pushed(line: ServiceLine, source: WeightSource, version: int | None, body_bytes: int) -> int:
    """Have a service load new weights and return their version.

    Args:
        line: to the service.
        source: the weights.
        version: theirs; ``None``: that behind the present one.
        body_bytes: the longest body that the service takes.

    Raises:
        WeightsGone: they were asked for again, and are not there.
        EngineError: no engine could load them.
    """
    if isinstance(source, Loaded | Adapter):  # the service checks it, and may alone have the folder
        means, named = ("adapter", source.folder) if isinstance(source, Adapter) else ("folder", source.weights)
        folder = str(named)
        if means == "adapter" or folder.partition(":")[0] != EMBEDDED:  # which is a word, whatever folders there are
            folder = _absolute(folder)
        return int(await line.order("load", means=means, folder=folder, version=version))
    source.check()
    if isinstance(source, Tensors) and source.local:
        service = ServiceSink(line, version, max(1, body_bytes - ROOM))
        for error in await source.deliver([service], -1 if version is None else version, UPDATE_WITHIN):  # type: ignore[list-item]
            if error is not None:
                raise error
        return service.loaded
    # The trainer reaches the servers, or has them take part in a broadcast.
    addresses = await line.order("hold_servers", version=version)
    servers = [ServerSink(line, number, ServerAddress(*address)) for number, address in enumerate(addresses)]
    failed: Mapping[int, Exception] = dict.fromkeys(range(len(servers)), HalfLoaded("the update was given up"))
    try:
        results = await source.deliver(servers, -1 if version is None else version, UPDATE_WITHIN)  # type: ignore[arg-type]
        failed = {number: error for number, error in enumerate(results) if error is not None}
    finally:
        try:
            loaded = await line.order("release_servers", failed=list(failed))
        except EngineError:
            if not failed:
                raise
    if len(failed) == len(servers):
        raise next(iter(failed.values()))
    return int(loaded)


def _absolute(folder: str) -> str:
    """Return the path of a folder here as any process finds it; what is no folder here is a model's name."""
    path = Path(folder).expanduser()
    return str(path.absolute()) if path.is_dir() else folder


class ServiceSink:
    """The engines of a service as one that takes tensors in buckets."""

    def __init__(self, line: ServiceLine, version: int | None, room: int) -> None:
        self._line, self._version, self._room = line, version, room
        self.loaded, self._touched = -1, False

    async def begin_update(self, known: Mapping[str, torch.Tensor], *, local: bool) -> None:
        """See :class:`~fsm_rollout.engines.weight_sources.BucketSink`."""
        await self._line.order("begin_tensors", version=self._version)

    async def load_bucket(self, bucket: Bucket) -> None:
        """See :class:`~fsm_rollout.engines.weight_sources.BucketSink`; what is longer than a body goes in several."""
        self._touched = True
        data = bucket.flat.cpu().numpy().data
        for start in range(0, len(data), self._room):
            part = bytes(data[start : start + self._room])
            last = start + len(part) == len(data)
            await self._line.order("take_tensors", data=part, contents=bucket.contents if last else [])

    async def end_update(self, version: int | None) -> None:
        """See :class:`~fsm_rollout.engines.weight_sources.BucketSink`."""
        try:
            self.loaded = await self._line.order("end_tensors", whole=version is not None)
        except EngineError as error:
            if version is not None:
                raise
            if self._touched:
                raise HalfLoaded(str(error)) from None


class ServerSink:
    """A server of a service's, which is held while the trainer loads it."""

    def __init__(self, line: ServiceLine, number: int, address: ServerAddress) -> None:
        self._line, self._number, self.address = line, number, address

    async def _tell(self, call: str, **arguments: Any) -> None:
        await self._line.order("tell_server", number=self._number, call=call, arguments=arguments)

    async def begin_update(self, known: Mapping[str, torch.Tensor], *, local: bool) -> None:
        """Do nothing: it is held, and told, already."""

    async def load_bucket(self, bucket: Bucket) -> None:
        """Raise EngineError: the memory of this host is not the server's."""
        raise EngineError(f"{self.address.url} is a service's, and reads no memory of this process; give Tensors")

    async def end_update(self, version: int | None) -> None:
        """See :class:`~fsm_rollout.engines.weight_sources.BucketSink`; its service ends the update."""
        if version is None:
            raise HalfLoaded(f"{self.address.url} may have a part of the new weights")

    async def join_group(self, seat: Seat) -> None:
        """See :class:`~fsm_rollout.engines.broadcast.BroadcastSink`."""
        await self._tell("join_group", **asdict(seat))

    async def leave_group(self, group: str) -> None:
        """See :class:`~fsm_rollout.engines.broadcast.BroadcastSink`."""
        await self._tell("leave_group", group=group)

    async def receive_bucket(self, bucket: Bucket, group: str) -> None:
        """See :class:`~fsm_rollout.engines.broadcast.BroadcastSink`."""
        await self._tell("receive_bucket", contents=bucket.contents, group=group)
