"""The orders that all replicas of a pool follow.

Invariant: an order is a hold, new weights, or a release. One lock serves them all, and only the first reason to hold
and the last to release reach the engines. An engine without the plane that an order is for is left alone: its owner
cares for it. A replica that could not follow an order, so that nobody knows its state, is lost.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Literal

from fsm_rollout.concurrency.durations import Durations
from fsm_rollout.concurrency.tasks import Tasks
from fsm_rollout.engines.protocol import HalfLoaded, ReplicaLost, Sleeper, TokenSource, WeightSink
from fsm_rollout.engines.replica import Placement, PoolTimes, Replica, RequestHolder, describe, failure_of
from fsm_rollout.errors import EngineError

Order = Literal["pause", "resume", "sleep", "wake"]


class Orders(ABC):
    """See the module; :class:`~fsm_rollout.engines.replicas.Replicas` are what follows them.

    Args:
        placement: where the replicas live.
        times: seconds that are waited.
        holder: who has the requests.
    """

    def __init__(self, placement: Placement, times: PoolTimes, holder: RequestHolder) -> None:
        self.placement, self.times = placement, times
        self.up: list[Replica] = []  # those that take part; a new list whenever that changes
        self.held: set[str] = set()  # why nothing is sampled; empty: it is
        self.fallen: EngineError | None = None  # the error when no replica will ever come back
        # How long updates of weights took, by phase: "check" goes before, "paused" is the others together.
        self.update_times: defaultdict[str, Durations] = defaultdict(Durations)
        self._holder = holder
        self._asleep = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks = Tasks()
        # Of the present loop: the lock of all orders, and what is set whenever a replica comes or goes, or all wake.
        self._change: asyncio.Lock
        self._news: asyncio.Event

    @abstractmethod
    def lose(
        self, replica: Replica, engine: TokenSource | None, why: str, *, on_trial: bool = False, half: bool = False
    ) -> None:
        """Give one life of a replica up, if it has not been yet."""

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

    async def settle(self, replica: Replica, look: Callable[[TokenSource], Awaitable[None]]) -> None:
        """Look whether a replica is well, lose it if it is not, and return when it is up, or gone for good."""

        async def looked() -> None:
            if replica.state == "up":
                try:
                    async with asyncio.timeout(self.times.order):
                        await look(replica.live)
                except Exception as error:  # whatever an engine raises is the engine's failure
                    self.lose(replica, replica.engine, describe(error))

        await self._to_its_end(looked())
        await self._until(lambda: replica.state != "starting")

    async def _to_its_end(self, order: Coroutine[object, object, None]) -> None:
        """Give an order after those before it; one that its caller gives up half-way would leave engines held."""

        async def give() -> None:
            async with self._change:
                await order

        await asyncio.shield(self._tasks.begin(give()))

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
            raise EngineError(f"no replica could {order}: {first_of(failed)}")
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

    def look_again(self) -> None:
        """Have whoever waits for something of the replicas look whether it has come."""
        self._news.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._news.clear()
            await self._news.wait()


def first_of(failed: Mapping[Replica, Exception]) -> str:
    """Return the first of some errors, and whose it is."""
    replica, error = next(iter(failed.items()))
    return f"{replica.name}: {describe(error)}"
