"""The lives of a pool's replicas: they start, come and go, are lost and come back, all with the same weights.

Invariant: all replicas that are up have the same weights, version and hold (paused, asleep); one that starts again is
brought there before it takes part. A replica is lost when its engine is gone, does not answer a ping in time, says
nothing for too long while it has work, or could not follow an order that another one could. Every wait here is bounded
by :class:`PoolTimes`, and the number of lives by ``restarts``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from typing import Literal

from anyio import CancelScope
from anyio.from_thread import start_blocking_portal

from fsm_rollout.concurrency.cancellation import wait_for
from fsm_rollout.concurrency.durations import Phases
from fsm_rollout.engines.orders import Orders, first_of
from fsm_rollout.engines.present_weights import PresentWeights
from fsm_rollout.engines.protocol import HalfLoaded, ReplicaLost, Sleeper, TokenSource, WeightSink, WeightSource
from fsm_rollout.engines.replica import Placement, PoolTimes, Replica, RequestHolder, describe, model_of, ping
from fsm_rollout.engines.weight_sources import WeightsGone
from fsm_rollout.errors import EngineError, did_you_mean

logger = logging.getLogger(__name__)
LOOK_WITHIN = 1.0  # seconds that the others have to answer when one is lost, before they are given what it had
TELL_CLOSE_AFTER = 2.0  # seconds of closing after which the log says what is waited for
TELL_START_AFTER = 15.0  # seconds of starting after which the log says what is waited for: large models take long


class Replicas(Orders):
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
        super().__init__(placement, times, holder)
        self.all = [Replica(f"replica-{index}" if placement.restarts else "") for index in range(count)]
        self.open: list[Replica] = []  # those of them that are given requests
        self.looks = 0  # looks at the others that go on, because one has just been lost and more may have gone with it
        self.closed = False
        self._version, self._restarts = 0, restarts
        self.weights = PresentWeights()  # of a model that the pool knows once they have started
        self._unfilled: list[Replica] = []  # those that live and wait for an update, as the present weights are gone
        if not placement.restarts:
            self.all[0].live_on(placement.engine)
            self._move("up", *self.all)

    def _move(self, state: Literal["starting", "up", "dead", "left"], *replicas: Replica) -> None:
        for replica in replicas:
            replica.state = state
        self.up = [replica for replica in self.all if replica.state == "up"]
        self.open = [replica for replica in self.up if not replica.leaving]

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
        self._change, self._news = asyncio.Lock(), asyncio.Event()
        for replica in self.all:
            replica.begin(loop.time())
            if replica.state == "starting":
                replica.task = self._tasks.begin(self._revive(replica))
        if self.placement.restarts:
            self._tasks.begin(self._watch())

    async def update_weights(self, source: WeightSource, version: int | None) -> int:
        """Hold all, load weights everywhere, release; return the version.

        A replica that fails while another one succeeds is lost, and comes back with the new weights. When all are lost
        at that moment, the next one that comes back is asked, so that one has checked them; but none comes back
        while all are to sleep. Weights that all are lost over twice are not tried a third time.

        Raises:
            EngineError: no replica took them; those that are still there go on with what they had.
        """
        # Shielded: an update that is given up half-way would leave replicas with different weights.
        return await asyncio.shield(self._tasks.begin(self._update(source, version)))

    async def _update(self, source: WeightSource, version: int | None) -> int:
        phases = Phases(self.update_times)
        shared = await asyncio.to_thread(self.placement.share, source)  # checked once, while all go on
        phases.end("check")
        first: ReplicaLost | None = None
        for last_try in (False, True):
            await self._until(lambda: bool(self.up or self._unfilled) or self._asleep or self.fallen is not None)
            try:
                async with self._change:
                    phases.start()
                    await self._hold("update")
                    phases.end("hold")
                    try:
                        number = await self._load_everywhere(shared, version)
                        phases.end("load")
                    finally:
                        await self._release("update")
                    phases.end("release", whole="paused")
                    return number
            except ReplicaLost as error:
                if last_try or not shared.again or self.fallen is not None:
                    raise
                first = error
                logger.warning("%s; they are loaded again once a replica is there", error)
            except WeightsGone as gone:
                raise first or gone from None
        raise AssertionError("unreachable")

    async def _load_everywhere(self, source: WeightSource, version: int | None) -> int:
        """Load weights on all replicas that are there; EngineError: none took them (ReplicaLost: all were lost)."""
        if self.fallen is not None:
            raise self.fallen
        # 1. Load them everywhere; if no replica took them, those that have no part of them are as they were.
        number = self.weight_version + 1 if version is None else version
        replicas = [*self.up, *self._unfilled]
        if not replicas and not self._asleep:
            raise ReplicaLost("no replica took the weights, so nothing has changed: all were lost meanwhile")
        lives = [(replica, replica.live) for replica in replicas]
        try:
            results = await source.deliver([engine for _, engine in lives], number, self.times.update)
        except WeightsGone as gone:
            if not source.touched:
                raise
            results = [HalfLoaded(str(gone))] * len(lives)  # what came before the tensor that has changed may be there
        for replica, error in zip(replicas, results, strict=True):
            if isinstance(error, ReplicaLost):
                replica.mix(source.touched)
        failed = self._failed(lives, results)
        if failed and len(failed) == len(replicas):
            if not self.placement.restarts:
                raise next(iter(failed.values()))
            kind = ReplicaLost if all(isinstance(error, ReplicaLost) for error in failed.values()) else EngineError
            half = any(isinstance(error, HalfLoaded) for error in failed.values())
            left = "and what has a part samples nothing until it has whole ones" if half else "so nothing has changed"
            raise kind(f"no replica took the weights, {left}: {first_of(failed)}")
        self._version = number
        if self.placement.restarts:
            self.weights = self.weights.with_update(source, number)
        # 2. Whoever waited for weights that nobody has any more is as the others now, if these are all that it needs.
        if len(self.weights.updates) == 1:
            self._unfilled = [
                replica for replica in self._unfilled if replica in failed or not self.weights.cover(replica.mixed)
            ]
        self.look_again()
        for replica, error in failed.items():
            self.lose(replica, replica.engine, f"could not load weights that others could: {describe(error)}")
        return number

    # -- lives ------------------------------------------------------------------------------------------------------

    def start_in_thread(self) -> None:
        """Start all replicas, from within an event loop or without any; see :meth:`start`."""
        try:
            with start_blocking_portal() as portal:
                wait_for(portal.start_task_soon(self.start))
        except BaseException:
            self.placement.close()
            raise

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
        half = half and (not self.placement.starts_afresh or self.weights.cover(replica.mixed))
        logger.warning("%s is lost: %s; %d request(s) go on in another", replica.name, why, replica.in_flight)
        self._move("starting", replica)
        replica.cause = why
        replica.losses += not on_trial
        replica.restarts += not half
        self.look_again()
        if not self.closed:
            replica.task = self._tasks.begin(self._revive(replica, half=half))
            if self.up:
                self.looks += 1
                self._tasks.begin(self._look_at_others())
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
                if replica.leaving:
                    self._move("left", replica)
                    return
                if replica.losses > self._restarts or not self.placement.restarts:
                    break
                await self._until(lambda: not self._asleep)  # others use its memory until then
                await asyncio.sleep(self.times.backoff * 2 ** max(0, replica.losses - 1))
            try:
                if not half:
                    await replica.open(self.placement, self.times.start)
                    replica.mixed = frozenset() if self.placement.starts_afresh else replica.mixed
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
        if all(other.state in ("dead", "left") for other in self.all):
            causes = "; ".join(f"{other.name}: {other.cause}" for other in self.all)
            self.fallen = EngineError(f"all {len(self.all)} replica(s) are lost for good: {causes}")
            self._holder.all_lost(self.fallen)
        self._news.set()

    # -- coming and going -------------------------------------------------------------------------------------------

    async def add(self, url: str | None) -> str:
        """Start one more replica, or meet a server; it takes part with the weights and holds of the others.

        Raises:
            EngineError: there is no place for it, it does not start, or it is not of the same model.
        """
        known = zip(self.placement.urls or (), self.all, strict=False)
        if any(url == there and replica.state != "left" for there, replica in known):
            raise EngineError(f"'{url}' is one of the replicas already")
        self.placement.admit(url)
        replica = Replica(f"replica-{len(self.all)}")
        self.all.append(replica)
        return await self._tasks.begin(self._come(replica))

    async def _come(self, replica: Replica) -> str:
        models = {model_of(other.engine) for other in self.all if other.engine is not None}
        try:
            await self._until(lambda: not self._asleep)  # others use its memory until then
            await replica.open(self.placement, self.times.start)
            if models and model_of(replica.live) not in models:
                raise EngineError(
                    f"{replica.name} does not serve the same model: {model_of(replica.live)}, not {models}"
                )
            if not self.weights.updates and replica.live.weight_version != self._version:
                raise EngineError(
                    f"{replica.name} has weights of version {replica.live.weight_version}, the others of "
                    f"{self._version}, which did not come from here; load them into it"
                )
            await self._join(replica, False)
        except BaseException:
            self._move("left", replica)
            with CancelScope(shield=True):
                await replica.stop(self.times.order)
            raise
        logger.info("%s has come, with weights of version %d", replica.name, self.weight_version)
        self._news.set()
        self._holder.replicas_changed()
        return replica.name

    async def remove(self, name: str, within: float) -> None:
        """Have a replica leave: it is given nothing more, and what it has not said in time goes on in others.

        Raises:
            EngineError: there is none of that name, or no other that stays.
        """
        staying = [replica for replica in self.all if replica.state in ("up", "starting") and not replica.leaving]
        replica = next((replica for replica in staying if replica.name == name), None)
        if replica is None:
            if any(replica.name == name for replica in self.all):
                raise EngineError(f"replica '{name}' is dead, leaves or has left")
            raise EngineError(f"there is no replica '{name}'{did_you_mean(name, [each.name for each in staying])}")
        if len(staying) == 1:
            raise EngineError(f"'{name}' is the only replica that would stay; add another one first")
        # 1. It says what it has begun.
        replica.leaving = True
        self._move(replica.state, replica)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(within) else within):
                    await self._until(lambda: not replica.in_flight or replica.state != "up")
        except asyncio.CancelledError:
            replica.leaving = False
            self._move(replica.state, replica)
            self._holder.replicas_changed()
            raise
        # 2. The rest goes on elsewhere, from the last token that it has said. Nobody can give that up half-way.
        await asyncio.shield(self._tasks.begin(self._leave(replica)))

    async def _leave(self, replica: Replica) -> None:
        async with self._change:
            if replica.state == "up" and replica.in_flight and isinstance(replica.live, WeightSink):
                with suppress(Exception):  # it may be gone by now
                    async with asyncio.timeout(self.times.order):
                        await replica.live.pause()
                await asyncio.sleep(0)  # what it had sampled is taken
            if replica.task is not None:
                replica.task.cancel()
            self._move("left", replica)
            self._holder.replica_lost(replica, "it was removed")
        await replica.stop(self.times.order)
        logger.info("%s has left", replica.name)

    async def _join(self, replica: Replica, held: bool) -> None:
        """Bring an engine, new or ``held``, to where the others are, and let it take part."""
        while True:
            weights = self.weights
            try:
                if not weights.cover(replica.mixed):
                    raise WeightsGone("it has a part of an update that failed, which no later one has replaced")
                await weights.fill(replica.live, self.times.update)
            except WeightsGone as error:
                logger.warning("%s waits for the next update: %s", replica.name, error)
                if not await self._next_update(replica, weights):
                    continue  # it has not taken all of that; perhaps it can be had again
                weights = self.weights
            async with self._change:
                if weights is not self.weights:
                    continue  # there are newer ones by now
                async with asyncio.timeout(self.times.order):
                    if held != bool(self.held) and isinstance(replica.live, WeightSink):
                        await (replica.live.resume() if held else replica.live.pause())
                    if self._asleep and isinstance(replica.live, Sleeper):
                        await replica.live.sleep()
                replica.begin(asyncio.get_running_loop().time())
                replica.mixed = frozenset()
                self._move("up", replica)
                return

    async def _next_update(self, replica: Replica, weights: PresentWeights) -> bool:
        """Have it take part in the update that follows ``weights``, and return whether it is whole then.

        Raises:
            EngineError: none has come in time.
        """
        self._unfilled = [*self._unfilled, replica]
        self._news.set()
        try:
            async with asyncio.timeout(self.times.update):
                await self._until(lambda: weights is not self.weights)
        except TimeoutError:
            raise EngineError(f"nobody has given it weights within {self.times.update:g} s") from None
        else:
            return replica not in self._unfilled
        finally:
            self._unfilled = [other for other in self._unfilled if other is not replica]

    async def _watch(self) -> None:
        """Ping every replica regularly, and give up those that do not answer in time."""
        while True:
            await asyncio.sleep(self.times.ping_every)
            for replica, error in (await self._on_each(ping, self.times.ping)).items():
                self.lose(replica, replica.engine, f"it does not answer: {describe(error)}")
