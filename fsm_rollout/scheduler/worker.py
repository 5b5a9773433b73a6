"""A rollout worker: runs trajectories of a run in a process of its own, on the run's engines.

Invariant: a worker decides nothing about groups, targets, weights or engines. It is handed a trajectory as it stands,
visits its states as any scheduler does, and tells each event as it happens; the run applies and keeps them. What a
worker has not told is not done: a trajectory whose worker died goes on elsewhere from its last event that was told.
Requests go to the engines of the run, which are shared by all workers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsm_rollout.agent.graph import POLICY, AgentGraph
from fsm_rollout.concurrency.garbage_collection import calm_collection
from fsm_rollout.concurrency.steady_loop import SteadyLoop
from fsm_rollout.engines.client import Client
from fsm_rollout.errors import GlueMismatchError
from fsm_rollout.model.folders import plain_tokenizers
from fsm_rollout.names.objects import look_in
from fsm_rollout.scheduler.failure_policy import Failures
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.remote_client import EngineState, RemoteClient, remote_clients
from fsm_rollout.scheduler.run_agents import RunAgents, RunnableAgent
from fsm_rollout.scheduler.trajectory_runner import TrajectoryStarter, run_trajectory
from fsm_rollout.scheduler.worker_link import Link, SocketLink
from fsm_rollout.states.active_trajectory import ActiveTrajectory, Stop
from fsm_rollout.tools.tool_messages import clean
from fsm_rollout.trajectory.event_bytes import encode, pictures_in
from fsm_rollout.trajectory.events import AnyEvent, PromptExtended
from fsm_rollout.trajectory.picture_memory import PictureMemory
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trace_ids import RunNow
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Everything that a worker is made of."""

    agents: Mapping[str, AgentGraph]
    engines: Mapping[str, EngineState]
    sampling: Sampling
    validate: bool
    failures: Failures
    concurrency: int = 1024  # how many trajectories may run in it at a time
    count: int = 1  # how many workers there are: they share the slots of a tool with `concurrency`
    folders: Sequence[str] = ()  # where `module:name` is looked for too
    log_level: int = logging.WARNING
    now: float = 0.0  # what the run's clock said when this was sent
    remote: bool = False  # whether the worker may be on another machine, and sets its clock by the run's


class HandedTrajectories(TrajectoryStarter):
    """The trajectories that a worker is handed: it runs them and tells what happens."""

    def __init__(self, setup: WorkerSetup, link: Link, clients: Mapping[str, Client]) -> None:
        agents = RunAgents(setup.agents, clients, setup.sampling, setup.failures)
        policy = clients[POLICY]
        super().__init__(
            agents, self.record, self.report_mismatch, lambda: policy.weight_version, validate=setup.validate
        )
        for agent in agents.all:
            agent.toolbox.share = setup.count
        self.clients = clients
        self._link = link
        # What runs here or is kept open, sub-agents' among them, by trajectory id.
        self._lives: dict[str, ActiveTrajectory] = {}
        # The groups (as far as they are here) of samples that were set aside and may come back.
        self._kept: dict[str, Group] = {}
        # Numbers of the entries of chat templates' caches, by which the run knows them.
        self._entries: dict[object, int] = {}
        self._told: dict[str, int] = {}  # how many entries of a trajectory were told
        self._pictures = PictureMemory()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self, trajectory: Trajectory, agent: str, prompt: Prompt, n: int, children: list[Trajectory], run: RunNow
    ) -> None:
        """Run a trajectory from where it stands; one that is kept here finds its tools as they were."""
        trajectory_id, self.run = trajectory.trajectory_id, run
        group = self._kept.pop(trajectory_id, None)
        if group is None:
            group = Group(trajectory.group_id, 0, prompt, self.agents.by_name[agent], n)
            live = self.activate(group, trajectory)
        else:
            live = self._lives[trajectory_id]
            live.trajectory, live.stop, live.run = trajectory, None, run
        group.trajectories = [trajectory]
        group.children.clear()
        for child in children:
            group.add_child(child)
            if (kept := self._lives.get(child.trajectory_id)) is not None:
                kept.trajectory = child
        task = asyncio.get_running_loop().create_task(self._run_one(group, live))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_one(self, group: Group, live: ActiveTrajectory) -> None:
        trajectory_id = live.trajectory.trajectory_id
        live.task, failure = asyncio.current_task(), None
        try:
            await run_trajectory(live, group.agent.handlers)
        except asyncio.CancelledError:
            pass  # it was stopped, and has told its end
        except Exception as error:  # what must not happen fails the run, as it does in one process
            failure = clean(f"{type(error).__name__}: {error}")
            logger.exception("running %s failed", trajectory_id)
        live.task = None
        if live.stays_open and failure is None:
            self._kept[trajectory_id] = group
        else:
            self._forget(group)
        self._link.send("over", trajectory_id, trajectory_id in self._kept, failure)

    def _forget(self, group: Group) -> None:
        """Forget a sample, and the sub-agents' trajectories that served it."""
        for trajectory in group.all:
            self._lives.pop(trajectory.trajectory_id, None)
            self._told.pop(trajectory.trajectory_id, None)

    def stop_one(self, trajectory_id: str, stop: Stop | None) -> None:
        """Have a trajectory stopped; a second time it is cancelled again, since its handler may ignore the first."""
        live = self._lives.get(trajectory_id)
        if live is not None and live.task is not None:
            live.stop = live.stop or stop
            live.task.cancel()

    async def drop(self, trajectory_id: str) -> None:
        """Close what a sample that was set aside has kept open."""
        group = self._kept.pop(trajectory_id, None)
        if group is not None:
            live = self._lives[trajectory_id]
            self._forget(group)
            await live.close()

    async def aclose(self) -> None:
        """End what runs, and close what is kept open."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self.drop(trajectory_id) for trajectory_id in list(self._kept)))
        for client in self.clients.values():
            await client.drain()
        await self.agents.close_tools()

    def activate(
        self,
        group: Group,
        trajectory: Trajectory,
        agent: RunnableAgent | None = None,
        caller: ActiveTrajectory | None = None,
    ) -> ActiveTrajectory:
        """Return what runs a trajectory, and remember it."""
        live = super().activate(group, trajectory, agent, caller)
        self._lives[trajectory.trajectory_id] = live
        return live

    def record(self, trajectory: Trajectory, event: AnyEvent, payload: bytes | None = None) -> None:
        """Tell an event; with glue also the cache entries that the trajectory's glue came from, if there are more."""
        trajectory_id, entries = trajectory.trajectory_id, None
        if isinstance(event, PromptExtended):
            used = self._lives[trajectory_id].glue_entries
            if len(used) != self._told.get(trajectory_id, 0):
                self._told[trajectory_id] = len(used)
                entries = [self._entries.setdefault(entry, len(self._entries)) for entry in used]
        payload = encode(event) if payload is None else payload
        for picture in pictures_in(payload):
            self._link.send("picture", self._pictures.plain(picture))
        self._link.send("event", trajectory_id, payload, entries)

    def report_mismatch(self, mismatch: GlueMismatchError) -> None:
        """Leave it to the run, which knows who else has such tokens."""
        entry = self._entries.setdefault(mismatch.entry, len(self._entries))
        self._link.send("mismatch", entry, clean(str(mismatch).removeprefix("[glue-mismatch] ")))


