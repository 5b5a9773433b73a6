"""A training service in a test's own process, at a loopback address, for rollouts that a test makes itself."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from copy import copy
from itertools import count
from pathlib import Path
from typing import Any, cast

from aiohttp import web

import fsm_rollout as fr
from fsm_rollout.agent.graph import POLICY
from fsm_rollout.jobs.run_config import ServeConfig
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.serve.training import TrainingService
from fsm_rollout.states.external.responding import listening_at
from fsm_rollout.testing.simulation.simulate import Around
from fsm_rollout.trajectory.journal import JOURNAL
from tests.paired_shards import another


@contextmanager
def serving(rollout: fr.Rollout, folder: Path, keys: frozenset[str] = frozenset(), **serve: object) -> Iterator[str]:
    """Serve a rollout, whose journal is in a folder, on an event loop of its own; yields the address."""
    ready: list[str] = []
    begun, enough = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve_it() -> None:
        journal = folder / JOURNAL
        rollout.journal = fr.Journal(journal, rollout.description, append=journal.exists())
        service = TrainingService(rollout, folder, ServeConfig(**{"port": 0} | serve), keys)  # type: ignore[arg-type]
        try:
            async with service.listening() as url:
                ready.append(url)
                begun.set()
                await enough.wait()
        finally:
            begun.set()
            await service.aclose()
            await rollout.aclose()
            rollout.journal.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve_it())

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(enough.set)
        thread.join()


IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # what nobody is to have after this process


def served(kept: int, moments: Sequence[float] = ()) -> Around:
    """Have a service run a simulated run, and a client of it on the same loop ask for it over HTTP, in virtual time.

    What the laws look at is what the client has; events, and the engines' log, are the service's. One answer is lost
    after each ``kept`` of them. At each of some moments the service is killed, and started again.
    """

    @asynccontextmanager
    async def around(scheduler: Scheduler, simulated: Callable[[RunAgents], None]) -> AsyncIterator[None]:
        outer, loop, pool = cast(Any, scheduler), asyncio.get_running_loop(), scheduler.clients[POLICY].pool
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            service = Mortal(scheduler, simulated, Path(folder), kept)
            await service.begin()
            client = await asyncio.to_thread(fr.RemoteRollout, service.url)

            async def updates(_: object) -> None:
                version = await client.aupdate_weights("newer")
                assert version <= pool.weight_version, "the trainer has another version"

            outer.run = lambda prompts, n, resume: client.stream(prompts, n, resume=resume)
            outer.update_weights = updates
            outer.cancel = lambda name: loop.create_task(client.acancel(name))
            outer.suspend = lambda name, why: service.scheduler.suspend(name, why)
            outer.stop = lambda: service.scheduler.stop()
            deaths = loop.create_task(service.killed(sorted(moments)))
            try:
                yield
            finally:
                deaths.cancel()
                await asyncio.wait({deaths})
                await client.aclose()
                await service.end()

    return around


class Mortal:
    """A service of schedulers like one, each of which gives way to the next, at the same address, when it is killed."""

    def __init__(self, of: Scheduler, simulated: Callable[[RunAgents], None], folder: Path, kept: int) -> None:
        self._of, self._simulated, self._folder, self._kept = of, simulated, folder, kept
        self._answers, self._port, pool = count(1), 0, of.clients[POLICY].pool
        agents = {name: agent.graph for name, agent in of.agents.by_name.items()}
        self._rollout = fr.Rollout(agents, pool, engines={"judge": pool})

    async def begin(self) -> None:
        """Begin a life."""
        self._life, self._lives = AsyncExitStack(), True
        self.scheduler = another(self._of, Counter(), lambda: self._lives)
        self._simulated(self.scheduler.agents)
        self._keep(self._folder)
        rollout = copy(self._rollout)
        rollout.scheduler = self.scheduler
        self._service = TrainingService(rollout, self._folder, ServeConfig(port=self._port))
        self._life.push_async_callback(self._service.aclose)
        app = self._service.app()
        app.middlewares.append(self._losing)
        self.url = await self._life.enter_async_context(listening_at(app, "127.0.0.1", self._port, 1.0))
        self._port = int(self.url.rpartition(":")[2])

    def _keep(self, folder: Path) -> None:
        """Have the journal in a folder."""
        path = folder / JOURNAL
        # What it is asked to persist, it does on the loop, and would be waited for there while its thread does so.
        self.scheduler.recorder.journal = journal = fr.Journal(path, append=path.exists(), interval=3600.0)
        self._life.push_async_callback(asyncio.to_thread, journal.close)  # which waits for a thread of its own

    @web.middleware
    async def _losing(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)  # type: ignore[no-any-return]
        finally:
            if (not self._lives or not next(self._answers) % (self._kept + 1)) and request.transport is not None:
                request.transport.abort()

    async def killed(self, moments: Sequence[float]) -> None:
        """Die at these moments: nothing more is answered, and nothing more is kept where the next one looks."""
        for number, moment in enumerate(moments):
            await asyncio.sleep(moment - asyncio.get_running_loop().time())
            for _ in range(5):  # a connection that asyncio is just making would outlive its server
                await asyncio.sleep(0)
            self._lives = False
            cast(fr.Journal, self.scheduler.recorder.journal).persist()
            (nowhere := self._folder / f"after death {number}").mkdir()
            self._keep(nowhere)
            self._service.folder = nowhere
            await self.end()
            await self.begin()

    async def end(self) -> None:
        """End this life."""
        await self._life.aclose()
