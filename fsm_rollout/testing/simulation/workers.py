"""Rollout workers in the simulated run's own process and time.

Invariant: such a worker shares nothing with the run but its link, over which everything travels as bytes; killed, it
says nothing more, whatever it was at. So what holds for these holds for workers that are processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.scheduler.remote_client import remote_clients
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.worker import HandedTrajectories, Worker, WorkerSetup
from fsm_rollout.scheduler.worker_link import PairedLink
from fsm_rollout.scheduler.worker_pool import Connection, WorkerPool


class PairedWorkers:
    """Starts workers beside the run. ``prepare`` is called with the agents of each."""

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

    async def gone(self) -> None:
        """Wait until all of them have ended."""
        await asyncio.gather(*self._lives)


async def close_workers(pool: WorkerPool, workers: PairedWorkers) -> None:
    """Dismiss the workers, and wait for what they close."""
    await pool.aclose()
    await workers.gone()
