"""Rollout workers in the run's own process and time, for whole runs too: what holds for them holds for processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.scheduler.remote_client import remote_clients
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.scheduler.worker import HandedTrajectories, Worker, WorkerSetup
from fsm_rollout.scheduler.worker_link import PairedLink
from fsm_rollout.scheduler.worker_pool import Connection, WorkerPool
from fsm_rollout.testing.simulation.simulate import Around


class PairedWorkers:
    """Starts rollout workers in the run's own process and time; ``prepare`` is called with the agents of each.

    Such a worker shares nothing with the run but its link, over which everything travels as bytes; killed, it says
    nothing more, whatever it was at. So what holds for these holds for workers that are processes.
    """

    def __init__(
        self,
        prepare: Callable[[RunAgents], object] = lambda agents: None,
        chats: Mapping[str, dict[object, ChatTemplate]] | None = None,
    ) -> None:
        self._prepare = prepare
        self._chats = chats or {}
        self._lives: set[asyncio.Task[None]] = set()

    async def connect(self, setup: WorkerSetup) -> Connection:
        """Start one; see :data:`fsm_rollout.scheduler.worker_pool.Connect`."""
        ours, theirs = PairedLink.pair()
        clients = remote_clients(setup.engines, theirs)
        for name, client in clients.items():
            client.chats = self._chats.get(name, client.chats)
        trajectories = HandedTrajectories(setup, theirs, clients)
        self._prepare(trajectories.agents)
        worker = Worker(theirs, trajectories)

        async def live() -> None:
            await worker.gone.wait()
            await trajectories.aclose()
            theirs.close()

        task = asyncio.get_running_loop().create_task(live())
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)

        def kill() -> None:
            if theirs.open:
                theirs.open = False
                worker.gone.set()
                asyncio.get_running_loop().call_soon(ours.cut)

        return Connection(ours, kill)

    async def close(self, pool: WorkerPool) -> None:
        """Dismiss the workers of a pool, and wait for what they close."""
        await pool.aclose()
        await asyncio.gather(*self._lives)


def sharing(workers: int, kills: Sequence[float] = ()) -> Around | None:
    """Share a simulated run among so many workers, one of which is killed at each of some moments, in turn.

    With 1 that nobody kills, the run's own process does all.
    """

    @asynccontextmanager
    async def around(scheduler: Scheduler, simulated: Callable[[RunAgents], None]) -> AsyncIterator[None]:
        paired = PairedWorkers(simulated, {name: client.chats for name, client in scheduler.clients.items()})
        pool, loop = WorkerPool(scheduler, workers, paired.connect), asyncio.get_running_loop()
        timers = [loop.call_later(at, pool.kill, number) for number, at in enumerate(sorted(kills))]
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
            await paired.close(pool)

    return around if workers > 1 or kills else None
