"""The lives of a pool's replicas, and the orders that all of them follow.

Invariant: all replicas that are up have the same weights, version and hold (paused, asleep); one that starts again is
brought there before it takes part. A replica is lost when its engine is gone, does not answer a ping in time, says
nothing for too long while it has work, or could not follow an order that another one could. Every wait here is bounded
by :class:`PoolTimes`, and the number of lives by ``restarts``.

An order is a hold, new weights, or a release. One lock serves them all, and only the first reason to hold and the last
to release reach the engines. An engine without the plane that an order is for is left alone: its owner cares for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

from anyio import CancelScope

from fsm_rollout.engines.protocol import HalfLoaded, ReplicaLost, Sleeper, TokenSource, WeightSink, WeightSource
from fsm_rollout.engines.replica import Placement, PoolTimes, Replica, RequestHolder, describe, failure_of, ping
from fsm_rollout.engines.weight_sources import PresentWeights, WeightsGone
from fsm_rollout.errors import EngineError

logger = logging.getLogger(__name__)
T = TypeVar("T")

Order = Literal["pause", "resume", "sleep", "wake"]
LOOK_WITHIN = 1.0  # seconds that the others have to answer when one is lost, before they are given what it had
TELL_CLOSE_AFTER = 2.0  # seconds of closing after which the log says what is waited for
TELL_START_AFTER = 15.0  # seconds of starting after which the log says what is waited for: large models take long


class Replicas:
    """See the module.

    Args:
        placement: where they live.
        count: how many there are.
        restarts: how often a replica that finishes nothing is started again before its place stays empty.
        times: seconds that are waited.
        holder: who has the requests.
    """

    def __init__(
        self, placement: Placement, count: int, restarts: int, times: PoolTimes, holder: RequestHolder
    ) -> None:
        self.placement, self.times = placement, times
        self.all = [Replica(f"replica-{index}" if placement.restarts else "") for index in range(count)]
        self.up: list[Replica] = []  # those that take part; a new list whenever that changes
        self.held: set[str] = set()  # why nothing is sampled; empty: it is
        self.looks = 0  # looks at the others that go on, because one has just been lost and more may have gone with it
        self.fallen: EngineError | None = None  # the error when no replica will ever come back
        self.closed = False
        self._version = 0
        self._restarts, self._holder = restarts, holder
        self._weights = PresentWeights()
        self._unfilled: list[Replica] = []  # those that live and wait for an update, as the present weights are gone
        self._asleep = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        if not placement.restarts:
            self.all[0].live_on(placement.engine)
            self._move("up", *self.all)

    def _move(self, state: Literal["starting", "up", "dead"], *replicas: Replica) -> None:
        for replica in replicas:
            replica.state = state
        self.up = [replica for replica in self.all if replica.state == "up"]

    @property
    def weight_version(self) -> int:
        """How many policy updates the present weights have had; an engine that is there already may have others too."""
        engine = None if self.placement.restarts else self.all[0].engine
        return self._version if engine is None else engine.weight_version

    @property
    def busy(self) -> bool:
        """Whether anything of their lives is under way, or was when their event loop was closed."""
        return bool(self._tasks)

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Belong to an event loop; what an earlier one has left of their lives goes on here."""
        self._loop, self.looks = loop, 0
        self._tasks.clear()
        self._change = asyncio.Lock()
        self._news = asyncio.Event()  # set whenever a replica comes or is given up, and when all wake
        for replica in self.all:
            replica.begin(loop.time())
            if replica.state == "starting":
                self._spawn(self._revive(replica))
        if self.placement.restarts:
            self._spawn(self._watch())

    def _spawn(self, coroutine: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Run something until it is done or the pool is closed."""
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- orders -----------------------------------------------------------------------------------------------------

    async def hold(self, reason: str) -> None:
        """Have nothing sampled until every reason is taken back; EngineError if no replica can be held."""
        await self._to_its_end(self._hold(reason))

    async def release(self, reason: str) -> None:
        """Take a reason back, and go on if it was the last."""
        await self._to_its_end(self._release(reason))

    async def _hold(self, reason: str) -> None:
        first = not self.held
        self.held.add(reason)
        if first:
            self._holder.hold_changed()
            try:
                await self._order("pause")
            except BaseException:
                self.held.discard(reason)
                self._holder.hold_changed()
                raise

    async def _release(self, reason: str) -> None:
        if self.held == {reason}:
            try:
                await self._order("resume")
            finally:  # an engine that cannot be resumed has failed; time runs again all the same
                self.held.clear()
                self._holder.hold_changed()
        self.held.discard(reason)

    async def sleep(self) -> None:
        """Have all give their memory back; they are held until :meth:`wake`."""
        await self._to_its_end(self._sleep())

    async def _sleep(self) -> None:
        await self._hold("asleep")
        self._asleep = True
        await self._order("sleep")

    async def wake(self) -> None:
        """Have all be ready again, and go on unless they are held for another reason."""
        await self._to_its_end(self._wake())

    async def _wake(self) -> None:
        self._asleep = False
        self._news.set()
        await self._order("wake")
        await self._release("asleep")

    async def _to_its_end(self, order: Coroutine[object, object, None]) -> None:
        """Give an order after those before it; one that its caller gives up half-way would leave engines held."""

        async def give() -> None:
            async with self._change:
                await order

        await asyncio.shield(self._spawn(give()))

    async def update_weights(self, source: WeightSource, version: int | None) -> int:
        """Hold all, load weights everywhere, release; return the version.

        A replica that fails while another one succeeds is lost, and comes back with the new weights. When all are lost
        at that moment, the next one that comes back is asked, so that one has checked them; but none comes back
        while all are to sleep. Weights that all are lost over twice are not tried a third time.

        Raises:
            EngineError: no replica took them; those that are still there go on with what they had.
        """
        # Shielded: an update that is given up half-way would leave replicas with different weights.
        return await asyncio.shield(self._spawn(self._update(source, version)))

    async def _update(self, source: WeightSource, version: int | None) -> int:
        shared = await asyncio.to_thread(self.placement.share, source)  # checked once, while all go on
        for last_try in (False, True):
            await self._until(lambda: bool(self.up or self._unfilled) or self._asleep or self.fallen is not None)
            try:
                async with self._change:
                    await self._hold("update")
                    try:
                        return await self._load_everywhere(shared, version)
                    finally:
                        await self._release("update")
            except ReplicaLost as error:
                if last_try or self.fallen is not None:
                    raise
                logger.warning("%s; they are loaded again once a replica is there", error)
        raise AssertionError("unreachable")

    async def _load_everywhere(self, source: WeightSource, version: int | None) -> int:
        """Load weights on all replicas that are there; EngineError: none took them (ReplicaLost: all were lost)."""
        if self.fallen is not None:
            raise self.fallen
        # 1. Load them everywhere; if no replica took them, nothing has changed.
        number = self.weight_version + 1 if version is None else version
        replicas = [*self.up, *self._unfilled]
        if not replicas and not self._asleep:
            raise ReplicaLost("no replica took the weights, so nothing has changed: all were lost meanwhile")
        lives = [(replica, replica.live) for replica in replicas]
        failed = self._failed(lives, await source.deliver([engine for _, engine in lives], number, self.times.update))
        if failed and len(failed) == len(replicas):
            if not self.placement.restarts:
                raise next(iter(failed.values()))
            lost = all(isinstance(error, ReplicaLost) for error in failed.values())
            kind = ReplicaLost if lost else EngineError
            raise kind(f"no replica took the weights, so nothing has changed: {_first(failed)}")
        self._version = number
        if self.placement.restarts:
            self._weights = self._weights.with_update(source, number)
        # 2. Whoever waited for weights that nobody has any more is as the others now, if these are all that it needs.
        if len(self._weights.updates) == 1:
            self._unfilled = [replica for replica in self._unfilled if replica in failed]
            self._news.set()
        for replica, error in failed.items():
            self.lose(replica, replica.engine, f"could not load weights that others could: {describe(error)}")
        return number

    async def _order(self, order: Order) -> None:
        plane = WeightSink if order in ("pause", "resume") else Sleeper

        async def give(engine: TokenSource) -> None:
            if isinstance(engine, plane):
                await getattr(engine, order)()

        failed = await self._on_each(give, self.times.order)
        for replica, error in failed.items():
            self.lose(replica, replica.engine, f"could not {order}: {describe(error)}")
        if failed and (self.fallen is not None or not self.placement.restarts):
            # Replicas that start again are given the order.
            raise EngineError(f"no replica could {order}: {_first(failed)}")
        now = asyncio.get_running_loop().time()
        for replica in self.up:
            replica.last_active = now

    async def _on_each(
        self, ask: Callable[[TokenSource], Awaitable[object]], seconds: float
    ) -> dict[Replica, Exception]:
        """Ask all replicas that are up at once; return the errors of those that failed.

        One whose state is not known afterwards (gone, no answer in time, no EngineError) is lost here.
        """
        lives = [(replica, replica.live) for replica in self.up]

        async def in_time(engine: TokenSource) -> None:
            async with asyncio.timeout(seconds):
                await ask(engine)

        results = await asyncio.gather(*(in_time(engine) for _, engine in lives), return_exceptions=True)
        late = ReplicaLost(f"no answer within {seconds:g} s")
        return self._failed(lives, [late if isinstance(result, TimeoutError) else result for result in results])

    def _failed(
        self, lives: Sequence[tuple[Replica, TokenSource]], results: Sequence[object]
    ) -> dict[Replica, Exception]:
        """Return the errors among the answers of replicas, and lose those whose state is not known."""
        failed: dict[Replica, Exception] = {}
        for (replica, engine), result in zip(lives, results, strict=True):
            if isinstance(result, Exception):
                if (failure := failure_of(engine)) is not None:
                    result = ReplicaLost(str(failure))
                failed[replica] = result
                if isinstance(result, ReplicaLost) or not isinstance(result, EngineError):
                    self.lose(replica, engine, describe(result), half=isinstance(result, HalfLoaded))
        return failed

    # -- lives ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all replicas; stop all if one fails, or if they do not serve the same model."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def start(replica: Replica) -> None:
            await replica.open(self.placement, self.times.start)
            to_go = sum(other.engine is None for other in self.all)
            logger.info("%s is up after %.1f s; %d to go", replica.name, loop.time() - began, to_go)

        tasks = [asyncio.ensure_future(start(replica)) for replica in self.all]
        slow = loop.call_later(TELL_START_AFTER, self._tell_who_starts)
        try:
            await asyncio.gather(*tasks)  # the first error ends the others
            models = {(replica.live.eos_ids, replica.live.weight_version) for replica in self.all}
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
        self._move("up", *self.all)
        self._version = self.all[0].live.weight_version

    def _tell_who_starts(self) -> None:
        names = ", ".join(replica.name for replica in self.all if replica.engine is None)
        logger.warning("still starting: waiting for %s, up to %g s (start_timeout)", names, self.times.start)

    async def close(self) -> None:
        """Watch and start nobody any more, and stop every replica, also those that were about to start."""
        loop = asyncio.get_running_loop()
        self._move("dead", *self.all)  # nobody gives them an order any more
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:  # they may be of another loop, which may still run
            if not task.get_loop().is_closed():
                task.get_loop().call_soon_threadsafe(task.cancel)
        await asyncio.gather(*(task for task in tasks if task.get_loop() is loop), return_exceptions=True)
        slow = loop.call_later(TELL_CLOSE_AFTER, self._tell_who_is_open)
        try:
            await self._stop_all()
            await asyncio.to_thread(self.placement.close)
        finally:
            slow.cancel()

    def _tell_who_is_open(self) -> None:
        names = [replica.name for replica in self.all if replica.engine is not None]
        logger.warning("still closing: waiting for %s", ", ".join(names) if names else "what the replicas shared")

    async def _stop_all(self) -> None:
        await asyncio.gather(*(replica.stop(self.times.order) for replica in self.all))

    def lose(
        self, replica: Replica, engine: TokenSource | None, why: str, *, on_trial: bool = False, half: bool = False
    ) -> None:
        """Give one life of a replica up, if it has not been yet, and start another.

        ``on_trial``: all that it has is tried to find a request that fails, so the loss says little about it. ``half``:
        it lives, and lacks whole weights only.
        """
        if replica.engine is not engine or replica.state != "up":
            return
        if not self.placement.restarts and replica.failure is None:
            return  # it is the only one, and all that there is to hope for
        logger.warning("%s is lost: %s; %d request(s) go on in another", replica.name, why, replica.in_flight)
        self._move("starting", replica)
        replica.cause = why
        replica.losses += not on_trial
        replica.restarts += not half
        if not self.closed:
            self._spawn(self._revive(replica, half=half))
            if self.up:
                self.looks += 1
                self._spawn(self._look_at_others())
        self._holder.replica_lost(replica, why)

    async def _look_at_others(self) -> None:
        """Find replicas that were lost at the same moment, before requests are sent to them in vain."""

        async def look(replica: Replica, engine: TokenSource) -> None:
            try:
                async with asyncio.timeout(LOOK_WITHIN):
                    await ping(engine)
            except TimeoutError:
                pass  # it may be busy; the watch has more patience
            except Exception as error:  # whatever an engine raises is the engine's failure
                self.lose(replica, engine, describe(error))

        try:
            await asyncio.gather(*(look(replica, replica.live) for replica in self.up))
        finally:
            self.looks -= 1
            self._holder.replicas_changed()

    async def _revive(self, replica: Replica, *, half: bool = False) -> None:
        """Start a lost replica again, unless it is ``half`` lost, so many times, after a longer pause each time."""
        while True:
            if not half:
                await replica.stop(self.times.order)
                if replica.losses > self._restarts or not self.placement.restarts:
                    break
                await self._until(lambda: not self._asleep)  # others use its memory until then
                await asyncio.sleep(self.times.backoff * 2 ** max(0, replica.losses - 1))
            try:
                if not half:
                    await replica.open(self.placement, self.times.start)
                held, half = half, False
                await self._join(replica, held)
            except Exception as error:  # whatever an engine raises is the engine's failure
                replica.losses += 1
                replica.cause = describe(error)
                logger.warning("%s could not be started again: %s", replica.name, replica.cause)
            else:
                logger.info("%s is up again, with weights of version %d", replica.name, self.weight_version)
                self._news.set()
                self._holder.replicas_changed()
                return
        self._move("dead", replica)
        logger.error("%s was lost %d times in a row and stays away: %s", replica.name, replica.losses, replica.cause)
        if all(other.state == "dead" for other in self.all):
            causes = "; ".join(f"{other.name}: {other.cause}" for other in self.all)
            self.fallen = EngineError(f"all {len(self.all)} replica(s) are lost for good: {causes}")
            self._holder.all_lost(self.fallen)
        self._news.set()

    async def _join(self, replica: Replica, held: bool) -> None:
        """Bring an engine, new or ``held``, to where the others are, and let it take part."""
        while True:
            weights = self._weights
            try:
                await weights.fill(replica.live, self.times.update)
            except WeightsGone as error:
                logger.warning("%s waits for the next update: %s", replica.name, error)
                await self._next_update(replica)
                weights = self._weights
            async with self._change:
                if weights is not self._weights:
                    continue  # there are newer ones by now
                async with asyncio.timeout(self.times.order):
                    if held != bool(self.held) and isinstance(replica.live, WeightSink):
                        await (replica.live.resume() if held else replica.live.pause())
                    if self._asleep and isinstance(replica.live, Sleeper):
                        await replica.live.sleep()
                replica.begin(asyncio.get_running_loop().time())
                self._move("up", replica)
                return

    async def _next_update(self, replica: Replica) -> None:
        """Have it take part in the next update that makes it whole; EngineError if none comes in time."""
        self._unfilled = [*self._unfilled, replica]
        self._news.set()
        try:
            async with asyncio.timeout(self.times.update):
                await self._until(lambda: replica not in self._unfilled)
        except TimeoutError:
            raise EngineError(f"nobody has given it weights within {self.times.update:g} s") from None
        finally:
            self._unfilled = [other for other in self._unfilled if other is not replica]

    async def _watch(self) -> None:
        """Ping every replica regularly, and give up those that do not answer in time."""
        while True:
            await asyncio.sleep(self.times.ping_every)
            failed = await self._on_each(ping, self.times.ping)
            for replica, error in failed.items():
                self.lose(replica, replica.engine, f"it does not answer: {describe(error)}")

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._news.clear()
            await self._news.wait()


def _first(failed: Mapping[Replica, Exception]) -> str:
    replica, error = next(iter(failed.items()))
    return f"{replica.name}: {describe(error)}"
