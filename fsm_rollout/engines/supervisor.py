"""Replicas of an engine: started, watched, kept alike, and started again when they are lost.

Invariant: all replicas that are up have the same weights, version and hold (paused, asleep); one that starts again is
brought there before it takes part. A replica is lost when its engine is gone, does not answer a ping in time, says
nothing for too long while it has work, or could not follow an order that another one could. Every wait here is bounded
by :class:`PoolTimes`, and the number of lives by ``restarts``. Requests are the business of
:mod:`fsm_rollout.engines.pool`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from anyio import CancelScope

from fsm_rollout.concurrency.threads import DaemonThreads
from fsm_rollout.engines.finite import check_finite
from fsm_rollout.engines.protocol import Engine, ReplicaLost
from fsm_rollout.engines.router import FIRST, ReplicaView
from fsm_rollout.errors import EngineError

if TYPE_CHECKING:
    from fsm_rollout.engines.protocol import Weights

logger = logging.getLogger(__name__)
T = TypeVar("T")

State = Literal["starting", "up", "dead"]
Order = Literal["pause", "resume", "sleep", "wake"]
PACE_MEMORY = 600.0
"""Seconds of work (of all requests together) after which a replica's pace counts half."""
LOOK_WITHIN = 1.0
"""Seconds that the others have to answer when one is lost, before they are given what it had."""
TELL_AFTER = 2.0
"""Seconds of closing after which the log says what is waited for."""
_BUILDING = threading.Lock()
"""Loading a model changes process-wide defaults for a while, so engines are built one after another."""
_threads = DaemonThreads("fsm-rollout-replica")
"""Whoever gives a start up need not wait for it, not even to end the process."""


# -- where replicas live --------------------------------------------------------------------------------------------


def failure_of(engine: Engine) -> EngineError | None:
    """Return why an engine is gone: its ``failure``, where its work is done by what may be gone while it is not."""
    failure: EngineError | None = getattr(engine, "failure", None)
    return failure


async def ping(engine: Engine) -> None:
    """Return if an engine is there; one in another process has a ``ping`` that returns if that answers.

    Raises:
        ReplicaLost: it is gone.
    """
    if (answer := getattr(engine, "ping", None)) is not None:
        await answer()
    if (failure := failure_of(engine)) is not None:
        raise ReplicaLost(str(failure))


class Placement(Protocol):
    """Where a pool's replicas live, and how one is started."""

    async def start(self, name: str) -> Engine:
        """Build another engine for the replica of that name; a start that is cancelled leaves nothing behind.

        Raises:
            EngineError: it cannot be built.
        """

    def share(self, weights: Weights) -> Weights:
        """Return ``weights`` in the form in which any number of replicas, now and later, are given them."""

    def advice(self) -> str:
        """Say what may keep a replica from starting in time, and what to try."""

    def close(self) -> None:
        """Free what the replicas shared; they are closed by now."""


class LocalPlacement:
    """Replicas in this process, each an engine that ``build`` makes from its name, in a thread."""

    def __init__(self, build: Callable[[str], Engine]) -> None:
        self._build = build

    async def start(self, name: str) -> Engine:
        """Build an engine. One whose start was cancelled is dropped once it is built, which ends it."""
        wanted = True

        def build() -> Engine:
            with _BUILDING:
                if not wanted:
                    raise EngineError(f"replica '{name}' was given up before it started")
                return self._build(name)

        try:
            return await asyncio.get_running_loop().run_in_executor(_threads, build)
        finally:
            wanted = False

    def share(self, weights: Weights) -> Weights:
        """Copy tensors: a replica that starts later must get these, not what training has made of them since.

        To the CPU's memory: they are kept until others replace them all, which is no use to make of a GPU's.
        """
        if isinstance(weights, Mapping):
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        return weights

    def advice(self) -> str:
        """Say what to try."""
        return "give it more time with start_timeout"

    def close(self) -> None:
        """Nothing is shared."""


