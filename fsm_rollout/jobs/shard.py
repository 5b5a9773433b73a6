"""A shard: a whole rollout in a process of its own, which runs the groups that it is given.

Invariant: a shard decides nothing about targets and order: it begins the groups that it was leased, in turn, and gives
each back when it is scored. All else is as in a run of one process: its own engines, tools, rewards, journal and spans.
What it says is plain data; rows are made here, and travel packed.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.concurrency.garbage_collection import calm_collection
from fsm_rollout.concurrency.loop_lag import LoopLag
from fsm_rollout.concurrency.steady_loop import SteadyLoop
from fsm_rollout.concurrency.tasks import Tasks
from fsm_rollout.errors import EngineError, GlueMismatchError
from fsm_rollout.jobs.shard_run import KeptEvents, ShardCounts, ShardRun, packed_error
from fsm_rollout.model.folders import plain_tokenizers
from fsm_rollout.names.objects import look_in
from fsm_rollout.rollout import Rollout
from fsm_rollout.scheduler.link import Link, SocketLink, framed, read_block
from fsm_rollout.scheduler.shard_setup import ShardSetup
from fsm_rollout.scheduler.shared_servers import LoadedByDriver, SharedServer, servers_of
from fsm_rollout.tools.tool_messages import clean
from fsm_rollout.trajectory.journal import Journal

logger = logging.getLogger(__name__)


class Shard:
    """What answers a driver's messages on one link."""

    def __init__(self, link: Link, rollout: Rollout, count: int, shared: Collection[str] = ()) -> None:
        self.link, self.rollout, self.shared = link, rollout, shared
        self.runs: dict[int, ShardRun] = {}
        self.count = count
        self.events: dict[str, list[bytes]] = {}
        """The events of trajectories that are to come back with their groups."""
        self.gone = asyncio.Event()
        self._tasks = Tasks()
        self._numbers, self._asked = itertools.count(), dict[int, asyncio.Future[int]]()  # what the driver is asked
        scheduler, client, pool = rollout.scheduler, rollout.clients[POLICY], rollout.engines[POLICY]
        self._calls: Mapping[str, Callable[..., Any]] = {
            "add": pool.add, "cancel": scheduler.cancel, "check": scheduler.check, "drop": self._drop,
            "hold": client.pause, "journal": self._journal, "keep_apart": self._keep_apart, "leave": self._leave,
            "load": rollout.aupdate_weights, "meet": self._meet, "release": client.resume, "remove": pool.remove,
            "rows": pool.rows, "sleep": self._sleep, "take": self._take, "wake": self._wake,
        }  # fmt: skip
        for agent in scheduler.agents.all:
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
                self._tasks.begin(self._call(number, *parts))
            case "whole":
                self._is_whole(number, *parts)
            case "bye":
                self.gone.set()

    def _begin(self, number: int, asked: Mapping[str, Any]) -> None:
        scheduler = self.rollout.scheduler
        if asked["evaluation"] is not None:
            scheduler = self.rollout._evaluation_scheduler(asked["evaluation"])
        if asked["lag"] and scheduler.lag is None:
            scheduler.lag = LoopLag()
        run = self.runs[number] = ShardRun(self, number, scheduler, asked)
        for pool in {client.pool for client in scheduler.clients.values()}:
            if not pool.here().placement.starts_afresh:  # its servers are those of all shards
                pool.placing.share = self.count
        recorder = scheduler.recorder
        others = [each for each in recorder.listeners if not isinstance(each, ShardCounts | KeptEvents)]
        if asked["counts"]:
            others.append(ShardCounts(self.link, number))
        recorder.listeners = (*others, *([KeptEvents(self.events)] if asked["histories"] else []))
        report = scheduler.starter.report_mismatch

        def mismatch(error: GlueMismatchError) -> None:
            before = {name for name, group in run.given_back.items() if not group.dropped}
            report(error)
            dropped = [(name, str(group.drop_reason)) for name, group in run.given_back.items() if group.dropped]
            run.send("dropped", [each for each in dropped if each[0] in before])

        scheduler.starter.report_mismatch = mismatch
        run.task = self._tasks.begin(run.run())
        run.task.add_done_callback(lambda _: setattr(scheduler.starter, "report_mismatch", report))

    async def _call(self, number: int, name: str, *arguments: Any) -> None:
        try:
            answer = self._calls[name](*arguments)
            self.link.send("answer", number, None, await answer if inspect.isawaitable(answer) else answer)
        except Exception as error:  # it is the driver's
            self.link.send("answer", number, packed_error(error), None)

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

    async def _sleep(self) -> None:
        for name, client in self.rollout.clients.items():  # servers that all share are the driver's to send to sleep
            await (client.pause("asleep") if name in self.shared else client.sleep())

    async def _wake(self) -> None:
        for name, client in self.rollout.clients.items():
            await (client.resume("asleep") if name in self.shared else client.wake())

    async def _take(self, version: int, adapted: bool) -> None:
        await self.rollout.aupdate_weights(LoadedByDriver(self._whole, adapted), version)

    async def _meet(self, urls: Sequence[str]) -> None:
        """Have these servers too, each once the driver has it whole."""
        pool = self.rollout.engines[POLICY]

        async def meet(url: str) -> None:
            try:
                await self._whole(url)
                await pool.add(url)
            except EngineError as error:
                logger.warning("%s is left to the other shards: %s", url, error)

        await asyncio.gather(*(meet(url) for url in urls if url not in servers_of(pool)))

    async def _leave(self, url: str, within: float) -> None:
        pool = self.rollout.engines[POLICY]
        if (replica := servers_of(pool).get(url)) is not None:
            await pool.remove(replica.name, within)

    async def _keep_apart(self, urls: Sequence[str]) -> None:
        lives = self.rollout.clients[POLICY].pool.here()
        for replica in lives.up:
            if cast(SharedServer, replica.live).url in urls:
                replica.mix(None)
                lives.lose(replica, replica.engine, "it may have a part of new weights", half=True)

    async def _whole(self, url: str) -> int:
        number = next(self._numbers)
        asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        self.link.send("whole", number, url)
        return await asked

    def _is_whole(self, number: int, error: str | None, version: int) -> None:
        if not (asked := self._asked.pop(number)).done():
            asked.set_result(version) if error is None else asked.set_exception(EngineError(error))

    async def aclose(self) -> None:
        """End what runs, and close what is open."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        journal = self.rollout.journal
        await self.rollout.aclose()
        if journal is not None:
            journal.close()


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
        connection.sendall(framed(_encode([("failed", *packed_error(error))])))
        return
    policy = rollout.engines[POLICY].facts
    processor = policy.processor and str(policy.processor.tokenizer.name_or_path)
    facts = {"pad_id": policy.pad_id, "engines": rollout.description["engines"], "processor": processor,
             "weight_version": rollout.weight_version}  # fmt: skip
    connection.sendall(framed(_encode([("ready", facts)])))
    loop = SteadyLoop()
    try:
        with calm_collection():  # all that this process does is trajectories: what runs leave is no reason to look
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
    shard = Shard(link, rollout, setup.count, setup.shared)
    await loop.create_connection(lambda: link, sock=connection)
    await shard.gone.wait()
    await shard.aclose()
    link.close()
    await asyncio.sleep(0)
