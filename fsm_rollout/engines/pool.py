"""Several replicas of an engine as one engine: routed, watched, kept alike, and whole again when one is lost.

Invariant, of requests: one is at one replica, or waits here in order until one has room. It is tried once: when its
replica is lost or fails it, its last chunk says ``ReplicaLost: …``, and the client (:mod:`fsm_rollout.engines.client`)
asks for the rest of it; what goes on comes before what has not begun. Every request gets its last chunk, or the error
that ended the pool. One that the router fails is at no replica at all: its last chunk says ``RouterFailed: …``.

Invariant, of replicas: all that are up have the same weights, version and hold (paused, asleep); one that starts again
is brought there before it takes part. A replica is lost when its engine is gone, does not answer a ping in time, says
nothing for too long while it has work, or could not follow an order that another one could. Every wait here is bounded
by :class:`PoolTimes`, and the number of lives by ``restarts``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, TypeVar

from anyio import CancelScope
from anyio.from_thread import start_blocking_portal
from msgspec.structs import replace

from fsm_rollout.concurrency.cancellation import being_cancelled, wait_for
from fsm_rollout.engines.chunk_stream import ChunkStream, check_unique
from fsm_rollout.engines.protocol import Chunk, Engine, Load, ReplicaLost, Request, Weights
from fsm_rollout.engines.replica import LocalPlacement, PoolTimes, Replica, describe, failure_of, ping
from fsm_rollout.engines.router import Router, StickyRouter, allowance, choose
from fsm_rollout.engines.specs import EngineSpec
from fsm_rollout.engines.weights import check_finite
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason

logger = logging.getLogger(__name__)
T = TypeVar("T")

Order = Literal["pause", "resume", "sleep", "wake"]
# Dispatches that an engine may fail as a whole, with nothing finished between, before its replica is given up.
STRIKES = 2
LOOK_WITHIN = 1.0  # seconds that the others have to answer when one is lost, before they are given what it had
TELL_AFTER = 2.0  # seconds of closing after which the log says what is waited for
TELL_START_AFTER = 15.0  # the same for starting, which takes long where models are large


@dataclass(eq=False, slots=True)
class _Routed:
    """A request under way, and the replica that has it."""

    request: Request
    stream: ChunkStream
    since: float
    replica: Replica | None = None  # `None` while it waits here
    # Seconds that it waited here; `None` before that, and when its first chunk has reported them.
    queued: float | None = None
    sent: bool = False  # whether the replica's engine was asked for it: only then is losing the replica a failed try


class PoolEngine:
    """See the module. It serves one event loop at a time.

    Args:
        placement: where the replicas live.
        count: how many there are.
        router: chooses their requests; default: :class:`StickyRouter`.
        attempts: how often the client tries a request in all.
        restarts: how often a replica that finishes nothing is started again before its place stays empty. Losses over
            requests on trial (``Request.on_trial``) do not count.
        times: seconds that the pool waits for its replicas.

    Raises:
        EngineError: a replica cannot be built, or does not start in time; none is left behind.
    """

    def __init__(
        self,
        placement: LocalPlacement,
        count: int,
        *,
        router: Router | None = None,
        attempts: int = 3,
        restarts: int = 3,
        times: PoolTimes | None = None,
    ) -> None:
        self.attempts = attempts
        self.loop: asyncio.AbstractEventLoop | None = None
        self.replicas = [Replica(f"replica-{index}") for index in range(count)]  # all replicas, each with its state
        self._placement = placement
        self._router: Router = router or StickyRouter()
        self._restarts = restarts
        self._times = times or PoolTimes()
        self._under_way: dict[str, _Routed] = {}  # all requests under way, by id
        self._waiting: dict[str, _Routed] = {}  # those of them that are at no replica, in order
        # The updates that turn the weights an engine is built with into the present ones: the names of tensors (`None`:
        # all that there are), as shared, and the version.
        self._weights: list[tuple[frozenset[str] | None, Weights, int]] = []
        # How many looks at the other replicas go on, because one has just been lost and more may have gone with it.
        self._looks = 0
        self._paused = self._asleep = self._closed = self._assigning = False
        self._fallen: EngineError | None = None  # the error when no replica will ever come back
        self._tasks: set[asyncio.Task[object]] = set()
        try:
            with start_blocking_portal() as portal:  # this may be called from within an event loop, or without any
                wait_for(portal.start_task_soon(self._start_all))
        except BaseException:
            placement.close()
            raise
        engines = [replica.live for replica in self.replicas]
        self.tokenizer, self.eos_ids = engines[0].tokenizer, engines[0].eos_ids
        self.weight_version = engines[0].weight_version
        self.max_context = min(engine.max_context for engine in engines)

    # -- the protocol ---------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Send the requests to their replicas at once, as far as those have room; see the protocol."""
        loop = self._bind()
        if self._fallen is not None:
            raise self._fallen
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

        A replica that fails while another one succeeds is lost, and comes back with the new weights. When all are lost
        at that moment, the next one that comes back is asked, so that one has checked them; but none comes back
        while all are to sleep. Weights that all are lost over twice are not tried a third time.

        Raises:
            EngineError: no replica took them; those that are still there go on with what they had.
        """
        self._bind()
        # Shielded: an update that is given up half-way would leave replicas with different weights.
        return await asyncio.shield(self._spawn(self._update(weights, version)))

    async def pause(self) -> None:
        """Sample nothing anywhere until :meth:`resume`."""
        await self._hold("pause")

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._hold("resume")

    async def sleep(self) -> None:
        """Give memory back on every replica; EngineError while requests are under way and the pool is not paused."""
        if self._under_way and not self._paused:
            raise EngineError(f"{len(self._under_way)} request(s) are under way; pause the engine before it sleeps")
        await self._hold("sleep")

    async def wake(self) -> None:
        """Go on after :meth:`sleep`."""
        await self._hold("wake")

    def load(self) -> Load:
        """Return how busy all replicas are, with ``NAME.running`` and ``NAME.in_flight`` of each in the details."""
        loads = [(replica, replica.live.load()) for replica in self._up]
        details = {f"{replica.name}.{what}": 0 for what in ("running", "in_flight") for replica in self.replicas}
        details |= {f"{replica.name}.running": min(load.running, replica.in_flight) for replica, load in loads}
        running = sum(details.values())
        return Load(
            running=running,
            waiting=len(self._under_way) - running,
            used_tokens=sum(load.used_tokens for replica, load in loads if replica.in_flight),
            max_tokens=sum(load.max_tokens or 0 for _, load in loads) or None,
            details=details | {f"{replica.name}.in_flight": replica.in_flight for replica, _ in loads},
        )

    async def aclose(self) -> None:
        """End everything with "abort" and stop every replica."""
        if self._closed:
            return
        self._closed = True
        loop = asyncio.get_running_loop()
        # 1. What is under way has a moment to send what it has sampled.
        if self.loop is loop:
            self._abort(list(self._under_way))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._times.close):
                    await self._until(lambda: not (self._under_way and self._up))
            for routed in list(self._under_way.values()):
                self._end(routed)
        slow = loop.call_later(TELL_AFTER, self._tell_who_is_open)
        try:
            # 2. Nobody is watched or started any more. The tasks may be of another loop, which may still run.
            tasks = [task for task in self._tasks if not task.done()]
            for task in tasks:
                with suppress(RuntimeError):  # that loop is closed
                    task.get_loop().call_soon_threadsafe(task.cancel)
            await asyncio.gather(*(task for task in tasks if task.get_loop() is loop), return_exceptions=True)
            # 3. Stop every replica, also those that were about to start, and free what they shared.
            await self._stop_all()
            await asyncio.to_thread(self._placement.close)
        finally:
            slow.cancel()

    def _tell_who_is_open(self) -> None:
        names = [replica.name for replica in self.replicas if replica.engine is not None]
        logger.warning("still closing: waiting for %s", ", ".join(names) if names else "what the replicas shared")

    def _bind(self) -> asyncio.AbstractEventLoop:
        """Belong to the running event loop; what an earlier one left under way has no listener any more."""
        if self._closed:
            raise EngineError("the pool is closed; build another")
        loop = asyncio.get_running_loop()
        if loop is self.loop:
            return loop
        if self.loop is not None and not self.loop.is_closed():
            raise EngineError("the pool serves another event loop; close that first, or build a pool for each")
        left_over = list(self._under_way)
        self.loop, self._assigning, self._looks = loop, False, 0
        self._under_way.clear()
        self._waiting.clear()
        self._tasks.clear()
        self._change = asyncio.Lock()
        self._news = asyncio.Event()  # set whenever a replica comes or is given up, and when all wake
        for replica in self.replicas:
            replica.begin(loop.time())
            if replica.state == "starting":
                self._spawn(self._revive(replica))
            elif replica.state == "up" and left_over:
                self._spawn(replica.live.abort(left_over))
        self._spawn(self._watch())
        return loop

    def _spawn(self, coroutine: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Run something until it is done or the pool is closed."""
        assert self.loop is not None
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def _up(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state == "up"]

    # -- requests -------------------------------------------------------------------------------------------------

    def _assign_soon(self) -> None:
        """Send the waiting requests after the other callbacks of this pass of the loop."""
        if self._waiting and not self._assigning:
            self._assigning = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        """Send what waits, in order, as far as replicas have room: one dispatch per replica."""
        self._assigning = False
        if not self._waiting or self._closed or self._looks:
            return
        # 1. Find the replicas that are up and have room; nothing is sent while it is in doubt which are up.
        for replica in self._up:
            if (failure := failure_of(replica.live)) is not None:
                self._lose(replica, replica.engine, str(failure))
            else:
                replica.allowed, replica.waiting = allowance(replica.live.load()), 0
        if self._looks:
            return
        # 2. Let the router choose, as long as anybody has room.
        up = self._up
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
            if replica.in_flight == len(batch):  # it had nothing to do
                replica.last_active = now
            replica.requests += len(batch)
            replica.dispatches.add(task := self._spawn(self._serve(replica, batch)))
            task.add_done_callback(replica.dispatches.discard)

    async def _serve(self, replica: Replica, batch: list[_Routed]) -> None:
        """Pass on a replica's chunks for a dispatch, to its end."""
        served = {routed.request.request_id: routed for routed in batch if routed.replica is replica}
        if not served:
            return
        for routed in served.values():
            routed.sent = True
        engine, loop = replica.live, asyncio.get_running_loop()
        why = "the engine's answer ended without a last chunk"
        try:
            async for chunk in engine.generate([routed.request for routed in served.values()]):
                answered = served.get(chunk.request_id)
                if answered is not None and answered.replica is replica:
                    replica.measure(len(chunk.ids), loop.time())
                    if answered.queued is not None or chunk.replica != replica.name:
                        queued = chunk.queue_seconds + (answered.queued or 0.0)
                        chunk = replace(chunk, replica=replica.name, queue_seconds=queued)
                        answered.queued = None
                    if chunk.finish_reason is not None:
                        self._forget(answered)
                        if chunk.error is None:
                            replica.strikes = replica.losses = 0  # whatever went wrong before is forgiven
                    answered.stream.put(chunk)
                    self._assign_soon()
        except (Exception, asyncio.CancelledError) as error:  # whatever an engine raises is the engine's failure
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            why = describe(error)
        self._dispatch_failed(replica, engine, served.values(), why)

    def _dispatch_failed(self, replica: Replica, engine: Engine, batch: Iterable[_Routed], why: str) -> None:
        """Give back what an engine has left of a dispatch; one that fails dispatch after dispatch is lost."""
        failed = [routed for routed in batch if routed.replica is replica]
        if not failed:
            return
        if (failure := failure_of(engine)) is not None:
            self._lose(replica, engine, str(failure))
            return
        replica.strikes += not all(routed.request.on_trial for routed in failed)
        logger.warning("%s failed a dispatch of %d request(s): %s", replica.name, len(failed), why)
        for routed in failed:
            self._give_back(routed, replica, why)
        if replica.strikes >= STRIKES:
            self._lose(replica, engine, f"its engine failed {STRIKES} times in a row: {why}")
        self._assign_soon()

    def _give_back(self, routed: _Routed, replica: Replica, why: str) -> None:
        replica.moved += 1
        self._end(routed, f"ReplicaLost: {why}")

    def _end(self, routed: _Routed, error: str | None = None) -> None:
        """Give a request a last chunk without tokens."""
        name = "" if routed.replica is None else routed.replica.name
        self._forget(routed)
        routed.stream.put(
            Chunk(
                routed.request.request_id,
                weight_version=self.weight_version,
                finish_reason=FinishReason.ABORT,
                error=error,
                replica=name,
            )
        )

    def _forget(self, routed: _Routed) -> None:
        """Take a request off the books."""
        request_id = routed.request.request_id
        if routed.replica is not None:
            routed.replica.in_flight -= 1
            routed.replica = None
        self._waiting.pop(request_id, None)
        self._under_way.pop(request_id, None)
        if self._closed and not self._under_way:
            self._news.set()

    def _abort(self, request_ids: Iterable[str]) -> None:
        """End what waits here, and have the replicas end what they have."""
        batches: dict[Replica, list[_Routed]] = {}
        for request_id in request_ids:
            routed = self._under_way.get(request_id)
            if routed is not None and routed.replica is not None:
                batches.setdefault(routed.replica, []).append(routed)
            elif routed is not None:
                self._end(routed)
        if self.loop is not None and not self.loop.is_closed():
            for replica, batch in batches.items():
                self._spawn(self._abort_at(replica, replica.live, batch))

    async def _abort_at(self, replica: Replica, engine: Engine, batch: list[_Routed]) -> None:
        try:
            await engine.abort([routed.request.request_id for routed in batch])
        except Exception as error:  # an engine that cannot even abort has failed these requests
            self._dispatch_failed(replica, engine, batch, describe(error))

    # -- orders to all replicas -----------------------------------------------------------------------------------

    async def _hold(self, order: Order) -> None:
        """Have all replicas, and those that come, pause, resume, sleep or wake; EngineError if none could."""
        self._bind()
        async with self._change:
            if order in ("pause", "resume"):
                self._paused = order == "pause"
            else:
                self._asleep = order == "sleep"
                self._news.set()
            await self._order(order)

    async def _order(self, order: Order) -> None:
        failed = await self._on_each(lambda engine: getattr(engine, order)(), self._times.order)
        for replica, error in failed.items():
            self._lose(replica, replica.engine, f"could not {order}: {describe(error)}")
        if failed and self._fallen is not None:  # else replicas that start again are given the order
            raise EngineError(f"no replica could {order}: {_first(failed)}")
        now = asyncio.get_running_loop().time()
        for replica in self._up:
            replica.last_active = now

    async def _update(self, weights: Weights, version: int | None) -> int:
        """Do what :meth:`update_weights` does."""
        if isinstance(weights, Mapping):
            await asyncio.to_thread(check_finite, weights)  # a folder's are looked at by each replica
        for last_try in (False, True):
            await self._until(lambda: bool(self._up) or self._asleep or self._fallen is not None)
            try:
                async with self._change:
                    return await self._load_everywhere(weights, version)
            except ReplicaLost as error:
                if last_try or self._fallen is not None:
                    raise
                logger.warning("%s; they are loaded again once a replica is there", error)
        raise AssertionError("unreachable")

    async def _load_everywhere(self, weights: Weights, version: int | None) -> int:
        """Load weights on all replicas that are up; EngineError: none took them (ReplicaLost: all were lost)."""
        if self._fallen is not None:
            raise self._fallen
        # 1. Share the weights once; no replica samples meanwhile.
        number = self.weight_version + 1 if version is None else version
        names = frozenset(weights) if isinstance(weights, Mapping) else None
        shared = await asyncio.to_thread(self._placement.share, weights)
        if not self._paused:
            await self._order("pause")
        try:
            # 2. Load them everywhere; if no replica took them, nothing has changed.
            replicas = self._up
            if not replicas and not self._asleep:
                raise ReplicaLost("no replica took the weights, so nothing has changed: all were lost meanwhile")
            failed = await self._on_each(lambda engine: engine.update_weights(shared, number), self._times.update)
            if failed and len(failed) == len(replicas):
                lost = all(isinstance(error, ReplicaLost) for error in failed.values())
                kind = ReplicaLost if lost else EngineError
                raise kind(f"no replica took the weights, so nothing has changed: {_first(failed)}")
            # 3. Remember what makes the present weights: the last folder, and those updates by tensors since of which
            # later ones have not replaced every tensor.
            needed, replaced = [(names, shared, number)], names or frozenset()
            for update in reversed(self._weights) if names is not None else ():
                if update[0] is None or not update[0] <= replaced:
                    needed.insert(0, update)
                    replaced |= update[0] or frozenset()
            self._weights = needed
            self.weight_version = number
            for replica, error in failed.items():
                self._lose(replica, replica.engine, f"could not load weights that others could: {describe(error)}")
        finally:
            if not self._paused:
                await self._order("resume")
        return number

    async def _on_each(self, ask: Callable[[Engine], Awaitable[object]], seconds: float) -> dict[Replica, Exception]:
        """Ask all replicas that are up at once; return the errors of those that failed.

        One whose state is not known afterwards (gone, no answer in time, no EngineError) is lost here.
        """
        lives = [(replica, replica.live) for replica in self._up]

        async def in_time(engine: Engine) -> None:
            async with asyncio.timeout(seconds):
                await ask(engine)

        results = await asyncio.gather(*(in_time(engine) for _, engine in lives), return_exceptions=True)
        failed: dict[Replica, Exception] = {}
        for (replica, engine), result in zip(lives, results, strict=True):
            if isinstance(result, TimeoutError):
                result = ReplicaLost(f"no answer within {seconds:g} s")
            if isinstance(result, Exception):
                if (failure := failure_of(engine)) is not None:
                    result = ReplicaLost(str(failure))
                failed[replica] = result
                if isinstance(result, ReplicaLost) or not isinstance(result, EngineError):
                    self._lose(replica, engine, describe(result))
        return failed

    # -- the lives of replicas ------------------------------------------------------------------------------------

    async def _start_all(self) -> None:
        """Start all replicas; stop all if one fails, or if they do not serve the same model."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def start(replica: Replica) -> None:
            await replica.open(self._placement, self._times.start)
            to_go = sum(other.engine is None for other in self.replicas)
            logger.info("%s is up after %.1f s; %d to go", replica.name, loop.time() - began, to_go)

        tasks = [asyncio.ensure_future(start(replica)) for replica in self.replicas]
        slow = loop.call_later(TELL_START_AFTER, self._tell_who_starts)
        try:
            await asyncio.gather(*tasks)  # the first error ends the others
            models = {(replica.live.eos_ids, replica.live.weight_version) for replica in self.replicas}
            if len(models) > 1:
                raise EngineError(f"the replicas do not serve the same model: {', '.join(map(str, models))}")
        except BaseException:
            with CancelScope(shield=True):  # whoever is interrupted still leaves nothing behind
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._stop_all()
            raise
        finally:
            slow.cancel()
        for replica in self.replicas:
            replica.state = "up"

    def _tell_who_starts(self) -> None:
        names = ", ".join(replica.name for replica in self.replicas if replica.engine is None)
        logger.warning("still starting: waiting for %s, up to %g s (start_timeout)", names, self._times.start)

    async def _stop_all(self) -> None:
        await asyncio.gather(*(replica.stop(self._times.order) for replica in self.replicas))

    def _lose(self, replica: Replica, engine: Engine | None, why: str) -> None:
        """Give one life of a replica up, if it has not been yet, and start another."""
        if replica.engine is not engine or replica.state != "up":
            return
        logger.warning("%s is lost: %s; %d request(s) go on elsewhere", replica.name, why, replica.in_flight)
        replica.state, replica.cause = "starting", why
        requests = [routed.request for routed in self._under_way.values() if routed.replica is replica]
        replica.losses += not (requests and all(request.on_trial for request in requests))
        replica.restarts += 1
        if not self._closed:
            self._spawn(self._revive(replica))
            if self._up:
                self._looks += 1
                self._spawn(self._look_at_others())
        # Later answers of this engine are not read: from here on its requests are sampled elsewhere.
        for task in replica.dispatches - {asyncio.current_task()}:
            task.cancel()
        # What its engine was asked for goes back to the client, what it was not asked for yet waits for another.
        not_asked: dict[str, _Routed] = {}
        for routed in [routed for routed in self._under_way.values() if routed.replica is replica]:
            if routed.sent:
                self._give_back(routed, replica, why)
            else:
                not_asked[routed.request.request_id] = routed
                replica.in_flight -= 1
                routed.replica = None
        self._waiting = {**not_asked, **self._waiting}
        self._assign_soon()

    async def _look_at_others(self) -> None:
        """Find replicas that were lost at the same moment, before requests are sent to them in vain."""

        async def look(replica: Replica, engine: Engine) -> None:
            try:
                async with asyncio.timeout(LOOK_WITHIN):
                    await ping(engine)
            except TimeoutError:
                pass  # it may be busy; the watch has more patience
            except Exception as error:  # whatever an engine raises is the engine's failure
                self._lose(replica, engine, describe(error))

        try:
            await asyncio.gather(*(look(replica, replica.live) for replica in self._up))
        finally:
            self._looks -= 1
            self._assign()

    async def _revive(self, replica: Replica) -> None:
        """Start a lost replica again, a bounded number of times, after a longer pause each time."""
        while True:
            await replica.stop(self._times.order)
            if replica.losses > self._restarts:
                break
            await self._until(lambda: not self._asleep)  # others use its memory until then
            await asyncio.sleep(self._times.backoff * 2 ** max(0, replica.losses - 1))
            try:
                await replica.open(self._placement, self._times.start)
                await self._join(replica)
            except Exception as error:  # whatever an engine raises is the engine's failure
                replica.losses += 1
                replica.cause = describe(error)
                logger.warning("%s could not be started again: %s", replica.name, replica.cause)
            else:
                logger.info("%s is up again, with weights of version %d", replica.name, self.weight_version)
                self._news.set()
                self._assign()
                return
        replica.state = "dead"
        logger.error("%s was lost %d times in a row and stays away: %s", replica.name, replica.losses, replica.cause)
        if all(other.state == "dead" for other in self.replicas):
            causes = "; ".join(f"{other.name}: {other.cause}" for other in self.replicas)
            self._fallen = EngineError(f"all {len(self.replicas)} replica(s) are lost for good: {causes}")
            for routed in self._under_way.values():
                routed.stream.fail(self._fallen)
            self._under_way.clear()
            self._waiting.clear()
        self._news.set()

    async def _join(self, replica: Replica) -> None:
        """Bring a new engine to where the others are, and let it take part."""
        while True:
            weights = self._weights
            async with asyncio.timeout(self._times.update):
                for _, shared, version in weights:
                    await replica.live.update_weights(shared, version)
            async with self._change:
                if weights is not self._weights:
                    continue  # there are newer ones by now
                async with asyncio.timeout(self._times.order):
                    if self._paused:
                        await replica.live.pause()
                    if self._asleep:
                        await replica.live.sleep()
                replica.begin(asyncio.get_running_loop().time())
                replica.state = "up"
                return

    async def _watch(self) -> None:
        """Ping every replica regularly, and give up those that have work and send nothing for too long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._times.ping_every)
            failed = await self._on_each(ping, self._times.ping)
            for replica, error in failed.items():
                self._lose(replica, replica.engine, f"it does not answer: {describe(error)}")
            for replica in self._up:
                silent, count = loop.time() - replica.last_active, replica.in_flight
                if count and not self._paused and not self._asleep and silent > self._times.silence:
                    why = f"it has {count} request(s) and said nothing for {silent:.0f} s"
                    self._lose(replica, replica.engine, why)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._news.clear()
            await self._news.wait()


def _first(failed: Mapping[Replica, Exception]) -> str:
    replica, error = next(iter(failed.items()))
    return f"{replica.name}: {describe(error)}"


def build_pool(spec: EngineSpec, router: Router, build: Callable[[str], Engine]) -> PoolEngine:
    """Return the pool that a spec describes; EngineError if its replicas cannot be started."""
    placement = LocalPlacement(build)
    if spec.placement == "ray":
        on_ray = import_module("fsm_rollout.engines.ray")  # by its name, as it builds on this module
        options = on_ray.RayOptions(cpus=spec.cpus, gpus=spec.gpus, **(spec.ray.model_dump() if spec.ray else {}))
        placement = on_ray.RayPlacement(build, spec.replica_count, options)
    keys = spec.pool
    times = PoolTimes(start=keys.start_timeout, silence=keys.silence_timeout, update=keys.update_timeout)
    return PoolEngine(
        placement, spec.replica_count, router=router, attempts=keys.attempts, restarts=keys.restarts, times=times
    )
