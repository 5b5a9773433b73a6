"""Shards in the driver's own process and time, for whole runs: what holds for them holds for processes.

Invariant: driver, leases, links and shards are those of a run with ``workers``; only where a shard lives is another
matter. Each has a scheduler of its own, and shares nothing with the others but the engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.concurrency.tasks import Tasks
from fsm_rollout.engines.protocol import Weights, WeightSource
from fsm_rollout.jobs.shard import Shard
from fsm_rollout.scheduler.link import PairedLink
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.scheduler.shard_placement import Started
from fsm_rollout.scheduler.shards import Shards
from fsm_rollout.trajectory.journal import Journal


class PairedRollout:
    """What a shard needs of a rollout, around a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.engines = {POLICY: scheduler.clients[POLICY].pool}
        self.clients, self.state_names = scheduler.clients, ()

    def _listens_to(self, scheduler: Scheduler, **of_driver: Any) -> None:
        return None

    @property
    def journal(self) -> Journal | None:
        """That of the scheduler."""
        return self.scheduler.recorder.journal

    def engine_stats(self) -> dict[str, dict[str, int]]:
        """Return nothing: who simulates asks the engines themselves."""
        return {}

    async def aupdate_weights(self, weights: Weights | WeightSource, version: int | None = None) -> int:
        """Load new policy weights, and return their version."""
        return await self.scheduler.update_weights(weights, version)

    async def aclose(self) -> None:
        """Give up what is carried; the engines are those of whoever made them."""
        await self.scheduler.drop_carried()


class PairedShards(Shards):
    """Shards on one event loop.

    One that is killed says nothing more, whatever it was at; what its journal has by then is all that is left of it.

    Args:
        number: how many there are.
        make: makes the scheduler of one, given whether it lives.
    """

    def __init__(self, number: int, make: Callable[[Callable[[], bool]], Scheduler]) -> None:
        self._make = make
        self.paired: list[Shard] = []
        self._lives = Tasks()
        super().__init__(number, self._connect, lambda place: b"")

    @property
    def schedulers(self) -> list[Scheduler]:
        """Those of all that were ever started."""
        return [shard.rollout.scheduler for shard in self.paired]

    async def aclose(self) -> None:
        """Dismiss all, and see them end."""
        await super().aclose()
        await asyncio.gather(*self._lives)

    async def _start_aside(self, place: int) -> tuple[int, int, Started]:
        return self._started(place)

    def _connect(self, setup: bytes) -> Started:
        ours, theirs = PairedLink.pair()
        scheduler = self._make(lambda: theirs.open)
        shard = Shard(theirs, PairedRollout(scheduler), self.count)  # type: ignore[arg-type]
        self.paired.append(shard)

        async def live() -> None:
            await shard.gone.wait()
            await shard.aclose()
            theirs.close()

        def kill() -> None:
            if theirs.open:
                if (journal := scheduler.recorder.journal) is not None:
                    journal.persist()
                    scheduler.recorder.journal = None
                    journal.close()
                theirs.open = False
                shard.gone.set()
                with suppress(RuntimeError):
                    asyncio.get_running_loop().call_soon(ours.cut)

        return _PairedStart({}, ours, kill, live=live, lives=self._lives)


class _PairedStart(Started):
    """A shard that begins to live on the driver's own event loop."""

    def __init__(self, *of: Any, live: Callable[[], Coroutine[Any, Any, None]], lives: Tasks) -> None:
        super().__init__(*of)
        self._live, self._lives = live, lives

    async def attach(self) -> None:
        """Begin to live."""
        self._lives.begin(self._live())

    def end(self) -> None:
        """End at once."""
        self.kill()
