"""Shards in the driver's own process and time, for whole runs too: what holds for them holds for processes."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.jobs.shard import Shard
from fsm_rollout.scheduler.leased_scheduler import LeasedScheduler
from fsm_rollout.scheduler.link import PairedLink
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.scheduler.shard_placement import Started
from fsm_rollout.scheduler.shards import Shards
from fsm_rollout.testing.simulation.simulate import Around
from fsm_rollout.testing.simulation.stand_ins import OneEngine
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.trajectory import Trajectory


class PairedRollout:
    """What a shard needs of a rollout, around a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.engines = {POLICY: scheduler.clients[POLICY].pool}
        self.clients, self.state_names = scheduler.clients, ()

    def _listens_to(self, scheduler: Scheduler, **of_driver: Any) -> None:
        return None

    @property
    def journal(self) -> Any:
        return self.scheduler.recorder.journal

    def engine_stats(self) -> dict[str, dict[str, int]]:
        return {}

    async def aupdate_weights(self, weights: Any, version: int | None = None) -> int:
        return await self.scheduler.update_weights(weights, version)

    async def aclose(self) -> None:
        await self.scheduler.drop_carried()


def another(of: Scheduler, heard: Counter[str], alive: Callable[[], bool]) -> Scheduler:
    """Return a scheduler like ``of``, whose listeners hear from those that are alive each event once."""
    scheduler = Scheduler(
        {name: agent.graph for name, agent in of.agents.by_name.items()},
        OneEngine(of.clients[POLICY].pool, chats=of.clients[POLICY].chats),
        seed=of.starter.seed, concurrency=of.concurrency, sampling=of.sampling, failures=of.failures,
    )  # fmt: skip
    scheduler.scoring.reward = of.scoring.reward
    known: Counter[str] = Counter()

    def listen(trajectory: Trajectory, event: AnyEvent) -> None:
        name = trajectory.trajectory_id
        known[name] += 1
        if alive() and known[name] > heard[name]:  # else another has told it
            heard[name] += 1
            for listener in of.recorder.listeners:
                listener(trajectory, event)

    scheduler.recorder.listeners = (listen,)
    return scheduler


class PairedShards(Shards):
    """Shards on one event loop: each is a scheduler like ``of``, and shares nothing with the others but the engine.

    One that is killed says nothing more, whatever it was at; what its journal has by then is all that is left of it.
    """

    def __init__(self, of: Scheduler, count: int, prepare: Callable[[RunAgents], object]) -> None:
        self._of, self._prepare = of, prepare
        self._heard = Counter[str]()
        self.paired: list[Shard] = []
        self.lives: set[asyncio.Task[None]] = set()
        super().__init__(count, self._connect, lambda place: b"")

    async def _start_aside(self, place: int) -> tuple[int, int, Started]:
        return self._started(place)

    def _connect(self, setup: bytes) -> Started:
        ours, theirs = PairedLink.pair()
        scheduler = another(self._of, self._heard, lambda: theirs.open)
        self._prepare(scheduler.agents)
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

        return PairedStart({}, ours, kill, live=live, lives=self.lives)


class PairedStart(Started):
    """A shard that begins to live on the driver's own event loop."""

    def __init__(self, *of: Any, live: Callable[[], Coroutine[Any, Any, None]], lives: set[asyncio.Task[None]]) -> None:
        super().__init__(*of)
        self._live, self._lives = live, lives

    async def attach(self) -> None:
        task = asyncio.get_running_loop().create_task(self._live())
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)

    def end(self) -> None:
        self.kill()


def sharing(workers: int, kills: Sequence[float] = ()) -> Around | None:
    """Share a simulated run among so many shards, one of which is killed at each of some moments, in turn.

    With 1 that nobody kills, the run's own process does all.
    """

    @asynccontextmanager
    async def around(scheduler: Scheduler, simulated: Callable[[RunAgents], None]) -> AsyncIterator[None]:
        shards, loop = PairedShards(scheduler, workers, simulated), asyncio.get_running_loop()
        leased = LeasedScheduler(shards, concurrency=scheduler.concurrency, failures=scheduler.failures)
        leased.histories = True
        outer: Any = scheduler
        outer.run = leased.run
        schedulers = [shard.rollout.scheduler for shard in shards.paired]
        outer.cancel = lambda name: [each.cancel(name) for each in schedulers]
        outer.suspend = lambda name, why: [each.suspend(name, why) for each in schedulers]
        outer.stop = lambda: [each.stop() for each in schedulers]
        timers = [loop.call_later(at, shards.kill, number) for number, at in enumerate(sorted(kills))]
        with tempfile.TemporaryDirectory() as folder:
            if kills:
                await shards.keep_journals(Path(folder) / "journal.sqlite", "run")
            try:
                yield
            finally:
                for timer in timers:
                    timer.cancel()
                await shards.aclose()
                await asyncio.gather(*shards.lives)

    return around if workers > 1 or kills else None
