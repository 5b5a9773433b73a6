"""Several replicas of an engine as one engine: routed, bounded in flight, and whole again when one is lost.

Invariant: a request is at one replica, or waits here in order until one has room. It is tried once: when its replica
is lost or fails it, its last chunk says ``ReplicaLost: …``, and the client (:mod:`fsm_rollout.engines.client`) asks for
the rest of it; what goes on comes before what has not begun. Every request gets its last chunk, or the error that ended
the pool: replicas are started a bounded number of times (:mod:`fsm_rollout.engines.supervisor`). A request that the
router fails is at no replica at all: its last chunk has an error ``RouterFailed: …``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anyio.from_thread import start_blocking_portal

from fsm_rollout.concurrency.cancellation import being_cancelled, wait_for
from fsm_rollout.engines.chunk_stream import NO_IDS, NO_LOGPROBS, ChunkStream, check_unique
from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.engines.router import Router, StickyRouter, allowance, choose
from fsm_rollout.engines.specs import BuildReplica, EngineSpec, RaySpec
from fsm_rollout.engines.supervisor import (
    LocalPlacement,
    Placement,
    PoolTimes,
    Replica,
    ReplicaSupervisor,
    describe,
    failure_of,
)
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.reasons import FinishReason

if TYPE_CHECKING:
    from fsm_rollout.engines.protocol import Engine, Weights

logger = logging.getLogger(__name__)

STRIKES = 2
"""Dispatches that an engine may fail as a whole, with nothing finished between, before its replica is given up."""


@dataclass(eq=False, slots=True)
class _Routed:
    """A request under way, and the replica that has it."""

    request: Request
    stream: ChunkStream
    since: float
    replica: Replica | None = None
    """``None`` while it waits here."""
    queued: float | None = None
    """Seconds that it waited here, until its first chunk has told them."""
    version: int = 0
    asked: bool = False
    """Whether the replica's engine was asked for it: only then is losing the replica a failed try."""


