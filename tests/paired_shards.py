"""Runs that a plan describes, shared among shards in the driver's own process and time."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.scheduler.leased_scheduler import LeasedScheduler
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.testing.simulation.paired_shards import PairedShards
from fsm_rollout.testing.simulation.simulate import Around
from fsm_rollout.testing.simulation.stand_ins import OneEngine
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.trajectory import Trajectory


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


def sharing(workers: int, kills: Sequence[float] = ()) -> Around | None:
    """Share a simulated run among so many shards, one of which is killed at each of some moments, in turn.

    With 1 that nobody kills, the run's own process does all.
    """

    @asynccontextmanager
    async def around(scheduler: Scheduler, simulated: Callable[[RunAgents], None]) -> AsyncIterator[None]:
        heard, loop = Counter[str](), asyncio.get_running_loop()

        def make(alive: Callable[[], bool]) -> Scheduler:
            shared = another(scheduler, heard, alive)
            simulated(shared.agents)
            return shared

        shards = PairedShards(workers, make)
        leased = LeasedScheduler(shards, concurrency=scheduler.concurrency, failures=scheduler.failures)
        leased.histories = True
        outer: Any = scheduler
        outer.run = leased.run
        schedulers = shards.schedulers
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

    return around if workers > 1 or kills else None
