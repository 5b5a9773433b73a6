"""The workers of a run: which of them runs which trajectory, and what becomes of one that dies.

Invariant: the run's own scheduler keeps groups, targets, weights, rewards and the journal, as in one process. A
trajectory that it starts runs in a worker; every event comes back and is applied and recorded here, in order, so what
is here is all there is to know. When a worker dies, each of its trajectories goes on in another from its last event,
as after any interruption. All workers' requests go to the one engine of each name, so its router sees every session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.wire import Contexts, unpack_requests
from fsm_rollout.errors import EngineError, GlueMismatchError
from fsm_rollout.names.objects import looked_in
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.remote_client import Ending, EngineState
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.scheduler.worker import WorkerSetup
from fsm_rollout.scheduler.worker_link import Link
from fsm_rollout.states.active_trajectory import ActiveTrajectory
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.event_bytes import decode
from fsm_rollout.trajectory.events import Generated, Prompted
from fsm_rollout.trajectory.picture_memory import PictureMemory
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

START_SECONDS = 600.0  # how long a worker may take to start: it imports what its agents name
LOG_AFTER = 2.0
CLOSE_SECONDS = 10.0  # how long workers may take to release what is open, once they are dismissed
MOST_DEATHS = 20  # so many workers may die one after the other without one trajectory coming to its end in between


@dataclass(slots=True)
class Connection:
    """A worker that was started: the link to it, and how to end it."""

    link: Link
    kill: Callable[[], None]


Connect = Callable[[WorkerSetup], Awaitable[Connection]]  # starts a worker


@dataclass(slots=True)
class _Running:
    """A sample that a worker runs."""

    group: Group
    live: ActiveTrajectory
    over: asyncio.Future[bool]  # True: it is over; False: its worker died. An exception fails the run.
    ids: list[str]  # its id and those of its sub-agents' trajectories


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    connection: Connection
    ready: asyncio.Future[None]
    running: dict[str, _Running] = field(default_factory=dict)
    # For each trajectory that runs there, sub-agents' among them, the sample that it belongs to.
    sample_of: dict[str, _Running] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)  # samples that were set aside, and whose tools are open there
    contexts: dict[str, Contexts] = field(default_factory=dict)  # what it has sent to each engine
    pictures: PictureMemory = field(default_factory=PictureMemory)  # those of its events
    # Its requests under way, by engine and number.
    requests: dict[tuple[str, int], PendingRequest] = field(default_factory=dict)
    # Those that have ended in this pass of the loop.
    ended: dict[str, list[tuple[int, Ending]]] = field(default_factory=dict)
    alive: bool = True
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # set when its link is lost

    def send(self, *message: Any) -> None:
        self.connection.link.send(*message)


class WorkerPool:
    """The workers of one scheduler, ``count`` of them, each started by ``connect`` when there is work."""

    def __init__(self, scheduler: Scheduler, count: int, connect: Connect, *, remote: bool = False) -> None:
        self.scheduler = scheduler
        self.count = count
        self._connect = connect
        self._remote = remote
        self._workers: list[_Worker] = []
        self._number = 0
        self._deaths = 0
        self._starting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._restarts: set[asyncio.Task[None]] = set()
        # The oldest weights among tokens that a worker has and has told no event of, by trajectory and context.
        self._since: dict[tuple[str, str], int] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        scheduler.samples.workers = self

    # -- the run's side ---------------------------------------------------------------------------------------------

    async def run(self, group: Group, live: ActiveTrajectory) -> None:
        """Run a trajectory in a worker, as :func:`fsm_rollout.scheduler.trajectory_runner.run_trajectory` does here."""
        trajectory = live.trajectory
        try:
            live.end_if_final()
            while not trajectory.ended and live.stop is None:
                worker = await self._worker_for(trajectory.trajectory_id)
                if await self._hand_over(worker, group, live):
                    break
                self._go_on(live)
            if live.stop is not None and trajectory.suspended is None:
                live.stop_now(live.stop)
        except asyncio.CancelledError:
            if trajectory.suspended is None:
                live.stop_cancelled()
            raise
        finally:
            if not live.stays_open:
                await live.close()

    def sampling_since(self) -> dict[tuple[str, str], int]:
        """Return, by trajectory and context, the oldest weight version among tokens of generations under way."""
        return dict(self._since)

    async def aclose(self) -> None:
        """Dismiss the workers; what they keep open is released."""
        self._closing = True
        workers = [worker for worker in self._workers if worker.alive]
        for task in self._restarts:
            task.cancel()
        for worker in workers:
            worker.send("bye")
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(*(worker.gone.wait() for worker in workers))
        for worker in workers:
            self._end(worker)
        self._workers.clear()
        self._closing = False

    async def _worker_for(self, trajectory_id: str) -> _Worker:
        """Return the worker that has kept a trajectory's tools, else the one with the least to do."""
        async with self._starting:
            await self._start_missing()
        alive = [worker for worker in self._workers if worker.alive]
        kept = next((worker for worker in alive if trajectory_id in worker.kept), None)
        return kept or min(alive, key=lambda worker: len(worker.running))

    async def _hand_over(self, worker: _Worker, group: Group, live: ActiveTrajectory) -> bool:
        """Let a worker run a trajectory; return whether that is over (else the worker died)."""
        # 1. Everything that the worker needs to know of it.
        trajectory, trajectory_id = live.trajectory, live.trajectory.trajectory_id
        name = next(name for name, agent in self.scheduler.agents.by_name.items() if agent is group.agent)
        over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        children = group.sub_agents_of(trajectory)
        running = _Running(group, live, over, [trajectory_id, *(child.trajectory_id for child in children)])
        worker.running[trajectory_id] = running
        worker.sample_of.update(dict.fromkeys(running.ids, running))
        for child in children:
            self._activate(group, child)
        worker.kept.discard(trajectory_id)
        live.on_close = None
        worker.send("start", trajectory, name, group.prompt, group.n, children, self.scheduler.starter.run)
        # 2. Until it is over. A cancellation is passed on, and its end waited for.
        cancelled: asyncio.CancelledError | None = None
        while not over.done():
            try:
                await asyncio.wait([over])
            except asyncio.CancelledError as error:
                cancelled = error
                worker.send("stop", trajectory_id, live.stop)
        del worker.running[trajectory_id]
        for id_ in running.ids:
            worker.sample_of.pop(id_, None)
            if id_ != trajectory_id:
                group.active.pop(id_, None)
        for key in [key for key in self._since if key[0] in running.ids] if self._since else ():
            del self._since[key]
        # 3. Its tools may stay open there.
        is_over = over.result()
        if trajectory_id in worker.kept:
            live.on_close = lambda: self._drop(worker, trajectory_id)
        if cancelled is not None:
            raise cancelled
        return is_over

    def _drop(self, worker: _Worker, trajectory_id: str) -> None:
        worker.kept.discard(trajectory_id)
        worker.send("drop", trajectory_id)

    def _go_on(self, live: ActiveTrajectory) -> None:
        """Let a trajectory whose worker died go on: its visit begins again, and nothing that was told is done twice."""
        now, trajectory = asyncio.get_running_loop().time(), live.trajectory
        if trajectory.ended or trajectory.suspended is not None:
            return
        version = self.scheduler.staleness.version()
        live.emit(self.scheduler.starter.run.resumed(now, now - trajectory.latest_at, version))

    # -- workers' lives ---------------------------------------------------------------------------------------------

    async def _start_missing(self) -> None:
        """Have ``count`` workers, all of them ready."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # those of a loop that has ended cannot be reached any more
            for worker in self._workers:
                worker.alive = False
                worker.connection.kill()
            self._workers, self._loop = [], loop
        self._workers = [worker for worker in self._workers if worker.alive]
        if len(self._workers) == self.count:
            return
        if self._deaths > MOST_DEATHS:
            raise EngineError(
                f"{self._deaths} rollout workers died one after the other, and no trajectory came to its end in "
                "between; see what they printed, and run with workers=1 to see it happen here"
            )
        slow = loop.call_later(LOG_AFTER, logger.info, "starting %d rollout workers", self.count - len(self._workers))
        try:
            started = await asyncio.gather(
                *(self._start() for _ in range(self.count - len(self._workers))), return_exceptions=True
            )
        finally:
            slow.cancel()
        for outcome in started:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        connection = await self._connect(self._setup())
        self._number += 1
        worker = _Worker(self._number, connection, loop.create_future())
        connection.link.receive = lambda *message: self._receive(worker, *message)
        connection.link.lost = lambda: self._lost(worker)
        try:
            async with asyncio.timeout(START_SECONDS):
                await worker.ready
        except TimeoutError:
            self._end(worker)
            raise EngineError(f"a rollout worker did not start within {START_SECONDS:g} s") from None
        except BaseException:
            self._end(worker)
            raise
        self._workers.append(worker)

    def _setup(self) -> WorkerSetup:
        scheduler = self.scheduler
        return WorkerSetup(
            agents={name: agent.graph for name, agent in scheduler.agents.by_name.items()},
            engines={
                name: EngineState(client.facts, client.weight_version) for name, client in scheduler.clients.items()
            },
            sampling=scheduler.sampling,
            validate=scheduler.validate,
            failures=scheduler.failures,
            concurrency=scheduler.concurrency,
            count=self.count,
            folders=looked_in(),
            log_level=logging.getLogger("fsm_rollout").getEffectiveLevel(),
            now=asyncio.get_running_loop().time(),
            remote=self._remote,
        )

    def kill(self, index: int) -> None:
        """Kill a worker, as a machine that fails does (to rehearse it)."""
        alive = [worker for worker in self._workers if worker.alive]
        if alive:
            alive[index % len(alive)].connection.kill()

    def _lost(self, worker: _Worker) -> None:
        """Let what a worker ran go on elsewhere."""
        worker.gone.set()
        if not worker.ready.done():
            worker.ready.set_exception(EngineError("a rollout worker ended while it started; see what it printed"))
        if self._end(worker) and not self._closing:
            self._deaths += 1
            logger.warning(
                "rollout worker %d died; the %d trajectories that it ran go on in another",
                worker.number, len(worker.running),
            )  # fmt: skip
        for running in worker.running.values():
            if not running.over.done():
                running.over.set_result(False)

    def _end(self, worker: _Worker) -> bool:
        """Give a worker up; return whether it was alive."""
        was_alive, worker.alive = worker.alive, False
        worker.connection.link.close()
        worker.connection.kill()
        for name, number in list(worker.requests):
            self._abort(worker, name, number)
        return was_alive

    # -- what workers say -------------------------------------------------------------------------------------------

    def _receive(self, worker: _Worker, kind: str, *parts: Any) -> None:
        match kind:
            case "ready":
                worker.ready.set_result(None)
            case "failed":
                worker.ready.set_exception(EngineError(f"a rollout worker could not start: {parts[0]}"))
            case "event":
                self._event(worker, *parts)
            case "picture":  # the next event names it
                worker.pictures.picture(parts[0])
            case "over":
                self._over(worker, *parts)
            case "submit":
                self._submit(worker, *parts)
            case "abort":
                self._abort(worker, *parts)
            case "mismatch":
                entry, text = parts
                self.scheduler.glue_mismatch(GlueMismatchError(text, (worker.number, entry)))
            case "log":
                name, level, text = parts
                logging.getLogger(name).log(level, "worker %d: %s", worker.number, text)

    def _event(self, worker: _Worker, trajectory_id: str, payload: bytes, entries: Sequence[int] | None) -> None:
        """Apply and record an event; what cannot be recorded fails the run, as it does in one process."""
        event = decode(payload)
        if isinstance(event, Prompted):  # a sub-agent's
            running = worker.sample_of[str(event.parent_id)]
            trajectory = Trajectory.fold([event])
            running.group.add_child(trajectory)
            running.ids.append(trajectory_id)
            worker.sample_of[trajectory_id] = running
            self._activate(running.group, trajectory)
        else:
            running = worker.sample_of[trajectory_id]
            live = running.group.active[trajectory_id]
            trajectory = live.trajectory
            trajectory.apply(event)
            if entries is not None:
                live.glue_entries.update((worker.number, entry) for entry in entries)
            if isinstance(event, Generated):
                self._since.pop((trajectory_id, event.context), None)
        try:
            self.scheduler.recorder.record(trajectory, event, payload)
        except Exception as error:  # the journal cannot be written
            if not running.over.done():
                running.over.set_exception(error)
            worker.send("stop", running.live.trajectory.trajectory_id, None)

    def _activate(self, group: Group, child: Trajectory) -> None:
        """Let a sub-agent's trajectory be one that runs, for its caller's end to reach it."""
        if child.trajectory_id not in group.active:
            self.scheduler.starter.activate(group, child, caller=group.active[str(child.parent_id)])

    def _over(self, worker: _Worker, trajectory_id: str, kept: bool, failure: str | None) -> None:
        self._deaths = 0
        if kept:
            worker.kept.add(trajectory_id)
        running = worker.running.get(trajectory_id)
        if running is not None and not running.over.done():
            if failure is None:
                running.over.set_result(True)
            else:
                running.over.set_exception(EngineError(f"trajectory {trajectory_id} failed in its worker: {failure}"))

    # -- engines ----------------------------------------------------------------------------------------------------

    def _submit(self, worker: _Worker, name: str, numbers: Sequence[int], block: bytes) -> None:
        """Put a worker's requests into the one ledger."""
        client = self.scheduler.clients[name]
        requests = unpack_requests(block, worker.contexts.setdefault(name, Contexts()))
        for number, request in zip(numbers, requests, strict=True):
            # A worker's visit has the deadline; here it is known only whether it runs.
            deadline = cast(Deadline, _RemoteDeadline(worker, name, number))
            pending = client.submit(request, deadline)
            worker.requests[name, number] = pending
            pending.on_end = partial(self._ended, worker, name, number)

    def _ended(self, worker: _Worker, name: str, number: int, pending: PendingRequest) -> None:
        """Send how a request ended, with all others that end in this pass of the loop."""
        worker.requests.pop((name, number), None)
        if (oldest := pending.oldest_version) is not None:  # until the event is told, its tokens are nowhere else
            key = pending.request.trajectory_id, pending.request.context
            self._since[key] = min(oldest, self._since.get(key, oldest))
        ending = Ending(
            ids=pending.ids.tobytes(),
            logprobs=pending.logprobs.tobytes(),
            versions=pending.versions,
            notes=pending.notes,
            finish_reason=pending.finish_reason or FinishReason.ABORT,
            error=pending.error,
            admitted_at=pending.admitted_at,
            cached_tokens=pending.cached_tokens,
            replica=pending.replica,
            usage=pending.usage,
        )
        if not worker.ended:
            asyncio.get_running_loop().call_soon(self._send_ended, worker)
        worker.ended.setdefault(name, []).append((number, ending))

    def _send_ended(self, worker: _Worker) -> None:
        ended, worker.ended = worker.ended, {}
        for name, endings in ended.items():
            worker.send("ended", name, endings)

    def _abort(self, worker: _Worker, name: str, number: int) -> None:
        pending = worker.requests.get((name, number))
        if pending is not None:
            task = asyncio.get_running_loop().create_task(self.scheduler.clients[name].abort(pending))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)


@dataclass(slots=True)
class _RemoteDeadline:
    """The deadline of a visit in a worker: a request's hold on it is passed on."""

    worker: _Worker
    name: str
    number: int
    held: bool = True  # as it begins in the worker: a request that waits to be admitted holds it

    def hold(self) -> None:
        self._tell(True)

    def run(self) -> None:
        self._tell(False)

    def _tell(self, held: bool) -> None:
        # That it runs again because the request has ended is told by the request's end.
        if held != self.held and (self.name, self.number) in self.worker.requests:
            self.worker.send("time", self.name, self.number, held)
        self.held = held