class PoolEngine:
    """See the module. It serves one event loop at a time.

    Args:
        placement: where the replicas live.
        count: how many there are.
        router: chooses their requests; default: :class:`StickyRouter`.
        attempts: how often a client tries a request in all, before that is its end.
        restarts: how often a replica that finishes nothing is started again before its place stays empty.
        times: seconds that the pool waits for its replicas.

    Raises:
        EngineError: a replica cannot be built, or does not start in time; none is left behind.
    """

    def __init__(
        self,
        placement: Placement,
        count: int,
        *,
        router: Router | None = None,
        attempts: int = 3,
        restarts: int = 3,
        times: PoolTimes | None = None,
    ) -> None:
        self.attempts = attempts
        self.loop: asyncio.AbstractEventLoop | None = None
        self._router: Router = router or StickyRouter()
        self._under_way: dict[str, _Routed] = {}
        """All requests under way, by id."""
        self._waiting: dict[str, _Routed] = {}
        """Those of them that are at no replica, in order."""
        self._closed = self._assigning = False
        self._emptied: asyncio.Future[None] | None = None
        self._supervisor = ReplicaSupervisor(
            placement,
            count,
            restarts=restarts,
            times=times or PoolTimes(),
            lost=self._lose_requests,
            changed=self._replicas_changed,
        )
        try:
            with start_blocking_portal() as portal:  # this may be called from within an event loop, or without any
                wait_for(portal.start_task_soon(self._supervisor.start))
        except BaseException:
            placement.close()
            raise
        engines = [replica.live for replica in self._supervisor.replicas]
        self._tokenizer, self._eos_ids = engines[0].tokenizer, engines[0].eos_ids
        self._max_context = min(engine.max_context for engine in engines)

    # -- the protocol ---------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The replicas' tokenizer."""
        return self._tokenizer

    @property
    def max_context(self) -> int:
        """The longest input plus output that every replica takes, in tokens."""
        return self._max_context

    @property
    def eos_ids(self) -> frozenset[int]:
        """The stop tokens that the model's generation config names."""
        return self._eos_ids

    @property
    def weight_version(self) -> int:
        """How many policy updates the present weights have had."""
        return self._supervisor.version

    @property
    def replicas(self) -> list[Replica]:
        """The replicas, with what became of each so far."""
        return self._supervisor.replicas

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Send the requests to their replicas at once, as far as those have room; see the protocol."""
        loop = self._bind()
        if self._supervisor.fallen is not None:
            raise self._supervisor.fallen
        check_unique(requests, self._under_way)
        stream = ChunkStream((request.request_id for request in requests), self._abort)
        coming = {request.request_id: _Routed(request, stream, loop.time()) for request in requests}
        self._under_way |= coming
        going_on = {name: routed for name, routed in coming.items() if routed.request.sampled}
        self._waiting = {**going_on, **self._waiting, **coming}
        self._assign()
        return aiter(stream)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests: at once where they wait, soon where a replica has them."""
        self._abort(request_ids)

    async def update_weights(self, weights: Weights, version: int | None = None) -> int:
        """Pause all replicas, load the weights everywhere, go on; see the protocol.

        A replica that fails while another one succeeds is lost, and comes back with the new weights.

        Raises:
            EngineError: no replica took them; then nothing has changed.
        """
        self._bind()
        # Shielded: an update that is given up half-way would leave replicas with different weights.
        return await asyncio.shield(self._supervisor.spawn(self._supervisor.update(weights, version)))

    async def pause(self) -> None:
        """Sample nothing anywhere until :meth:`resume`."""
        self._bind()
        await self._supervisor.hold("pause")

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._bind()
        await self._supervisor.hold("resume")

    async def sleep(self) -> None:
        """Give memory back on every replica.

        Raises:
            EngineError: requests are under way and the pool is not paused.
        """
        self._bind()
        if self._under_way and not self._supervisor.paused:
            raise EngineError(f"{len(self._under_way)} request(s) are under way; pause the engine before it sleeps")
        await self._supervisor.hold("sleep")

    async def wake(self) -> None:
        """Go on after :meth:`sleep`."""
        self._bind()
        await self._supervisor.hold("wake")

    def load(self) -> Load:
        """Return how busy all replicas are, with ``NAME.running`` and ``NAME.in_flight`` of each in the details."""
        loads = {replica.name: replica.live.load() for replica in self._supervisor.up}
        in_flight = {replica.name: replica.in_flight for replica in self._supervisor.replicas}
        running = {name: min(loads[name].running if name in loads else 0, count) for name, count in in_flight.items()}
        total = sum(running.values())
        return Load(
            running=total,
            waiting=len(self._under_way) - total,
            used_tokens=sum(load.used_tokens for name, load in loads.items() if in_flight[name]),
            max_tokens=sum(load.max_tokens or 0 for load in loads.values()) or None,
            details={f"{name}.running": count for name, count in running.items()}
            | {f"{name}.in_flight": count for name, count in in_flight.items()},
        )

    async def aclose(self) -> None:
        """End everything with "abort" and stop every replica."""
        if self._closed:
            return
        self._closed = True
        if self.loop is asyncio.get_running_loop():
            self._abort(list(self._under_way))
            if self._under_way and self._supervisor.up:  # they have a moment to send what they have sampled
                self._emptied = self.loop.create_future()
                await asyncio.wait([self._emptied], timeout=self._supervisor.times.close)
            for routed in list(self._under_way.values()):
                self._end(routed)
        await self._supervisor.close()

    def _bind(self) -> asyncio.AbstractEventLoop:
        """Belong to the running event loop; what an earlier one left under way has no listener any more."""
        if self._closed:
            raise EngineError("the pool is closed; build another")
        loop = asyncio.get_running_loop()
        if loop is not self.loop:
            if self.loop is not None and not self.loop.is_closed():
                raise EngineError("the pool serves another event loop; close that first, or build a pool for each")
            self.loop, self._assigning = loop, False
            left_over = self._by_replica(self._under_way.values())
            self._under_way.clear()
            self._waiting.clear()
            self._supervisor.bind()
            for replica, requests in left_over.items():
                if replica.state == "up":
                    self._spawn(replica.live.abort([routed.request.request_id for routed in requests]))
        return loop

    def _spawn(self, coroutine: Coroutine[object, object, object]) -> None:
        self._supervisor.spawn(coroutine)

    # -- requests -------------------------------------------------------------------------------------------------

    def _assign_soon(self) -> None:
        """Send what waits once all that is said in this turn of the loop has been heard."""
        if self._waiting and not self._assigning:
            self._assigning = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        """Send what waits, in order, as far as replicas have room: one dispatch per replica."""
        self._assigning = False
        if not self._waiting or self._closed or self._supervisor.in_doubt:
            return
        # 1. See who is there, and who has room.
        for replica in self._supervisor.up:
            if (failure := failure_of(replica.live)) is not None:
                self._supervisor.lose(replica, replica.engine, str(failure))
            else:
                replica.allowed, replica.waiting = allowance(replica.live.load()), 0
        if self._supervisor.in_doubt:
            return
        # 2. Let the router choose, as long as anybody has room.
        up = self._supervisor.up
        batches: dict[Replica, list[_Routed]] = {}
        refused: list[tuple[_Routed, str]] = []
        for routed in self._waiting.values():
            if not any(replica.has_room for replica in up):
                break
            try:
                chosen = choose(self._router, routed.request, up)
            except EngineError as error:
                refused.append((routed, f"{error.kind}: {error}"))
                continue
            if chosen.has_room:
                batches.setdefault(chosen, []).append(routed)
                chosen.in_flight += 1
            else:
                chosen.waiting += 1
        # 3. Send what was chosen.
        for routed, why in refused:
            self._end(routed, why)
        now = asyncio.get_running_loop().time()
        for replica, batch in batches.items():
            for routed in batch:
                del self._waiting[routed.request.request_id]
                routed.replica, routed.queued = replica, now - routed.since
            replica.sent(len(batch), now)
            self._spawn(self._serve(replica, batch))

    async def _serve(self, replica: Replica, batch: list[_Routed]) -> None:
        """Hand on what a replica answers to a dispatch, to its end."""
        batch = [routed for routed in batch if routed.replica is replica]
        if not batch:
            return
        for routed in batch:
            routed.asked = True
        engine, loop = replica.live, asyncio.get_running_loop()
        served = {routed.request.request_id: routed for routed in batch}
        why = "the engine's answer ended without a last chunk"
        try:
            async for chunk in engine.generate([routed.request for routed in batch]):
                answered = served.get(chunk.request_id)
                if answered is not None and answered.replica is replica:
                    replica.measure(len(chunk.ids), loop.time())
                    self._hand_on(answered, replica, chunk)
        except (Exception, asyncio.CancelledError) as error:  # whatever an engine raises is the engine's failure
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            why = describe(error)
        self._dispatch_failed(replica, engine, [routed for routed in batch if routed.replica is replica], why)

    def _hand_on(self, routed: _Routed, replica: Replica, chunk: Chunk) -> None:
        routed.version = chunk.weight_version
        if routed.queued is not None or chunk.replica != replica.name:
            queued = chunk.queue_seconds + (routed.queued or 0.0)
            chunk = replace(chunk, replica=replica.name, queue_seconds=queued)
            routed.queued = None
        if chunk.finish_reason is not None:
            self._forget(routed)
            if chunk.error is None:
                replica.strikes = replica.losses = 0  # whatever went wrong before is forgiven
        routed.stream.put(chunk)
        self._assign_soon()

    def _dispatch_failed(self, replica: Replica, engine: Engine, failed: Sequence[_Routed], why: str) -> None:
        """Give back a dispatch that its engine failed as a whole; an engine that fails one after the other is lost."""
        if not failed:
            return
        if (failure := failure_of(engine)) is not None:
            self._supervisor.lose(replica, engine, str(failure))
            return
        replica.strikes += 1
        logger.warning("%s failed a dispatch of %d request(s): %s", replica.name, len(failed), why)
        for routed in failed:
            self._give_back(routed, why)
        if replica.strikes >= STRIKES:
            self._supervisor.lose(replica, engine, f"its engine failed {STRIKES} times in a row: {why}")
        self._assign_soon()

    def _lose_requests(self, replica: Replica, why: str) -> None:
        """Give back what a lost replica had; what it was not asked for yet waits for another one."""
        not_asked: dict[str, _Routed] = {}
        for routed in self._by_replica(self._under_way.values()).get(replica, ()):
            if routed.asked:
                self._give_back(routed, why)
            else:
                not_asked[routed.request.request_id] = routed
                replica.in_flight -= 1
                routed.replica = None
        self._waiting = {**not_asked, **self._waiting}
        self._assign_soon()

    def _replicas_changed(self) -> None:
        """Make use of the replicas that are there now, or end everything if none ever will be."""
        if (error := self._supervisor.fallen) is not None:
            for routed in self._under_way.values():
                routed.stream.fail(error)
            self._under_way.clear()
            self._waiting.clear()
        self._assign()

    def _give_back(self, routed: _Routed, why: str) -> None:
        if routed.replica is not None:
            routed.replica.moved += 1
        self._end(routed, f"ReplicaLost: {why}")

    def _end(self, routed: _Routed, error: str | None = None) -> None:
        """Give a request a last chunk without tokens."""
        replica = "" if routed.replica is None else routed.replica.name
        self._forget(routed)
        request_id, version = routed.request.request_id, routed.version
        routed.stream.put(Chunk(request_id, NO_IDS, NO_LOGPROBS, version, FinishReason.ABORT, error, replica=replica))

    def _forget(self, routed: _Routed) -> None:
        """Take a request off the books."""
        request_id = routed.request.request_id
        if routed.replica is not None:
            routed.replica.in_flight -= 1
            routed.replica = None
        self._waiting.pop(request_id, None)
        self._under_way.pop(request_id, None)
        if self._emptied is not None and not self._under_way and not self._emptied.done():
            self._emptied.set_result(None)

    def _abort(self, request_ids: Iterable[str]) -> None:
        """End what waits here, and have the replicas end what they have."""
        known = [self._under_way[request_id] for request_id in request_ids if request_id in self._under_way]
        for replica, at_it in self._by_replica(known).items():
            if self.loop is not None and not self.loop.is_closed():
                self._spawn(self._abort_at(replica, at_it))
        for routed in known:
            if routed.replica is None:
                self._end(routed)

    async def _abort_at(self, replica: Replica, batch: list[_Routed]) -> None:
        engine = replica.live
        try:
            await engine.abort([routed.request.request_id for routed in batch])
        except Exception as error:  # an engine that cannot even abort has failed these requests
            self._dispatch_failed(
                replica, engine, [routed for routed in batch if routed.replica is replica], describe(error)
            )

    @staticmethod
    def _by_replica(requests: Iterable[_Routed]) -> dict[Replica, list[_Routed]]:
        """Return those of ``requests`` that are at a replica, by it."""
        found: dict[Replica, list[_Routed]] = {}
        for routed in requests:
            if routed.replica is not None:
                found.setdefault(routed.replica, []).append(routed)
        return found


def build_pool(spec: EngineSpec, router: Router, build: BuildReplica) -> PoolEngine:
    """Return the pool that a spec describes.

    Raises:
        EngineError: its replicas cannot be started.
    """
    placement: Placement
    if spec.placement == "ray":
        from fsm_rollout.engines.ray import RayOptions, RayPlacement

        options = RayOptions(cpus=spec.cpus, gpus=spec.gpus, **(spec.ray or RaySpec()).model_dump())
        placement = RayPlacement(build, spec.replicas, options)
    else:
        placement = LocalPlacement(build)
    keys = spec.pool
    times = PoolTimes(start=keys.start_timeout, silence=keys.silence_timeout, update=keys.update_timeout)
    return PoolEngine(
        placement, spec.replica_count, router=router, attempts=keys.attempts, restarts=keys.restarts, times=times
    )
