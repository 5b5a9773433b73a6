"""New weights that a trainer elsewhere pushes to a service's engines, and what is known of them after it.

Invariant: one update is under way at a time, and it ends: as the trainer says, or as one that has failed when another
trainer comes or this one falls silent. Engines that have a part of it sample nothing until they are given whole ones.
Weights that came from a folder are loaded from it again, as long as it is what it was; of others it is said that they
are missing, and nothing is sampled until the trainer pushes weights again.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fsm_rollout.engines.adapters import Adapter
from fsm_rollout.engines.broadcast import BroadcastSink, Seat
from fsm_rollout.engines.protocol import HalfLoaded
from fsm_rollout.engines.updating import Addressed, servers_held
from fsm_rollout.engines.weight_sources import Bucket, PackedPiece, Tensors
from fsm_rollout.errors import EngineError
from fsm_rollout.rollout import Rollout

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
SILENCE = 600.0  # seconds after which a trainer that has begun to send tensors, and sends no more, has failed
LOOK_EVERY = 0.2  # seconds between two looks whether a bucket that waits is waited for at all


class WeightRecord(msgspec.Struct):
    """New weights that a service's policy has."""

    version: int
    means: str
    """How they came: ``folder``, ``adapter``, ``tensors``, ``servers``."""
    folder: str = ""
    files: list[tuple[str, int, int]] = []
    """What was in the folder: names, sizes, times of change."""

    @classmethod
    def of_folder(cls, means: str, folder: str) -> WeightRecord:
        """Return what is to be kept of a folder's weights."""
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        stats = [(str(path.relative_to(folder)), path.stat()) for path in files]
        return cls(0, means, folder, [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])

    def why_gone(self) -> str:
        """Return why the weights cannot be loaded again from here; empty: they can."""
        if not self.folder:
            return f"they came as {self.means}, which the service keeps no copy of"
        if self.files != WeightRecord.of_folder(self.means, self.folder).files:
            return f"'{self.folder}' has changed since, or is there no more; give each version a folder of its own"
        return ""


class WeightUpdates:
    """A trainer's updates of a rollout's policy, by whichever means."""

    def __init__(self, rollout: Rollout, records: list[WeightRecord], keep: Callable[[], None]) -> None:
        self.rollout, self.records, self._keep = rollout, records, keep
        self.missing = ""
        """Which weights the trainer has pushed that the policy does not have, and why; empty: it has the latest."""
        self._open: ArrivingTensors | HeldServers | None = None

    async def restore(self) -> None:
        """Have the policy of a new process sample with the weights of the last process's, or know that it cannot."""
        version = self.records[-1].version if self.records else self.rollout.weight_version
        if self.rollout.weight_version == version:  # servers may have outlived the process
            return
        why = next(filter(None, (record.why_gone() for record in self.records)), "")
        try:
            for record in self.records if not why else ():
                await self._load(record, record.version)
        except EngineError as error:
            why = str(error)
        if why:
            self.missing = (
                f"the policy's weights of version {version} were lost when the service was started again: {why}; push "
                f"them: rollout.update_weights(…, version={version})"
            )
            logger.warning(self.missing)

    async def _load(self, record: WeightRecord, version: int | None) -> None:
        weights = Adapter(record.folder) if record.means == "adapter" else record.folder
        record.version = await self.rollout.aupdate_weights(weights, version)

    async def load(self, means: str, folder: str, version: int | None) -> int:
        """Load what is in a folder."""
        self._check_free()
        record = WeightRecord.of_folder(means, folder)
        await self._load(record, version)
        return self._pushed(record)

    def _coming(self, version: int | None) -> int:
        return self.rollout.weight_version + 1 if version is None else version

    def _pushed(self, record: WeightRecord) -> int:
        """Keep which weights the policy has now: an adapter is beside those before it, others take their place."""
        beside = [each for each in self.records if each.means != "adapter"] if record.means == "adapter" else []
        self.records[:], self.missing = [*beside, record], ""
        self._keep()
        return record.version

    def _check_free(self) -> None:
        if self._open is not None:
            raise EngineError("an update of the weights is under way already; end it first")

    # -- tensors that arrive ------------------------------------------------------------------------------------------

    async def begin_tensors(self, version: int | None) -> None:
        """Begin an update by tensors, which come in buckets."""
        self._check_free()
        self._open = ArrivingTensors(self.rollout, self._coming(version))

    async def take_tensors(self, data: bytes, contents: Sequence[PackedPiece]) -> None:
        """Take a part of a bucket, or (with ``contents``) its last part."""
        await self._arriving().take(data, contents)

    async def end_tensors(self, *, whole: bool) -> int:
        """End the update; ``whole``: all have come."""
        update, self._open = self._arriving(), None
        return self._pushed(WeightRecord(await update.end(whole=whole), "tensors"))

    def _arriving(self) -> ArrivingTensors:
        if not isinstance(self._open, ArrivingTensors):
            raise HalfLoaded("the service was started again while tensors came")
        return self._open

    # -- servers that the trainer loads -------------------------------------------------------------------------------

    async def hold_servers(self, version: int | None) -> list[tuple[str, str | None, int]]:
        """Hold the policy's servers for the trainer, and say where they are."""
        self._check_free()
        self._open = update = HeldServers(self.rollout, self._coming(version))
        try:
            await update.begin()
        except BaseException:
            self._open = None
            raise
        addresses = [server.address for server in update.servers]
        return [(address.url, address.api_key, address.ranks) for address in addresses]

    async def tell_server(self, number: int, call: str, arguments: Mapping[str, Any]) -> None:
        """Have one of them take part in a broadcast of the trainer's."""
        await self._held().tell(number, call, arguments)

    async def release_servers(self, failed: Collection[int]) -> int:
        """Have them go on; ``failed``: those that do not have all of the new weights."""
        update, self._open = self._held(), None
        await update.end(failed)
        return self._pushed(WeightRecord(update.version, "servers"))

    def _held(self) -> HeldServers:
        if not isinstance(self._open, HeldServers):
            raise EngineError("no servers are held for an update: the service was started again meanwhile")
        return self._open

    async def abandon(self) -> None:
        """End what is under way as failed: its trainer is gone."""
        update, self._open = self._open, None
        with suppress(EngineError):
            if isinstance(update, ArrivingTensors):
                await update.end(whole=False)
            elif update is not None:
                await update.end(range(len(update.servers)))


