"""The replicas of a pool: started, watched, kept alike, and started again when they are lost.

Invariant: all members that are up have the same weights, version and hold (paused, asleep); one that starts again is
brought there before it takes part. A member is lost when it is gone, does not answer a ping in time, says nothing for
too long while it has work, or could not follow an order that another one could. Whatever happens, each wait here is
bounded by :class:`fsm_rollout.engines.pool_members.PoolTimes`, and lives by ``restarts``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from anyio import CancelScope

from fsm_rollout.engines.finite import check_finite
from fsm_rollout.engines.packing import Flush
from fsm_rollout.engines.pool_members import Member, PoolTimes
from fsm_rollout.engines.replicas import EngineFacts, Order, Placement, Replica, ReplicaLost
from fsm_rollout.errors import EngineError

if TYPE_CHECKING:
    from fsm_rollout.engines.replicas import Weights

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOK = 1.0
"""Seconds that the others have to answer when one is lost, before they are given what it had."""
TELL_AFTER = 2.0
"""Seconds of closing after which it is said what is waited for."""


class Owner(Protocol):
    """Whose requests the replicas serve."""

    def heard(self, member: Member, flush: Flush) -> None:
        """Take what a replica has to tell."""

    def lost(self, member: Member, why: str) -> None:
        """Take back what a replica had; it is not up any more."""

    def joined(self) -> None:
        """Make use of a replica that has come back, or of those that are still there."""

    def ended(self, error: EngineError) -> None:
        """Give up: all replicas are lost for good."""


class ReplicaSupervisor:
    """See the module. Belongs to one event loop at a time, from :meth:`bind` on."""

    def __init__(self, owner: Owner, placement: Placement, count: int, *, restarts: int, times: PoolTimes) -> None:
        self.members = [Member(f"replica-{index}") for index in range(count)]
        self.times = times
        self.version = 0
        self.paused = self.asleep = False
        self._owner = owner
        self._placement = placement
        self._restarts = restarts
        self._weights: list[tuple[frozenset[str] | None, Any, int]] = []
        """What makes the present weights of those an engine is built with: the names of tensors (``None``: all that
        there are), as shared, and the version."""
        self._updates = 0
        self._closed = False
        self._looks = 0
        self._news = asyncio.Event()
        """Set whenever a member comes or is given up, and when all wake."""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def up(self) -> list[Member]:
        """Those that take part."""
        return [member for member in self.members if member.state == "up"]

    @property
    def in_doubt(self) -> bool:
        """Whether one has just been lost and it is not known yet who went with it; so nobody is given anything."""
        return self._looks > 0

    @property
    def fallen(self) -> EngineError | None:
        """The error when none will ever come back."""
        if any(member.state != "dead" for member in self.members):
            return None
        causes = "; ".join(f"{member.name}: {member.cause}" for member in self.members)
        return EngineError(f"all {len(self.members)} replica(s) are lost for good: {causes}")

    # -- from the first start to the end --------------------------------------------------------------------------

    async def start(self) -> tuple[EngineFacts, Any]:
        """Start all replicas and return what they agree on, with the tokenizer; stop all if one fails.

        Raises:
            EngineError: the first failure.
        """
        loop = asyncio.get_running_loop()
        started, opening = loop.time(), len(self.members)

        async def open_one(member: Member) -> EngineFacts:
            nonlocal opening
            facts = await self._open(member)
            opening -= 1
            logger.info("%s is up after %.1f s; %d to go", member.name, loop.time() - started, opening)
            return facts

        try:
            facts = await _all_or_first_error([open_one(member) for member in self.members])
            if len({(fact.eos_ids, fact.weight_version) for fact in facts}) > 1:
                raise EngineError(f"the replicas do not serve the same model: {', '.join(map(str, facts))}")
            tokenizer = await self.members[0].live.tokenizer()
        except BaseException:
            with CancelScope(shield=True):  # whoever is interrupted still leaves nothing behind
                await self._stop_all()
            raise
        for member in self.members:
            member.state = "up"
        agreed = min(facts, key=lambda fact: fact.max_context)
        self.version = agreed.weight_version
        return agreed, tokenizer

    def bind(self) -> None:
        """Belong to the running event loop, from now on."""
        self._change = asyncio.Lock()
        self._looks = 0
        self._news = asyncio.Event()
        self._tasks.clear()
        for member in self.members:
            if member.sent and member.state == "up":
                member.live.abort(list(member.sent))  # an earlier loop has left them, so nobody listens any more
            member.clear(asyncio.get_running_loop().time())
            if member.state == "up":
                self._listen(member)
            elif member.state == "starting":
                self.spawn(self._revive(member))
        self.spawn(self._watch())

    async def close(self) -> None:
        """Stop every replica, also those that start right now, and free what they shared."""
        self._closed = True
        loop = asyncio.get_running_loop()
        slow = loop.call_later(TELL_AFTER, self._tell_who_is_left)
        try:
            tasks = [task for task in self._tasks if not task.done()]
            mine = [task for task in tasks if task.get_loop() is loop]
            for task in tasks:
                if task in mine:
                    task.cancel()
                else:  # of the loop that the crew belonged to, which may still run or be about to
                    with suppress(RuntimeError):  # it is closed
                        task.get_loop().call_soon_threadsafe(task.cancel)
            await asyncio.gather(*mine, return_exceptions=True)
            await self._stop_all()
            await asyncio.to_thread(self._placement.close)
        finally:
            slow.cancel()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something until it is done or the crew is closed."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _stop_all(self) -> None:
        await asyncio.gather(*(self._stop(member) for member in self.members))

    async def _stop(self, member: Member) -> None:
        """End a member's present life; an engine that cannot even be closed keeps nobody from going on."""
        if (replica := member.replica) is None:
            return
        try:
            async with asyncio.timeout(self.times.order):
                await replica.stop()
        except Exception as error:
            logger.warning("%s did not close, and is left behind: %s", member.name, _said(error))
        if member.replica is replica:
            member.replica = None

    def _tell_who_is_left(self) -> None:
        left = [member.name for member in self.members if member.replica is not None]
        logger.warning("still closing: waiting for %s", ", ".join(left) if left else "what the replicas shared")

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
        for tries_left in (1, 0):
            await self._until(lambda: bool(self.up) or self.asleep or self.fallen is not None)
            try:
                return await self._update(weights, version)
            except ReplicaLost as error:
                if not tries_left or self.fallen is not None:
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
            number = self.version + 1 if version is None else version
            names = frozenset(weights) if isinstance(weights, Mapping) else None
            shared = await asyncio.to_thread(self._placement.share, weights)
            if not self.paused:
                await self._order("pause")
            try:
                asked = self.up
                if not asked and not self.asleep:
                    raise ReplicaLost("no replica took the weights, so nothing has changed: all were lost meanwhile")
                failed = await self._on_each(lambda replica: replica.update_weights(shared, number), self.times.update)
                if failed and set(failed) >= set(asked):
                    lost = all(isinstance(error, ReplicaLost) for error in failed.values())
                    kind = ReplicaLost if lost else EngineError
                    raise kind(f"no replica took the weights, so nothing has changed: {_first(failed)}")
                self._weights = [*_still_wanted(self._weights, names), (names, shared, number)]
                self._updates += 1
                self.version = number
                for member, error in failed.items():
                    self.lose(member, member.replica, f"could not load weights that others could: {_said(error)}")
            finally:
                if not self.paused:
                    await self._order("resume")
            return number

    async def _order(self, order: Order) -> None:
        asked = self.up
        failed = await self._on_each(lambda replica: replica.order(order), self.times.order)
        for member, error in failed.items():
            self.lose(member, member.replica, f"could not {order}: {_said(error)}")
        if failed and set(failed) >= set(asked) and self.fallen is not None:
            raise EngineError(f"no replica could {order}: {_first(failed)}")  # else those that come back are told
        now = asyncio.get_running_loop().time()
        for member in self.up:
            member.heard = now

    async def _on_each(
        self, ask: Callable[[Replica], Coroutine[Any, Any, None]], seconds: float
    ) -> dict[Member, Exception]:
        """Ask all replicas that are up at once; return the errors of those that failed.

        One of which it is not known what it did (gone, no answer in time, an error of no engine) is lost right here.
        """
        lives = [(member, member.live) for member in self.up]

        async def one(replica: Replica) -> None:
            async with asyncio.timeout(seconds):
                await ask(replica)

        results = await asyncio.gather(*(one(replica) for _, replica in lives), return_exceptions=True)
        failed: dict[Member, Exception] = {}
        for (member, replica), result in zip(lives, results, strict=True):
            if isinstance(result, TimeoutError):
                result = ReplicaLost(f"no answer within {seconds:g} s")
            if isinstance(result, Exception):
                failed[member] = result
                if isinstance(result, ReplicaLost) or not isinstance(result, EngineError):
                    self.lose(member, replica, _said(result))
        return failed

    # -- losses ---------------------------------------------------------------------------------------------------

    def lose(self, member: Member, replica: Replica | None, why: str) -> None:
        """Give one life of a member up, if it has not been yet, and start another."""
        if member.replica is not replica or member.state != "up" or self._closed:
            return
        logger.warning("%s is lost: %s; %d request(s) go on elsewhere", member.name, why, len(member.sent))
        member.leave(why)
        self.spawn(self._revive(member))
        if self.up:
            self._looks += 1
            self.spawn(self._look_at_others())
        self._owner.lost(member, why)

    async def _look_at_others(self) -> None:
        """Find those that went at the same moment: requests would go from one to the next, and be tried in vain."""

        async def look(member: Member, replica: Replica) -> None:
            try:
                async with asyncio.timeout(LOOK):
                    await replica.ping()
            except TimeoutError:
                pass  # it may be busy; the watch has more patience
            except Exception as error:
                self.lose(member, replica, _said(error))

        try:
            await asyncio.gather(*(look(member, member.live) for member in self.up))
        finally:
            self._looks -= 1
            self._owner.joined()

    async def _open(self, member: Member) -> EngineFacts:
        """Start a new replica in a member's place."""
        replica = member.replica = self._placement.replica(member.name)
        try:
            async with asyncio.timeout(self.times.start):
                return await replica.start()
        except TimeoutError:
            advice = self._placement.advice()
            raise EngineError(f"{member.name} did not start within {self.times.start:g} s; {advice}") from None

    async def _revive(self, member: Member) -> None:
        """Start a lost member again, a bounded number of times, the later the more often it was lost."""
        while True:
            await self._stop(member)
            if member.losses > self._restarts:
                break
            await self._until(lambda: not self.asleep)  # its memory is somebody else's until then
            await asyncio.sleep(self.times.backoff * 2 ** max(0, member.losses - 1))
            try:
                await self._open(member)
                await self._join(member)
            except Exception as error:
                member.losses += 1
                member.cause = _said(error)
                logger.warning("%s could not be started again: %s", member.name, member.cause)
            else:
                logger.info("%s is up again, with weights of version %d", member.name, self.version)
                self._news.set()
                self._owner.joined()
                return
        member.state = "dead"
        self._news.set()
        logger.error("%s was lost %d times in a row and stays away: %s", member.name, member.losses, member.cause)
        if self.fallen is not None:
            self._owner.ended(self.fallen)

    async def _join(self, member: Member) -> None:
        """Bring a new replica to where the others are, and let it take part."""
        while True:
            updates = self._updates
            async with asyncio.timeout(self.times.update):
                for _, shared, version in self._weights:
                    await member.live.update_weights(shared, version)
            async with self._change:
                if updates != self._updates:
                    continue  # there are newer weights by now
                async with asyncio.timeout(self.times.order):
                    if self.paused:
                        await member.live.order("pause")
                    if self.asleep:
                        await member.live.order("sleep")
                member.clear(asyncio.get_running_loop().time())
                member.state = "up"
                self._listen(member)
                return

    def _listen(self, member: Member) -> None:
        member.listener = self.spawn(self._hear(member, member.live))

    async def _hear(self, member: Member, replica: Replica) -> None:
        """Hear one life of a member to its end."""
        while member.replica is replica and member.state == "up":
            try:
                flush = await replica.flush()
            except Exception as error:
                self.lose(member, replica, _said(error))
                return
            self._owner.heard(member, flush)

    async def _watch(self) -> None:
        """Ping every replica now and then, and mind those that have work and say nothing."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.times.ping_every)
            failed = await self._on_each(lambda replica: replica.ping(), self.times.ping)
            for member, error in failed.items():
                self.lose(member, member.replica, f"it does not answer: {_said(error)}")
            for member in self.up:
                silent = loop.time() - member.heard
                if member.sent and not self.paused and not self.asleep and silent > self.times.silence:
                    why = f"it has {len(member.sent)} request(s) and said nothing for {silent:.0f} s"
                    self.lose(member, member.replica, why)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


def _first(failed: Mapping[Member, Exception]) -> str:
    member, error = next(iter(failed.items()))
    return f"{member.name}: {_said(error)}"


async def _all_or_first_error(starts: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; as soon as one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _still_wanted(
    before: list[tuple[frozenset[str] | None, Any, int]], names: frozenset[str] | None
) -> list[tuple[frozenset[str] | None, Any, int]]:
    """Return the earlier updates of which something is left under new tensors of these names (``None``: a folder)."""
    if names is None:
        return []
    return [update for update in before if update[0] is None or not update[0] <= names]