# -- one replica ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolTimes:
    """Seconds that a pool waits for its replicas."""

    start: float = 600.0
    """For one to start."""
    silence: float = 300.0
    """For one that has requests and is not held to say anything; then it is given up as hung."""
    ping_every: float = 10.0
    ping: float = 30.0
    """For the answer to a ping; then it is given up."""
    order: float = 60.0
    """For one to pause, resume, sleep or wake."""
    update: float = 600.0
    """For one to load weights."""
    close: float = 2.0
    """For the last tokens of what is under way when the pool is closed."""
    backoff: float = 0.5
    """Before one is started again for the first time; twice as long each time after."""


@dataclass(eq=False, slots=True)
class Replica(ReplicaView):
    """One place in a pool: an engine, and when that is lost, the next one."""

    state: State = "starting"
    engine: Engine | None = None
    requests: int = 0
    """Sent to it."""
    tokens: int = 0
    """Got from it."""
    restarts: int = 0
    moved: int = 0
    """Requests that it failed and that went on elsewhere."""
    cause: str = ""
    """Why it was last lost."""
    strikes: int = 0
    """Dispatches it failed since it last finished a request."""
    losses: int = 0
    """Lives it lost since it last finished a request."""
    heard: float = 0.0
    """When it last sent something, was given something to do, or was let go on."""
    worked: float = 0.0
    """Seconds of work in which it sampled :attr:`sampled` tokens, the older ones counted less."""
    sampled: float = 0.0

    @property
    def live(self) -> Engine:
        """The present engine.

        Raises:
            EngineError: there is none yet.
        """
        if self.engine is None:
            raise EngineError(f"{self.name} has not been started")
        return self.engine

    def sent(self, count: int, now: float) -> None:
        """Note that it was given ``count`` requests, which are counted already."""
        if self.in_flight == count:
            self.heard = now
        self.requests += count

    def measure(self, tokens: int, now: float) -> None:
        """Note that it sent ``tokens``, and learn how fast it works."""
        self.tokens += tokens
        self.sampled += tokens
        self.worked += max(1, self.in_flight) * (now - self.heard)
        self.heard = now
        if self.worked > 1.0:
            self.pace = self.sampled / self.worked
        if self.worked > PACE_MEMORY:
            self.worked, self.sampled = self.worked / 2, self.sampled / 2

    def begin(self, now: float) -> None:
        """Begin with clean books."""
        self.in_flight = self.waiting = self.strikes = 0
        self.allowed = FIRST
        self.pace = self.worked = self.sampled = 0.0
        self.heard = now


# -- all of them ----------------------------------------------------------------------------------------------------


