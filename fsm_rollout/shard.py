"""A shard: a whole rollout in a process of its own, which runs the groups that it is given.

Invariant: a shard decides nothing about targets and order: it begins the groups that it was leased, in turn, and gives
each back when it is scored. All else is as in a run of one process: its own engines, tools, rewards, journal and spans.
What it says is plain data; rows are made here, and travel packed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.batch.part import part_of, part_to_bytes
from fsm_rollout.concurrency.steady_loop import SteadyLoop
from fsm_rollout.errors import ConfigError, EngineError, GlueMismatchError
from fsm_rollout.model.folders import plain_tokenizers
from fsm_rollout.names.objects import look_in
from fsm_rollout.rollout import Rollout
from fsm_rollout.scheduler.group import Group, GroupState, log_failures
from fsm_rollout.scheduler.link import Link, SocketLink, framed, read_block
from fsm_rollout.scheduler.run_state import PromptQueue, Watch
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.scheduler.shard_setup import ShardSetup
from fsm_rollout.tools.tool_messages import clean
from fsm_rollout.trajectory.event_bytes import decode, encode, pictures_in
from fsm_rollout.trajectory.events import AnyEvent, Ended, Generated, Prompted, Resumed, Suspended, Transitioned
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

HELD = "weights change in all shards"
TELL_EVERY = 0.25  # seconds between two messages that say how far it is


class LeaseQueue(PromptQueue):
    """The prompts that were leased and have not begun."""

    def __init__(self, begins: Callable[[str], None], attached: Callable[[], None]) -> None:
        self._on_change: Callable[[], object] = lambda: None
        self._begins, self._attached, self._is_made = begins, attached, False
        super().__init__()
        self._is_made = True

    @property
    def on_change(self) -> Callable[[], object]:
        """What a run that takes its prompts here is told by; setting it says that the run is under way."""
        return self._on_change

    @on_change.setter
    def on_change(self, on_change: Callable[[], object]) -> None:
        before, self._on_change = self._on_change, on_change
        if self._is_made and before is not on_change:
            self._attached()

    def __next__(self) -> Prompt:
        """Return the next one, which begins."""
        prompt = super().__next__()
        self._begins(str(prompt.prompt_id))
        return prompt

    def take_back(self, most: int) -> list[str]:
        """Give up the last ones, and return their ids."""
        return [str(self._prompts.pop().prompt_id) for _ in range(min(most, len(self._prompts)))]


class TellingWatch(Watch):
    """Tells what has failed; the driver, who hears it of all shards, says when that is too much."""

    def __init__(self, run: ShardRun, failures: Any) -> None:
        super().__init__(failures)
        self._shard_run = run

    def note(self, trajectory: Trajectory) -> None:
        """See there."""
        failure = None if trajectory.failure is None else str(trajectory.failure)
        end = trajectory.trajectory_id, failure, trajectory.stop_reason, trajectory.detail
        self._shard_run.tell("attempts", end)

    def judged(self, scored: int, errors: Sequence[str]) -> None:
        """See there."""
        self._shard_run.tell("judged", (scored, list(errors)))


@dataclass(eq=False)
class ShardRun:
    """A run of the driver's, here."""

    shard: Shard
    number: int
    scheduler: Scheduler
    asked: Mapping[str, Any]
    queue: LeaseQueue = field(init=False)
    task: asyncio.Task[None] | None = None
    finished: list[Group] = field(default_factory=list)  # in this pass of the loop
    given_back: dict[str, Group] = field(default_factory=dict)
    outbox: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    under_way: bool = False  # whether the scheduler has begun it
    to_take_up: list[list[AnyEvent]] = field(default_factory=list)  # what goes on once it has
    ending: bool = False
    failure: Exception | None = None  # of what came back

    def __post_init__(self) -> None:
        self.queue = LeaseQueue(lambda group_id: self.tell("begun", group_id), self._attached)

    def _attached(self) -> None:
        self.under_way = True
        if self.to_take_up:
            self.scheduler.take_up(self.to_take_up)
        if self.ending:
            self.end(keep=True)

    async def run(self) -> None:
        """Run what is leased, until the driver ends it."""
        scheduler, asked, error = self.scheduler, self.asked, None
        scheduler.starter.run_number = asked["run_number"] - 1
        watch = TellingWatch(self, scheduler.failures)
        try:
            async with self.shard.rollout.opened(scheduler) as trace:
                stream = scheduler.run(self.queue, asked["n"], step=asked["step"], trace=trace, watch=watch)
                async with aclosing(stream) as groups:
                    async for group in groups:
                        scheduler.forget_delivered()  # the driver says what was delivered
                        self._finished(group)
        except asyncio.CancelledError:
            pass
        except Exception as raised:  # it is the driver's
            error = raised
        self._flush()
        error = error or self.failure
        log_failures(list(self.given_back.values()))
        carried = [] if error is not None else [group.group_id for group in scheduler.carried]
        journal = scheduler.recorder.journal
        if journal is not None:
            journal.flush()
        self.send("ended", None if error is None else told(error), carried, self.shard.rollout.engine_stats())
        self.shard.runs.pop(self.number, None)

    def send(self, kind: str, *parts: Any) -> None:
        """Say something of this run."""
        self.shard.link.send(kind, self.number, *parts)

    def tell(self, kind: str, what: Any) -> None:
        """Say something with all that is said in this pass of the loop."""
        if not self.outbox and not self.finished:
            asyncio.get_running_loop().call_soon(self._flush)
        self.outbox[kind].append(what)

    def _finished(self, group: Group) -> None:
        if not self.outbox and not self.finished:
            asyncio.get_running_loop().call_soon(self._flush)
        self.finished.append(group)
        self.given_back[group.group_id] = group

    def _flush(self) -> None:
        for kind, said in self.outbox.items():
            self.send(kind, said)
        self.outbox.clear()
        groups, self.finished = self.finished, []
        if groups:
            try:
                self._give_back(groups)
            except Exception as error:  # rows that cannot be made, say
                self.failure = error
                if self.task is not None:
                    self.task.cancel()

    def _give_back(self, groups: Sequence[Group]) -> None:
        known: dict[str, Any] = {"state_names": self.shard.rollout.state_names}
        known["processor"] = self.shard.rollout.engines[POLICY].facts.processor
        part = part_to_bytes(part_of(groups, **known, **self.asked["batch"]))
        headers = []
        for group in groups:
            versions = [
                span.version
                for trajectory in group.all
                for stream in trajectory.streams
                if stream.engine == POLICY and stream.tokens.trained
                for span in stream.tokens.sampled()
            ] if self.scheduler.staleness.most is not None else []  # fmt: skip
            filtered = self.scheduler.scoring.group_filter
            headers.append((
                group.group_id, group.drop_reason and str(group.drop_reason), group.ended, group.reward_errors,
                min(versions, default=None), list(filtered.last_scores) if filtered is not None else [],
                *self._histories(group),
            ))  # fmt: skip
        self.send("groups", headers, part)

    def _histories(self, group: Group) -> tuple[list[list[list[bytes]]], list[tuple[bytes, str, int, int]]]:
        """Return the events of a group's trajectories, and the pictures in them."""
        kept = self.shard.events
        if not self.asked["histories"]:
            return [], []
        kinds = [
            [kept.get(trajectory.trajectory_id, []) for trajectory in trajectories]
            for trajectories in (group.trajectories, group.children, group.discarded)
        ]
        pictures = {p.sha256: p for kind in kinds for history in kind for event in history for p in pictures_in(event)}
        return kinds, [(p.data, p.mime, p.width, p.height) for p in pictures.values()]

    # -- what the driver says -----------------------------------------------------------------------------------------

    def lease(self, group_id: str, prompt: Prompt, histories: Sequence[Sequence[bytes]]) -> None:
        """Take a group: one that is new, or one that goes on."""
        if histories:
            events = [list(map(decode, history)) for history in histories]
            journal = self.scheduler.recorder.journal
            for history, packed in zip(events, histories, strict=True):
                assert isinstance(history[0], Prompted)
                name = history[0].trajectory_id
                # What the journal does not have yet is recorded as it is taken up, and so heard of again.
                self.shard.events[name] = list(packed) if journal is not None and name in journal else []
            if self.under_way:
                self.scheduler.take_up(events)
            else:
                self.to_take_up += events
            self.tell("begun", group_id)
        else:
            named = prompt.model_copy(update={"prompt_id": group_id})
            self.queue.put(named)

    def give_back(self, most: int) -> None:
        """Return groups that have not begun."""
        self.send("returned", self.queue.take_back(most))

    def renew(self, group_id: str) -> None:
        """Let a group that was given back run again, where it is too old by now."""
        group = self.given_back.get(group_id)
        if group is not None:
            self.scheduler.groups.put(group, GroupState.DONE)
            self.scheduler._renew(group)
            self.scheduler.changed()

    def end(self, keep: bool) -> None:
        """Come to the end: set aside what runs, or cut it off."""
        if keep and not self.under_way:
            self.ending = True
        elif keep:
            self.queue.take_back(2**31)
            self.scheduler.set_aside()
            self.queue.close()
        elif self.task is not None:
            self.task.cancel()