class Worker:
    """What answers a run's messages on one link."""

    def __init__(self, link: Link, trajectories: HandedTrajectories) -> None:
        self.trajectories = trajectories
        self.gone = asyncio.Event()  # set when the run is over, or nobody is there any more
        self._tasks: set[asyncio.Task[None]] = set()
        link.receive, link.lost = self._receive, self.gone.set
        link.send("ready")

    def _client(self, name: str) -> RemoteClient:
        client = self.trajectories.clients[name]
        assert isinstance(client, RemoteClient)
        return client

    def _receive(self, kind: str, *parts: Any) -> None:
        match kind:
            case "start":
                self.trajectories.start(*parts)
            case "stop":
                self.trajectories.stop_one(*parts)
            case "drop":
                task = asyncio.get_running_loop().create_task(self.trajectories.drop(*parts))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "time":
                name, number, held = parts
                self._client(name).keep_time(number, held)
            case "ended":
                name, endings = parts
                for number, ending in endings:
                    self._client(name).end_request(number, ending)
            case "bye":
                self.gone.set()


# -- the process ----------------------------------------------------------------------------------------------------


class _Loop(SteadyLoop):
    """An event loop that shows the run's time: on another machine the clocks differ."""

    _ahead = 0.0

    def __init__(self, now: float) -> None:
        super().__init__()
        self._ahead = now - self.time()

    def time(self) -> float:
        return super().time() + self._ahead


class _LogSender(logging.Handler):
    """Tells the run what is logged here."""

    def __init__(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._link, self._loop = link, loop

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = clean(self.format(record))
            self._loop.call_soon_threadsafe(self._link.send, "log", record.name, record.levelno, text)
        except RuntimeError:  # the loop is closed
            self.handleError(record)


def serve(connection: socket.socket) -> None:
    """Be a worker on a connection, the first block on which is the setup, until the run is over."""
    path = pickle.loads(_block(connection))  # where modules are, by which the rest can be read
    sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry)]
    plain_tokenizers()  # of which the setup has one
    setup: WorkerSetup = pickle.loads(_block(connection))
    loop = _Loop(setup.now) if setup.remote else SteadyLoop()
    try:
        loop.run_until_complete(_serve(connection, setup))
    finally:
        loop.close()


def _block(connection: socket.socket) -> bytes:
    """Read one block, and nothing behind it."""
    size, block = 0, bytearray()
    while len(block) < (size or 8):
        received = connection.recv(min((size or 8) - len(block), 2**20))
        if not received:
            raise EOFError("the run ended before it sent its setup")
        block += received
        if not size and len(block) == 8:
            size, block = int.from_bytes(block, "little"), bytearray()
    return bytes(block)


async def _serve(connection: socket.socket, setup: WorkerSetup) -> None:
    loop = asyncio.get_running_loop()
    for folder in setup.folders:
        look_in(folder)
    _, link = await loop.create_connection(partial(SocketLink, worker=True), sock=connection)
    package = logging.getLogger("fsm_rollout")
    package.setLevel(setup.log_level)
    package.addHandler(_LogSender(link, loop))
    package.propagate = False
    try:
        trajectories = HandedTrajectories(setup, link, remote_clients(setup.engines, link))
        await trajectories.agents.prepare_tools()
    except Exception as error:  # the user's code, imported here
        link.send("failed", clean(f"{type(error).__name__}: {error}"))
        link.close()
        return
    worker = Worker(link, trajectories)
    with calm_collection(setup.concurrency):
        await worker.gone.wait()
    await trajectories.aclose()
    link.close()


def main(descriptor: int) -> None:
    """Be a worker process of the run at the other end of the socket."""
    serve(socket.socket(fileno=descriptor))
