"""The shards of a rollout, as their driver sees them: whole schedulers elsewhere, each with its own engines.

Invariant: no event, request or token passes the driver while trajectories run: a shard is given groups, and gives each
back once, when it has ended, packed. A shard that dies, also while it starts, ends nothing: what it had is given to
others (:mod:`fsm_rollout.scheduler.leases`), and another takes its place, until too many have died in a row.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from fsm_rollout.concurrency.cancellation import to_its_end
from fsm_rollout.concurrency.tasks import Tasks
from fsm_rollout.errors import EngineError
from fsm_rollout.scheduler.shard_handle import ShardHandle
from fsm_rollout.scheduler.shard_placement import ShardLost, Start, Started, error_of, log
from fsm_rollout.scheduler.shared_servers import SharedServers
from fsm_rollout.trajectory.journal import shard_journal

logger = logging.getLogger(__name__)

MOST_DEATHS = 20  # so many shards may die one after the other without one group coming to its end in between
FIRST_PAUSE, MOST_PAUSE = 0.5, 30.0  # seconds before one that could not start is started again, twice as long each time
CLOSE_SECONDS = 10.0  # how long shards may take to release what is open, once they are dismissed
UNDOES = {"hold": "release", "sleep": "wake"}  # what takes a standing order back


class LeasedRun(Protocol):
    """A run of the driver's, as shards speak of it."""

    def receive(self, shard: ShardHandle, kind: str, *parts: Any) -> None:
        """Take in what a shard says of it."""

    def lost(self, shard: ShardHandle) -> None:
        """Take in that a shard has died."""