class Shard:
    """What answers a driver's messages on one link."""

    def __init__(self, link: Link, rollout: Rollout, count: int) -> None:
        self.link, self.rollout = link, rollout
        self.runs: dict[int, ShardRun] = {}
        self.events: dict[str, list[bytes]] = {}
        """The events of trajectories that are to come back with their groups."""
        self.gone = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counts = Counts(link)
        for agent in rollout.scheduler.agents.all:
            agent.toolbox.share = count
        link.receive, link.lost = self._receive, self.gone.set

    def _receive(self, kind: str, number: int = -1, *parts: Any) -> None:
        run = self.runs.get(number)
        match kind:
            case "run":
                self._begin(number, *parts)
            case "lease" if run is not None:
                group_id, prompt, histories, _ = parts
                run.lease(group_id, prompt, histories)
            case "give_back" if run is not None:
                run.give_back(*parts)
            case "renew" if run is not None:
                run.renew(*parts)
            case "end" if run is not None:
                run.end(*parts)
            case "call":
                self._do(self._call(number, *parts))
            case "bye":
                self.gone.set()

    def _do(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin(self, number: int, asked: Mapping[str, Any]) -> None:
        scheduler = self.rollout.scheduler
        if asked["evaluation"] is not None:
            scheduler = self.rollout.evaluation_scheduler(asked["evaluation"])
        run = self.runs[number] = ShardRun(self, number, scheduler, asked)
        recorder = scheduler.recorder
        others = [each for each in recorder.listeners if not isinstance(each, Counts | Kept)]
        self._counts.number = number
        recorder.listeners = (*others, self._counts, *([Kept(self.events)] if asked["histories"] else []))
        report = scheduler.starter.report_mismatch

        def mismatch(error: GlueMismatchError) -> None:
            before = {name for name, group in run.given_back.items() if not group.dropped}
            report(error)
            dropped = [(name, str(group.drop_reason)) for name, group in run.given_back.items() if group.dropped]
            run.send("dropped", [each for each in dropped if each[0] in before])

        scheduler.starter.report_mismatch = mismatch
        run.task = self._do(run.run())

    async def _call(self, number: int, name: str, *arguments: Any) -> None:
        try:
            self.link.send("answer", number, None, await getattr(self, f"_{name}")(*arguments))
        except Exception as error:  # it is the driver's
            self.link.send("answer", number, told(error), None)

    async def _check(self, prompts: Sequence[Prompt]) -> None:
        self.rollout.scheduler.check(prompts)

    async def _journal(self, path: str | None, run_id: str) -> None:
        if (earlier := self.rollout.journal) is not None:
            self.rollout.scheduler.recorder.journal = None
            earlier.close()
        if path is not None:
            journal = Journal(path, {"run_id": run_id}, append=os.path.exists(path))  # noqa: ASYNC240
            self.rollout.scheduler.recorder.journal = journal

    async def _drop(self, group_id: str) -> None:
        group = self.rollout.scheduler.groups.get(group_id)
        if group is not None:
            await self.rollout.scheduler._drop(group)

    async def _stats(self) -> dict[str, dict[str, int]]:
        return self.rollout.engine_stats()

    async def _sleep(self) -> None:
        await self.rollout.send_to_sleep()

    async def _wake(self) -> None:
        await self.rollout.wake_up()

    async def _hold(self) -> None:
        await self.rollout.clients[POLICY].pause(HELD)

    async def _load(self, weights: Any, version: int | None) -> int:
        return await self.rollout.aupdate_weights(weights, version)

    async def _release(self) -> None:
        await self.rollout.clients[POLICY].resume(HELD)

    async def aclose(self) -> None:
        """End what runs, and close what is open."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        journal = self.rollout.journal
        await self.rollout.aclose()
        if journal is not None:
            journal.close()


class Counts:
    """Listens, and says now and then how far the trajectories are."""

    def __init__(self, link: Link) -> None:
        self._link, self.number = link, -1
        self._states: Counter[str] = Counter()
        self._open: set[str] = set()
        self._done = self._tokens = self._sub_agents = 0
        self._told = False

    def __call__(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Count an event."""
        sample = trajectory.parent_id is None
        match event:
            case Generated():
                self._tokens += len(event.ids)
            case Transitioned() if sample:
                self._states[event.source] -= 1
                self._states[event.dest] += 1
            case Prompted() | Resumed() if sample:
                self._open.add(trajectory.trajectory_id)
                self._states[trajectory.state] += 1
            case Ended() | Suspended() if sample and trajectory.trajectory_id in self._open:
                self._open.discard(trajectory.trajectory_id)
                self._done += isinstance(event, Ended)
                self._states[trajectory.state] -= isinstance(event, Suspended)
            case _:
                return
        if not self._told:
            self._told = True
            asyncio.get_running_loop().call_later(TELL_EVERY, self._tell)

    def _tell(self) -> None:
        self._told = False
        states = {state: count for state, count in self._states.items() if count}
        self._link.send("progress", self.number, states, self._done, self._tokens)


class Kept:
    """Listens, and keeps events by trajectory."""

    def __init__(self, events: dict[str, list[bytes]]) -> None:
        self._events = events

    def __call__(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Keep an event."""
        self._events.setdefault(trajectory.trajectory_id, []).append(encode(event))


def told(error: BaseException) -> tuple[str, list[tuple[Any, ...]], str]:
    """Return an error as plain data."""
    problems = error.problems if isinstance(error, ConfigError) else ()
    listed = [(problem.message, problem.file and str(problem.file), problem.line, problem.rule) for problem in problems]
    return type(error).__name__, listed, clean(str(error))


# -- the process ----------------------------------------------------------------------------------------------------


class _LogSender(logging.Handler):
    """Tells the driver what is logged here."""

    def __init__(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._link, self._loop = link, loop

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = clean(self.format(record))
            self._loop.call_soon_threadsafe(self._link.send, "log", record.name, record.levelno, text)
        except RuntimeError:  # the loop is closed
            self.handleError(record)


def main(descriptor: int) -> None:
    """Be a shard of the driver at the other end of the socket."""
    serve(socket.socket(fileno=descriptor))


def serve(connection: socket.socket) -> None:
    """Be a shard on a connection, the first blocks on which say what it is, until the driver has no need of it."""
    path = pickle.loads(read_block(connection))  # where modules are, by which the rest can be read
    sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry)]
    plain_tokenizers()  # of which the setup may have one
    from fsm_rollout.scheduler.link import _encode  # the form of what a shard says

    try:
        setup: ShardSetup = pickle.loads(read_block(connection))
        for folder in setup.folders:
            look_in(folder)
        logging.getLogger("fsm_rollout").setLevel(setup.log_level)
        rollout = Rollout(**setup.rollout)
    except (EOFError, OSError):
        raise
    except Exception as error:  # the user's code, imported here
        kind, problems, text = told(error)
        if not isinstance(error, ConfigError | EngineError):
            text = f"{kind}: {text}"
        connection.sendall(framed(_encode([("failed", kind, problems, text)])))
        return
    policy = rollout.engines[POLICY].facts
    facts = {"pad_id": policy.pad_id, "engines": rollout.description["engines"], "sees": policy.processor is not None}
    connection.sendall(framed(_encode([("ready", facts)])))
    loop = SteadyLoop()
    try:
        loop.run_until_complete(_serve(connection, rollout, setup))
    finally:
        loop.close()


async def _serve(connection: socket.socket, rollout: Rollout, setup: ShardSetup) -> None:
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    link = SocketLink(shard=True)
    package = logging.getLogger("fsm_rollout")
    package.addHandler(_LogSender(link, loop))
    package.propagate = False
    shard = Shard(link, rollout, setup.count)
    await loop.create_connection(lambda: link, sock=connection)
    await shard.gone.wait()
    await shard.aclose()
    link.close()
    await asyncio.sleep(0)