class ReplicaSupervisor:
    """See the module. Belongs to one event loop at a time, from :meth:`bind` on.

    Args:
        placement: where the replicas live.
        count: how many there are.
        restarts: how often a replica that finishes nothing is started again before its place stays empty.
        times: how long each of them is waited for.
        lost: is called with a replica that is not up any more, and why; its requests are nobody's now.
        changed: is called when a replica is up again, the last doubt about the others is gone, or none will come back.
    """

    def __init__(
        self,
        placement: Placement,
        count: int,
        *,
        restarts: int,
        times: PoolTimes,
        lost: Callable[[Replica, str], None],
        changed: Callable[[], None],
    ) -> None:
        self.replicas = [Replica(f"replica-{index}") for index in range(count)]
        self.times = times
        self.version = 0
        self.paused = self.asleep = False
        self._placement = placement
        self._restarts = restarts
        self._lost = lost
        self._changed = changed
        self._weights: list[tuple[frozenset[str] | None, Weights, int]] = []
        """What makes the present weights of those an engine is built with: the names of tensors (``None``: all that
        there are), as shared, and the version."""
        self._updates = 0
        self._closed = False
        self._looks = 0
        self._news = asyncio.Event()
        """Set whenever a replica comes or is given up, and when all wake."""
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def up(self) -> list[Replica]:
        """Those that take part."""
        return [replica for replica in self.replicas if replica.state == "up"]

    @property
    def in_doubt(self) -> bool:
        """Whether one has just been lost and it is not known yet who went with it; so nobody is given anything."""
        return self._looks > 0

    @property
    def fallen(self) -> EngineError | None:
        """The error when none will ever come back."""
        if any(replica.state != "dead" for replica in self.replicas):
            return None
        causes = "; ".join(f"{replica.name}: {replica.cause}" for replica in self.replicas)
        return EngineError(f"all {len(self.replicas)} replica(s) are lost for good: {causes}")

    # -- from the first start to the end --------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all replicas; stop all if one fails.

        Raises:
            EngineError: the first failure, or they do not serve the same model.
        """
        loop = asyncio.get_running_loop()
        started, opening = loop.time(), len(self.replicas)

        async def open_one(replica: Replica) -> None:
            nonlocal opening
            await self._open(replica)
            opening -= 1
            logger.info("%s is up after %.1f s; %d to go", replica.name, loop.time() - started, opening)

        tasks = [asyncio.ensure_future(open_one(replica)) for replica in self.replicas]
        try:
            await asyncio.gather(*tasks)  # the first error ends the others
            engines = [replica.live for replica in self.replicas]
            models = {(engine.eos_ids, engine.weight_version) for engine in engines}
            if len(models) > 1:
                raise EngineError(f"the replicas do not serve the same model: {', '.join(map(str, models))}")
        except BaseException:
            with CancelScope(shield=True):  # whoever is interrupted still leaves nothing behind
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._stop_all()
            raise
        for replica in self.replicas:
            replica.state = "up"
        self.version = engines[0].weight_version

    def bind(self) -> None:
        """Belong to the running event loop, from now on."""
        self._loop = asyncio.get_running_loop()
        self._change = asyncio.Lock()
        self._looks = 0
        self._news = asyncio.Event()
        self._tasks.clear()
        for replica in self.replicas:
            replica.begin(self._loop.time())
            if replica.state == "starting":
                self.spawn(self._revive(replica))
        self.spawn(self._watch())

    async def close(self) -> None:
        """Stop every replica, also those that start right now, and free what they shared."""
        self._closed = True
        loop = asyncio.get_running_loop()
        slow = loop.call_later(TELL_AFTER, self._tell_who_is_open)
        try:
            tasks = [task for task in self._tasks if not task.done()]
            mine = [task for task in tasks if task.get_loop() is loop]
            for task in tasks:
                if task in mine:
                    task.cancel()
                else:  # of the loop that the pool belonged to, which may still run or be about to
                    with suppress(RuntimeError):  # it is closed
                        task.get_loop().call_soon_threadsafe(task.cancel)
            await asyncio.gather(*mine, return_exceptions=True)
            await self._stop_all()
            await asyncio.to_thread(self._placement.close)
        finally:
            slow.cancel()

    def spawn(self, coroutine: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Run something until it is done or the replicas are closed."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _stop_all(self) -> None:
        await asyncio.gather(*(self._stop(replica) for replica in self.replicas))

    async def _stop(self, replica: Replica) -> None:
        """End a replica's present life; an engine that cannot even be closed keeps nobody from going on."""
        if (engine := replica.engine) is None:
            return
        try:
            async with asyncio.timeout(self.times.order):
                await engine.aclose()
        except Exception as error:  # whatever an engine raises is the engine's failure
            logger.warning("%s did not close, and is left behind: %s", replica.name, describe(error))
        if replica.engine is engine:
            replica.engine = None

    def _tell_who_is_open(self) -> None:
        names = [replica.name for replica in self.replicas if replica.engine is not None]
        logger.warning("still closing: waiting for %s", ", ".join(names) if names else "what the replicas shared")

    # -- orders to all --------------------------------------------------------------------------------------------

    async def hold(self, order: Order) -> None:
        """Have all replicas pause, resume, sleep or wake, and remember it for those that come.

        Raises:
            EngineError: none could, and none will come back.
        """
        async with self._change:
            if order in ("pause", "resume"):
                self.paused = order == "pause"
            else:
                self.asleep = order == "sleep"
                self._news.set()
            await self._order(order)

    async def update(self, weights: Weights, version: int | None) -> int:
        """Pause all, load the weights everywhere, go on; return the version.

        When all are lost at that moment, the next one that comes back is asked, so that somebody has looked at them;
        but none comes back while all are to sleep. Weights that all are lost over twice are not tried a third time.

        Raises:
            EngineError: no replica took them; those that are still there go on with what they had.
        """
        if isinstance(weights, Mapping):
            await asyncio.to_thread(check_finite, weights)  # a folder's are looked at by each replica
        for last_try in (False, True):
            await self._until(lambda: bool(self.up) or self.asleep or self.fallen is not None)
            try:
                return await self._update(weights, version)
            except ReplicaLost as error:
                if last_try or self.fallen is not None:
                    raise
                logger.warning("%s; they are loaded again once a replica is there", error)
        raise AssertionError("unreachable")

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._news.clear()
            await self._news.wait()

    async def _update(self, weights: Weights, version: int | None) -> int:
        """Do what :meth:`update` does, once.

        Raises:
            ReplicaLost: all who were asked were lost over it; EngineError: see there.
        """
        async with self._change:
            if self.fallen is not None:
                raise self.fallen
            # 1. Share the weights once, and let nobody sample meanwhile.
            number = self.version + 1 if version is None else version
            names = frozenset(weights) if isinstance(weights, Mapping) else None
            shared = await asyncio.to_thread(self._placement.share, weights)
            if not self.paused:
                await self._order("pause")
            try:
                # 2. Load them everywhere; when nobody took them, nothing has changed.
                asked = self.up
                if not asked and not self.asleep:
                    raise ReplicaLost("no replica took the weights, so nothing has changed: all were lost meanwhile")
                failed = await self._on_each(lambda engine: engine.update_weights(shared, number), self.times.update)
                if failed and set(failed) >= set(asked):
                    lost = all(isinstance(error, ReplicaLost) for error in failed.values())
                    kind = ReplicaLost if lost else EngineError
                    raise kind(f"no replica took the weights, so nothing has changed: {_first(failed)}")
                # 3. Remember what makes the present weights: the last folder, and the tensors since.
                earlier = [] if names is None else [u for u in self._weights if u[0] is None or not u[0] <= names]
                self._weights = [*earlier, (names, shared, number)]
                self._updates += 1
                self.version = number
                for replica, error in failed.items():
                    self.lose(replica, replica.engine, f"could not load weights that others could: {describe(error)}")
            finally:
                if not self.paused:
                    await self._order("resume")
            return number

    async def _order(self, order: Order) -> None:
        asked = self.up
        failed = await self._on_each(lambda engine: follow(engine, order), self.times.order)
        for replica, error in failed.items():
            self.lose(replica, replica.engine, f"could not {order}: {describe(error)}")
        if failed and set(failed) >= set(asked) and self.fallen is not None:
            raise EngineError(f"no replica could {order}: {_first(failed)}")  # else those that come back are told
        now = asyncio.get_running_loop().time()
        for replica in self.up:
            replica.heard = now

    async def _on_each(self, ask: Callable[[Engine], Awaitable[object]], seconds: float) -> dict[Replica, Exception]:
        """Ask all replicas that are up at once; return the errors of those that failed.

        One of which it is not known what it did (gone, no answer in time, an error of no engine) is lost right here.
        """
        lives = [(replica, replica.live) for replica in self.up]

        async def ask_one(engine: Engine) -> None:
            async with asyncio.timeout(seconds):
                await ask(engine)

        results = await asyncio.gather(*(ask_one(engine) for _, engine in lives), return_exceptions=True)
        failed: dict[Replica, Exception] = {}
        for (replica, engine), result in zip(lives, results, strict=True):
            if isinstance(result, TimeoutError):
                result = ReplicaLost(f"no answer within {seconds:g} s")
            if isinstance(result, Exception):
                if (failure := failure_of(engine)) is not None:
                    result = ReplicaLost(str(failure))
                failed[replica] = result
                if isinstance(result, ReplicaLost) or not isinstance(result, EngineError):
                    self.lose(replica, engine, describe(result))
        return failed

    # -- losses ---------------------------------------------------------------------------------------------------

    def lose(self, replica: Replica, engine: Engine | None, why: str) -> None:
        """Give one life of a replica up, if it has not been yet, and start another."""
        if replica.engine is not engine or replica.state != "up" or self._closed:
            return
        logger.warning("%s is lost: %s; %d request(s) go on elsewhere", replica.name, why, replica.in_flight)
        replica.state, replica.cause = "starting", why
        replica.losses += 1
        replica.restarts += 1
        self.spawn(self._revive(replica))
        if self.up:
            self._looks += 1
            self.spawn(self._look_at_others())
        self._lost(replica, why)

    async def _look_at_others(self) -> None:
        """Find those that went at the same moment: requests would go from one to the next, and be tried in vain."""

        async def look(replica: Replica, engine: Engine) -> None:
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
            self._looks -= 1
            self._changed()

    async def _open(self, replica: Replica) -> None:
        """Start a new engine in a replica's place."""
        try:
            async with asyncio.timeout(self.times.start):
                replica.engine = await self._placement.start(replica.name)
        except TimeoutError:
            advice = self._placement.advice()
            raise EngineError(f"{replica.name} did not start within {self.times.start:g} s; {advice}") from None

    async def _revive(self, replica: Replica) -> None:
        """Start a lost replica again, a bounded number of times, the later the more often it was lost."""
        while True:
            await self._stop(replica)
            if replica.losses > self._restarts:
                break
            await self._until(lambda: not self.asleep)  # its memory is somebody else's until then
            await asyncio.sleep(self.times.backoff * 2 ** max(0, replica.losses - 1))
            try:
                await self._open(replica)
                await self._join(replica)
            except Exception as error:  # whatever an engine raises is the engine's failure
                replica.losses += 1
                replica.cause = describe(error)
                logger.warning("%s could not be started again: %s", replica.name, replica.cause)
            else:
                logger.info("%s is up again, with weights of version %d", replica.name, self.version)
                self._news.set()
                self._changed()
                return
        replica.state = "dead"
        self._news.set()
        logger.error("%s was lost %d times in a row and stays away: %s", replica.name, replica.losses, replica.cause)
        self._changed()

    async def _join(self, replica: Replica) -> None:
        """Bring a new engine to where the others are, and let it take part."""
        while True:
            updates = self._updates
            async with asyncio.timeout(self.times.update):
                for _, shared, version in self._weights:
                    await replica.live.update_weights(shared, version)
            async with self._change:
                if updates != self._updates:
                    continue  # there are newer weights by now
                async with asyncio.timeout(self.times.order):
                    if self.paused:
                        await replica.live.pause()
                    if self.asleep:
                        await replica.live.sleep()
                replica.begin(asyncio.get_running_loop().time())
                replica.state = "up"
                return

    async def _watch(self) -> None:
        """Ping every replica now and then, and mind those that have work and say nothing."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.times.ping_every)
            failed = await self._on_each(ping, self.times.ping)
            for replica, error in failed.items():
                self.lose(replica, replica.engine, f"it does not answer: {describe(error)}")
            for replica in self.up:
                silent, has = loop.time() - replica.heard, replica.in_flight
                if has and not self.paused and not self.asleep and silent > self.times.silence:
                    why = f"it has {has} request(s) and said nothing for {silent:.0f} s"
                    self.lose(replica, replica.engine, why)


def follow(engine: Engine, order: Order) -> Awaitable[None]:
    """Have an engine carry out an order."""
    return {"pause": engine.pause, "resume": engine.resume, "sleep": engine.sleep, "wake": engine.wake}[order]()


def describe(error: BaseException) -> str:
    """Return an error in one line: an engine's own words, or what class it was."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


def _first(failed: Mapping[Replica, Exception]) -> str:
    replica, error = next(iter(failed.items()))
    return f"{replica.name}: {describe(error)}"