class Shards:
    """The shards of one rollout, ``count`` of them; they are started at once, and ready when this returns.

    Args:
        number: how many there are.
        start: starts one from its setup.
        setup: returns the pickled setup of a shard, by its place from 0.
        servers: the policy's, where all shards share these.

    Raises:
        ConfigError: an agent does not fit its engines, or the like.
        EngineError: none can start.
    """

    def __init__(
        self, number: int, start: Start, setup: Callable[[int], bytes], servers: SharedServers | None = None
    ) -> None:
        self.count, self.servers = number, servers
        self._start, self._setup = start, setup
        self._numbers, self._calls, self.run_numbers = count(1), count(), count()
        self.deaths = 0
        """How many have died since a group last came to its end."""
        self._earlier_bytes = 0  # of messages that those who died have exchanged with the driver
        self.present: tuple[Any, ...] | None = None
        """What has shards take the policy's present weights; ``None``: they are the first."""
        self.standing: dict[tuple[str, ...], None] = {}
        """The orders that hold for all until they are undone, in turn."""
        self.runs: dict[int, LeasedRun] = {}
        """The runs under way, by number."""
        self._base: Path | None = None  # where the run's journal is
        self._run_id = ""
        self._attaching = asyncio.Lock()
        self._closed = False
        self._starting: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._holds: asyncio.Task[None] | None = None
        self._looks = Tasks()
        self.idle = asyncio.Event()
        """Whether no run is under way."""
        self.idle.set()
        self.all: list[ShardHandle] = []
        try:
            with ThreadPoolExecutor(number) as threads:
                list(threads.map(self._first_started, range(number)))
        except BaseException:
            self.end()
            raise
        self.all.sort(key=lambda shard: shard.place)
        self.facts = self.all[0].started.facts
        """What the first has said of its engines."""
        self.version: int = self.facts.get("weight_version", 0)
        """How many updates the policy's present weights have had."""

    @property
    def alive(self) -> list[ShardHandle]:
        """Those that live."""
        return [shard for shard in self.all if shard.alive]

    def _started(self, place: int) -> tuple[int, int, Started]:
        """Start a shard."""
        number = next(self._numbers)
        started = self._start(self._setup(place))
        if self._closed:  # meanwhile
            started.end()
            raise EngineError("the shards are closed")
        return number, place, started

    def _first_started(self, place: int) -> None:
        """Start one of the first, again where it dies meanwhile; what else keeps it from starting is the user's."""
        while True:
            try:
                self.all.append(self._shard(self._started(place)))
                return
            except BaseException as error:
                if self._closed:  # another could not start, and says why
                    return
                self.deaths += isinstance(error, ShardLost)
                if not isinstance(error, ShardLost) or self.deaths > MOST_DEATHS:
                    self._closed = True  # those that come up later end themselves
                    raise
                logger.warning("%s; another is started", error)

    def _shard(self, placed: tuple[int, int, Started]) -> ShardHandle:
        shard = ShardHandle(*placed)
        started = shard.started
        started.link.receive = lambda *message: self._receive(shard, *message)
        started.link.lost = lambda: self._lost(shard)
        return shard

    async def here(self) -> list[ShardHandle]:
        """Belong to the running event loop, and return the shards that live; one at least."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise EngineError(
                    "the shards serve another event loop, which is still open; use either the plain forms (run, "
                    "update_weights, …) or the async ones (arun, stream, aupdate_weights, …) of a rollout, not both"
                )
            self._loop, self._starting, self._attaching = loop, None, asyncio.Lock()
        async with self._attaching:  # one attaches, the others wait for that
            await to_its_end(self._attach(loop))
        while not self.alive:
            self.start_missing()
            assert self._starting is not None
            await asyncio.shield(self._starting)
        return self.alive

    async def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        for shard in self.alive:
            if shard.loop is not loop:
                shard.calls.clear()
                await shard.started.attach()
                shard.loop = loop
        if self._holds is None or self._holds.get_loop() is not loop:
            self._holds = loop.create_task(self._hold())

    async def _hold(self) -> None:
        """Be of this event loop until it ends, and nothing is under way in it; then another may have the shards."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            try:
                await self.idle.wait()
            finally:
                for shard in self.all:
                    if shard.alive and shard.loop is self._loop:
                        shard.loop = None
                        shard.started.detach()

    def began(self, number: int, run: LeasedRun) -> None:
        """Know a run."""
        self.runs[number] = run
        self.idle.clear()

    def ended(self, number: int) -> None:
        """Forget a run."""
        del self.runs[number]
        if not self.runs:
            self.idle.set()

    def start_missing(self) -> None:
        """Have others take the place of those that have died, soon."""
        if self._starting is None or self._starting.done():
            if self._starting is not None and not self._starting.cancelled() and self._starting.exception() is not None:
                return
            self._starting = asyncio.get_running_loop().create_task(self._start_missing())

    @property
    def failure(self) -> BaseException | None:
        """Why none could be started."""
        starting = self._starting
        return None if starting is None or not starting.done() or starting.cancelled() else starting.exception()

    async def _start_aside(self, place: int) -> tuple[int, int, Started]:
        return await asyncio.to_thread(self._started, place)

    async def _start_missing(self) -> None:
        pause = FIRST_PAUSE
        while len(self.alive) < self.count:
            if self.deaths > MOST_DEATHS:
                raise EngineError(
                    f"{self.deaths} shards died one after the other, and no group came to its end in between; see what "
                    "they printed, and run with workers=1 to see it happen here"
                )
            try:
                if self.servers is not None:
                    await self.servers.ready()
                    await self.keep_apart()
                free = set(range(self.count)) - {shard.place for shard in self.alive}
                shard = self._shard(await self._start_aside(min(free)))
            except EngineError as error:
                if self._closed:
                    raise
                self.deaths += 1
                logger.warning("a shard could not start in place of one that died, and is started again: %s", error)
                await asyncio.sleep(pause)  # others may still have what it needs
                pause = min(2 * pause, MOST_PAUSE)
                continue
            try:
                await shard.started.attach()
                shard.loop = self._loop
                await self._keep_journal(shard)
                await self._catch_up(shard)
                await self._keep_journal(shard)  # a run may have begun meanwhile
            except EngineError as error:
                if shard.alive:
                    self._give_up(shard, f"could not follow the others: {error}")
            except BaseException:  # nobody else knows it yet
                shard.started.end()
                raise
            if not shard.alive:
                continue
            self.all = [*self.alive, shard]
            for run in self.runs.values():
                run.receive(shard, "joined")

    async def _catch_up(self, shard: ShardHandle) -> None:
        """Bring one that joins to where the others are, by the time that this returns; EngineError: it cannot."""
        standing: dict[tuple[str, ...], None] = {}
        present: tuple[Any, ...] | None = None
        while (standing, present) != (self.standing, self.present):
            before, standing = standing, dict(self.standing)
            for order in standing.keys() - before.keys():
                await self.call(shard, *order)
            if present != self.present and (present := self.present) is not None:
                try:
                    await self.call(shard, *present)
                except EngineError as error:
                    if not shard.alive or present is self.present:
                        raise
                    logger.info("shard %d could not take weights that others have replaced: %s", shard.number, error)
            if self.servers is not None:
                await self.call(shard, "keep_apart", self.servers.apart())
                self._aside(self.call(shard, "meet", self.servers.urls))  # what is not well yet is met later
            for order in before.keys() - standing.keys():
                await self.call(shard, UNDOES[order[0]], *order[1:])

    def engine_stats(self) -> dict[str, dict[str, int]]:
        """Return what the engines of all have done, added up, and the version of their weights."""
        added: dict[str, dict[str, int]] = {}
        for shard in self.alive:
            for name, stats in shard.stats.items():
                before = added.setdefault(name, dict.fromkeys(stats, 0))
                for key, number in stats.items():
                    before[key] = max(before[key], number) if key == "weight_version" else before[key] + number
        return added

    @property
    def wire_bytes(self) -> int:
        """How many bytes of messages they and the driver have exchanged."""
        return self._earlier_bytes + sum(shard.started.link.wire_bytes for shard in self.alive)

    # -- what all are told ------------------------------------------------------------------------------------------

    async def call(self, shard: ShardHandle, name: str, *arguments: Any) -> Any:
        """Have a shard do something and return its answer; EngineError where it dies meanwhile."""
        number = next(self._calls)
        answer = shard.calls[number] = asyncio.get_running_loop().create_future()
        if shard.loop is None:
            raise EngineError("the event loop of the shards ends")
        shard.send("call", number, name, *arguments)
        if not shard.alive:
            raise EngineError("a shard has died")
        return await answer

    async def call_one(self, name: str, *arguments: Any) -> Any:
        """Have any of them do something, another where it dies meanwhile, and return the answer."""
        while True:
            shard = (await self.here())[0]
            try:
                return await self.call(shard, name, *arguments)
            except EngineError:
                if shard.alive:
                    raise

    async def call_all(self, name: str, *arguments: Any) -> list[Any]:
        """Have all that live do something and return their answers; one that dies meanwhile gives none."""
        answers = await self.ask_all(name, *arguments)
        for shard, answer in answers.items():
            if isinstance(answer, BaseException) and shard.alive:
                raise answer
        return [answer for answer in answers.values() if not isinstance(answer, BaseException)]

    async def ask_all(self, name: str, *arguments: Any) -> dict[ShardHandle, Any]:
        """Have all that live do something and return what each has answered, or why it has not."""
        shards = await self.here()
        asked = [self.call(shard, name, *arguments) for shard in shards]
        return dict(zip(shards, await asyncio.gather(*asked, return_exceptions=True), strict=True))

    async def order(self, *order: str) -> None:
        """Have all do something that holds until it is undone, also for those that join."""
        self.standing[order] = None
        await self.call_all(*order)

    async def undo(self, *order: str) -> None:
        """Take an order back."""
        self.standing.pop(order, None)
        await self.call_all(UNDOES[order[0]], *order[1:])

    async def take_weights(self, *call: Any) -> None:
        """Have all take new weights by this call, also those that join; who cannot where others can is given up.

        Raises:
            EngineError: none could take them; all go on with what they had.
        """
        before, self.present = self.present, call
        answers = await self.ask_all(*call)
        failed = {shard: answer for shard, answer in answers.items() if isinstance(answer, BaseException)}
        errors = [(shard, error) for shard, error in failed.items() if shard.alive]
        if len(failed) == len(answers) and errors:
            self.present = before
            raise errors[0][1]
        for shard, error in errors:
            self._give_up(shard, f"could not take weights that others could: {error}")

    async def keep_apart(self) -> None:
        """Have nobody sample from servers that may have a part of new weights, until they are whole again."""
        if self.servers is not None and (apart := self.servers.apart()):
            await self.call_all("keep_apart", apart)

    async def keep_journals(self, base: Path | None, run_id: str) -> None:
        """Have each keep its events in a journal of its own beside that of the run; ``None``: nowhere."""
        self._base, self._run_id = base, run_id
        for shard in await self.here():
            await self._keep_journal(shard)

    async def _keep_journal(self, shard: ShardHandle) -> None:
        path = None if self._base is None else shard_journal(self._base, shard.number)
        if path != shard.journal:
            shard.journal = path
            try:
                await self.call(shard, "journal", None if path is None else str(path), self._run_id)
            except EngineError:
                if shard.alive:
                    raise

    # -- what they say ----------------------------------------------------------------------------------------------

    def _receive(self, shard: ShardHandle, kind: str, *parts: Any) -> None:
        match kind:
            case "log":
                log(shard.number, *parts)
            case "answer":
                number, error, value = parts
                answer = shard.calls.pop(number, None)
                if answer is not None and not answer.done():
                    if error is None:
                        answer.set_result(value)
                    else:
                        answer.set_exception(error_of(*error))
            case "whole":
                self._aside(self._look_at(shard, *parts))
            case _:
                number, *rest = parts
                if (run := self.runs.get(number)) is not None:
                    run.receive(shard, kind, *rest)

    def _aside(self, work: Coroutine[object, object, object]) -> None:
        """Do something whose failure is somebody else's."""

        async def done() -> None:
            with suppress(EngineError):
                await work

        self._looks.begin(done())

    async def _look_at(self, shard: ShardHandle, number: int, url: str) -> None:
        assert self.servers is not None
        error, version = None, 0
        try:
            version = await self.servers.whole(url)
        except Exception as raised:  # it is the shard's, which tries again later
            error = str(raised)
        shard.send("whole", number, error, version)

    def _lost(self, shard: ShardHandle) -> None:
        if not shard.alive:
            return
        shard.alive = False
        self._earlier_bytes += shard.started.link.wire_bytes
        shard.gone.set()
        shard.started.end()
        self.deaths += 1
        for answer in shard.calls.values():
            if not answer.done():
                answer.set_exception(EngineError("a shard has died"))
        if self.runs:
            logger.warning("shard %d died; what it had goes on in others", shard.number)
        for run in list(self.runs.values()):
            run.lost(shard)

    def _give_up(self, shard: ShardHandle, why: str) -> None:
        """Have another take the place of one that lives; nobody gives it anything from here on."""
        logger.warning("shard %d is given up: it %s", shard.number, why)
        self._lost(shard)

    def kill(self, index: int) -> None:
        """Kill a shard, as a machine that fails does (to rehearse it)."""
        if alive := self.alive:
            alive[index % len(alive)].started.kill()

    async def aclose(self) -> None:
        """Dismiss all; what they keep open is released."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
        shards = await self.here() if self.alive else []
        for shard in shards:
            shard.send("bye")
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(*(shard.gone.wait() for shard in shards))
        except TimeoutError:
            logger.warning("shards did not end within %g s, and are killed", CLOSE_SECONDS)
        self.end()
        if self._holds is not None:
            self._holds.cancel()

    def end(self) -> None:
        """End all at once."""
        self._closed = True
        for shard in self.all:
            shard.alive = False
            shard.started.end()
        self.all = []
