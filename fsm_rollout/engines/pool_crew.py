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
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fsm_rollout.engines.packing import Flush
from fsm_rollout.engines.pool_members import Member, PoolTimes
from fsm_rollout.engines.replicas import EngineFacts, Order, Placement, Replica, ReplicaLost
from fsm_rollout.errors import EngineError

if TYPE_CHECKING:
    from fsm_rollout.engines.replicas import Weights

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Owner(Protocol):
    """Whose requests the replicas serve."""

    def heard(self, member: Member, flush: Flush) -> None:
        """Take what a replica has to tell."""

    def lost(self, member: Member, why: str) -> None:
        """Take back what a replica had; it is not up any more."""

    def joined(self) -> None:
        """Make use of a replica that has come back."""

    def ended(self, error: EngineError) -> None:
        """Give up: all replicas are lost for good."""


class Crew:
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
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def up(self) -> list[Member]:
        """Those that take part."""
        return [member for member in self.members if member.state == "up"]

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
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stop_all()
        self._placement.close()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something until it is done or the crew is closed."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _stop_all(self) -> None:
        await asyncio.gather(*(member.replica.stop() for member in self.members if member.replica is not None))

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
            await self._order(order)

    async def update(self, weights: Weights, version: int | None) -> int:
        """Pause all, load the weights everywhere, go on; return the version.

        Raises:
            EngineError: no replica took them; those that are still there go on with what they had.
        """
        async with self._change:
            number = self.version + 1 if version is None else version
            names = frozenset(weights) if isinstance(weights, Mapping) else None
            shared = await asyncio.to_thread(self._placement.share, weights)
            asked = self.up
            if not self.paused:
                await self._order("pause")
            try:
                failed = await self._on_each(lambda replica: replica.update_weights(shared, number), self.times.update)
                if failed and set(failed) >= set(asked):
                    raise EngineError(f"no replica took the weights, so nothing has changed: {_first(failed)}")
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
        self._owner.lost(member, why)

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
            if member.replica is not None:
                await member.replica.stop()
            if member.losses > self._restarts:
                break
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
                self._owner.joined()
                return
        member.state = "dead"
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