class ArrivingTensors:
    """Tensors as they come from a trainer, two buckets at a time; shards, which are each sent all, are given all."""

    def __init__(self, rollout: Rollout, version: int) -> None:
        self._rollout, self._version = rollout, version
        self._data = bytearray()
        self._whole: dict[str, torch.Tensor] = {}
        self._buckets: queue.Queue[Mapping[str, torch.Tensor] | None] = queue.Queue(1)  # `None`: there are no more
        self._failed = False
        shards = rollout._shards
        self._update: asyncio.Task[int] | None = None
        if shards is None or shards.servers is not None:
            self._update = asyncio.ensure_future(rollout.aupdate_weights(Tensors(self._pairs()), version))
            self._update.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # whoever ends it hears it

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors; runs in another thread."""
        while True:
            try:
                bucket = self._buckets.get(timeout=SILENCE)
            except queue.Empty:
                raise EngineError(f"the trainer has sent no further tensors for {SILENCE:g} s") from None
            if bucket is None:
                break
            yield from bucket.items()
        if self._failed:
            raise EngineError("the trainer has not sent all tensors")

    async def take(self, data: bytes, contents: Sequence[PackedPiece]) -> None:
        """Take a part of a bucket; returns when there is room for another."""
        self._data += data
        if not contents:
            return
        bucket = Bucket.of(contents, self._data).tensors
        self._data = bytearray()
        if self._update is None:
            self._whole |= bucket
        else:
            await asyncio.to_thread(self._put, bucket)

    def _put(self, bucket: Mapping[str, torch.Tensor] | None) -> None:
        assert self._update is not None
        while not self._update.done():
            with suppress(queue.Full):
                self._buckets.put(bucket, timeout=LOOK_EVERY)
                break

    async def end(self, *, whole: bool) -> int:
        """Return the version when all are loaded; EngineError: they could not be, or are not ``whole``."""
        if self._update is None:
            if not whole:
                raise EngineError("the trainer has not sent all tensors, and nothing has changed")
            return await self._rollout.aupdate_weights(self._whole, self._version)
        self._failed = not whole
        await asyncio.to_thread(self._put, None)
        return await self._update


class HeldServers:
    """The policy's servers while their trainer loads new weights into them by means of its own."""

    def __init__(self, rollout: Rollout, version: int) -> None:
        self._rollout, self.version = rollout, version
        self._block = AsyncExitStack()
        self.servers: Sequence[Addressed] = ()

    async def begin(self) -> None:
        """Hold them."""
        held = servers_held(lambda source: self._rollout.aupdate_weights(source, self.version))
        self.servers, self._failed = await self._block.enter_async_context(held)

    async def tell(self, number: int, call: str, arguments: Mapping[str, Any]) -> None:
        """Have one take its part in a broadcast, of which only the tensors come from the trainer itself."""
        server = self.servers[number]
        if not isinstance(server, BroadcastSink):
            raise EngineError(f"{server.address.url} takes part in no broadcast; give its weights as Tensors")
        match call:
            case "join_group":
                await server.join_group(Seat(**arguments))
            case "leave_group":
                await server.leave_group(**arguments)
            case "receive_bucket":
                await server.receive_bucket(Bucket.of(arguments["contents"]), arguments["group"])

    async def end(self, failed: Collection[int]) -> None:
        """Have them go on."""
        self._failed |= {self.servers[number] for number in failed}
        await self._block.aclose()
