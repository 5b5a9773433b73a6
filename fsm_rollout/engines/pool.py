"""The pool of an engine's replicas, and the one ledger of the requests to them.

Invariant: every request ends exactly once, whatever the replicas do, and holds every token that was streamed for it, in
order. One is at one replica, or waits in the queue until one has room, or between two tries. All that can be sent in
one pass of the event loop goes to each replica in one call (a *dispatch*), and so do all aborts; no request waits for
another's end. Of what waits for room, that which goes on comes first, then turns of trajectories that have had others,
then first turns; in each of these lanes who came first. Only the pool tries requests again: one that failed, or that
was lost with its replica, goes on from the tokens already streamed.

A request is given up only for failures of its own. What fails together is tried again together, then in parts
(:mod:`fsm_rollout.engines.bisection`), until the one is found that fails by itself. Nothing that an engine answers is
taken unchecked (:mod:`fsm_rollout.engines.answer_check`). Which replicas there are is
:mod:`fsm_rollout.engines.replicas`' business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from operator import attrgetter

from anyio.from_thread import start_blocking_portal

from fsm_rollout.concurrency.cancellation import being_cancelled, wait_for
from fsm_rollout.engines.engine_ids import ABORT_GRACE, EngineIds
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import FOR_GOOD, Chunk, EngineFacts, Load, ReplicaLost, TokenSource, facts_of
from fsm_rollout.engines.replica import Placement, PoolTimes, Replica, failure_of, load_of
from fsm_rollout.engines.replicas import Replicas
from fsm_rollout.engines.retries import Retries, Tries
from fsm_rollout.engines.router import Router, StickyRouter, choose
from fsm_rollout.engines.silence import SilenceWatch
from fsm_rollout.errors import EngineError, PromptTooLong
from fsm_rollout.trajectory.enums import FinishReason

logger = logging.getLogger(__name__)

# Dispatches that an engine may fail as a whole, with nothing finished between, before its replica is given up.
FAILURES = 2


class EnginePool:
    """See the module. It serves one event loop at a time.

    Args:
        placement: where the replicas live.
        count: how many there are.
        router: chooses their requests; default: :class:`StickyRouter`.
        tries: how often a request is tried.
        restarts: how often a replica that finishes nothing is started again before its place stays empty. Losses while
            a request that fails is looked for do not count.
        times: seconds that the pool waits for its replicas.
        sleeps: whether the replicas give their memory back while no client has a run.

    Raises:
        EngineError: a replica cannot be built, or does not start in time; none is left behind.
    """

    def __init__(
        self,
        placement: Placement,
        count: int = 1,
        *,
        router: Router | None = None,
        tries: Tries | None = None,
        restarts: int = 3,
        times: PoolTimes | None = None,
        sleeps: bool = False,
    ) -> None:
        self.tries, self.sleeps = tries or Tries(), sleeps
        self.runs: set[object] = set()  # the clients that have a run, of a pool that sleeps between runs
        self.dispatches = self.requests = 0  # engine calls and requests so far; the ratio is the mean batch
        self.before_dispatch: dict[object, Callable[[], object]] = {}  # what is called before requests go out
        self._router: Router = router or StickyRouter()
        self._lives = Replicas(placement, count, restarts, times or PoolTimes(), self)
        self.replicas = self._lives.all  # all replicas, each with its state
        self._open: dict[PendingRequest, None] = {}  # all that have not ended, in order: also those between two tries
        self.sent: dict[str, PendingRequest] = {}  # those that a replica has, or is about to get, by the present id
        self._lanes: list[dict[PendingRequest, None]] = [{}, {}, {}]  # those of them that wait for room, by lane
        self._engine_ids = EngineIds(self._look_at)  # also of requests that a replica did not end in time
        self._retries, self._silence = Retries(self, self.tries), SilenceWatch(self, self._lives)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dispatching = self._sleep_logged = False  # whether what waits is about to be sent; waits for a sleeper
        try:
            if placement.restarts:
                with start_blocking_portal() as portal:  # this may be called from within an event loop, or without any
                    wait_for(portal.start_task_soon(self._lives.start))
            else:
                self.replicas[0].engine, self.replicas[0].state = placement.engine, "up"
        except BaseException:
            placement.close()
            raise
        windows = [replica.live.max_context for replica in self.replicas]
        self.facts: EngineFacts = replace(facts_of(self.replicas[0].live), max_context=min(windows))
        self.tokenizer = self.facts.tokenizer

    # -- facts, holds, weights ----------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """How many policy updates the present weights have had."""
        return self._lives.weight_version

    @property
    def paused(self) -> bool:
        """Whether nothing is sampled."""
        return bool(self._lives.held)

    @property
    def serves_another_loop(self) -> bool:
        """Whether the pool belongs to an event loop that still lives and is not the running one."""
        other = self._loop is not None and self._loop is not asyncio.get_running_loop() and not self._loop.is_closed()
        return other and (bool(self._tasks) or self._lives.busy)

    def replicas_here(self) -> Replicas:
        """Return the replicas, to give them orders, on the running event loop."""
        self._bind()
        return self._lives

    def load(self) -> Load:
        """Return how busy all replicas are, with ``NAME.running`` and ``NAME.in_flight`` of each in the details."""
        return load_of(self.replicas, len(self._open))

    def _bind(self) -> None:
        """Belong to the running event loop; what an earlier one left under way has no listener any more."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._lives.closed:
            raise EngineError("the pool is closed; build another")
        if self.serves_another_loop:
            raise EngineError("the pool serves another event loop; close that first, or build a pool for each")
        left_over, self._loop, self._dispatching = [*self._engine_ids], loop, False
        self._lanes = [{}, {}, {}]
        for forgotten in (self._open, self.sent, self._engine_ids, self._tasks):
            forgotten.clear()
        self._retries, self._silence = Retries(self, self.tries), SilenceWatch(self, self._lives)
        self._lives.begin(loop)
        for replica in self._lives.up if left_over else ():
            self._spawn(replica.live.abort(left_over))

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, pending: PendingRequest) -> None:
        """Take a request into the ledger, and send it soon."""
        if self._loop is not asyncio.get_running_loop():
            self._bind()
        pending.paused = bool(self._lives.held)
        pending.keep_time()
        if "asleep" in self._lives.held and not self._sleep_logged:
            self._sleep_logged = True
            logger.warning("the engine is asleep: generations wait until it is woken")
        self.requests += 1
        self._open[pending] = None
        if self._lives.fallen is not None:
            asyncio.get_running_loop().call_soon(self.end, pending, FinishReason.ABORT, self._lives.fallen)
        else:
            self.enqueue(pending)

    def enqueue(self, pending: PendingRequest, *, on_trial: bool = False) -> None:
        """Send a request soon, under an id that nobody has; while another is tried by itself, afterwards."""
        if pending.done.happened:  # ended between two tries
            return
        pending.request_id = pending.request.request_id
        if pending.attempt > 1 or pending.request_id in self.sent or pending.request_id in self._engine_ids:
            pending.request_id = self._engine_ids.unused(pending.request_id, pending.attempt, self.sent)
        bisection = self._retries.bisection
        if bisection.busy and bisection.isolates and not on_trial:
            bisection.hold(pending)
            return
        self.sent[pending.request_id] = pending
        self._lanes[pending.lane][pending] = None
        self.replicas_changed()

    def under_way(self, client: object = None) -> list[PendingRequest]:
        """Return the requests that have not ended, in order; those of one client if it is given."""
        return [pending for pending in self._open if client is None or pending.client is client]

    def _dispatch(self) -> None:
        """Send what waits, in order, as far as replicas have room: one dispatch per replica."""
        self._dispatching = False
        if not any(self._lanes) or self._lives.closed or self._lives.looks:
            return
        # 1. Find the replicas that are up and have room; nothing is sent while it is in doubt which are up.
        for replica in self._lives.up:
            self._look_at(replica)
            if replica.state == "up":
                replica.allowed, replica.waiting = replica.room_for(len(self.replicas) == 1), 0
        if self._lives.looks:
            return
        # 2. Let the router choose, as long as anybody has room.
        batches: dict[Replica, list[PendingRequest]] = {}
        refused, up = list[tuple[PendingRequest, EngineError]](), self._lives.up
        room = sum([max(0, replica.allowed - replica.in_flight) for replica in up])
        for pending in chain(*self._lanes):
            if not room:
                break
            avoids = pending.replica if self.tries.another_replica and pending.failures else ""
            try:
                chosen = choose(self._router, pending.request, up, avoids) if len(up) > 1 else up[0]
            except EngineError as error:
                refused.append((pending, error))
                continue
            if chosen.in_flight < chosen.allowed:
                batches.setdefault(chosen, []).append(pending)
                chosen.in_flight += 1
                room -= 1
            else:
                chosen.waiting += 1
        # 3. Send what was chosen.
        for pending, why in refused:
            self.end(pending, FinishReason.ABORT, why)
        for prepare in self.before_dispatch.values() if batches else ():
            prepare()
        now = asyncio.get_running_loop().time()
        for replica, batch in batches.items():
            for pending in batch:
                self._lanes[pending.lane].pop(pending, None)
                pending.at, pending.asked, pending.replica = replica, False, replica.name or pending.replica
                pending.has_chunk = pending.has_tokens = False
            if replica.in_flight == len(batch):  # it had nothing to do
                replica.last_active = now
            replica.dispatches.add(task := self._spawn(self._serve(replica, batch)))
            task.add_done_callback(replica.dispatches.discard)

    async def _serve(self, replica: Replica, batch: list[PendingRequest]) -> None:
        """Run one engine call to its end, and give its chunks to their requests."""
        loop = asyncio.get_running_loop()
        # 1. Ask for what is still wanted of it.
        asked = {pending.request_id: pending for pending in batch if pending.at is replica}
        if not asked:
            return
        for pending in asked.values():
            pending.asked = True
            self._engine_ids[pending.request_id] = replica
        self.dispatches += 1
        replica.requests += len(asked)
        engine, failure = replica.live, None
        self._silence.begin(asked.values())
        if any(self._lanes):
            loop.call_soon(self.replicas_changed)  # asked once, it can say how many more it takes
        # 2. Give every chunk to its request.
        try:
            async for chunk in engine.generate([pending.rest for pending in asked.values()]):
                now = loop.time()
                replica.measure(len(chunk.ids), now)
                answered = self.sent.get(chunk.request_id)
                if answered is not None and answered.at is replica and chunk.request_id in asked:
                    self._take(answered, chunk, now)
                else:
                    logger.warning("the engine answered an unknown or ended request %r", chunk.request_id)
                if chunk.finish_reason is not None and asked.pop(chunk.request_id, None) is not None:
                    self._engine_ids.pop(chunk.request_id, None)  # from here on another request may have the id
                    if chunk.error is None:
                        replica.failures = replica.losses = 0  # whatever went wrong before is forgiven
                if any(self._lanes):
                    self.replicas_changed()
        except (Exception, asyncio.CancelledError) as error:  # whatever an engine raises is the engine's failure
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            name = type(error).__name__
            failure = error if isinstance(error, EngineError) else EngineError(f"{name}: {error}", kind=name)
        finally:
            for request_id in asked:
                self._engine_ids.pop(request_id, None)
        # 3. Whatever has no end now has failed.
        if not asked.keys().isdisjoint(self.sent):
            self._dispatch_failed(replica, engine, asked, failure)

    def _take(self, pending: PendingRequest, chunk: Chunk, now: float) -> None:
        """Give a chunk to its request."""
        try:
            pending.take(chunk, now, self.facts.vocabulary)
        except EngineError as error:
            self._engine_ids.abort_soon(pending.request_id)
            self.end(pending, FinishReason.ABORT, error)  # not tried again: an engine that miscounts would do so again
            return
        if self._retries.bisection.busy:
            self._retries.bisection.go_on()
        if (failure := pending.failed_by(chunk)) is None:
            if chunk.finish_reason is not None:
                self.end(pending, FinishReason(chunk.finish_reason))
        elif isinstance(failure, PromptTooLong) or failure.kind in FOR_GOOD:
            self.end(pending, FinishReason.ABORT, failure)
        else:
            self._retries.failed(pending, failure, maybe_shared=isinstance(failure, ReplicaLost))

    def leave(self, pending: PendingRequest) -> None:
        """Take a request from where it is: its replica, or the queue."""
        if self.sent.get(pending.request_id) is pending:  # between two tries, another may have the id
            del self.sent[pending.request_id]
        pending.silent_until = None
        if pending.at is not None:
            pending.at.in_flight -= 1
            pending.at = None
            if any(self._lanes):
                self.replicas_changed()
        else:
            self._lanes[pending.lane].pop(pending, None)

    def end(self, pending: PendingRequest, finish_reason: FinishReason, error: EngineError | None = None) -> None:
        """End a request, wherever it is."""
        self.leave(pending)
        self._open.pop(pending, None)
        pending.end(finish_reason, error)
        if self._retries.bisection.busy:
            self._retries.bisection.go_on()

    # -- failures -----------------------------------------------------------------------------------------------------

    def _dispatch_failed(
        self, replica: Replica, engine: TokenSource, asked: Iterable[str], failure: EngineError | None
    ) -> None:
        """Try again what an engine has left of a dispatch; one that fails dispatch after dispatch is lost."""
        unfinished = [self.sent[request_id] for request_id in asked if request_id in self.sent]
        self._look_at(replica)
        if replica.state != "up" or replica.engine is not engine:
            return
        replica.failures += not all(pending in self._retries.bisection for pending in unfinished)
        for pending in unfinished:
            replica.moved += 1
            error = failure or EngineError(f"the engine never finished request {pending.request_id}")
            # Another replica, or this one in its next life, may have it at once.
            lost = ReplicaLost(str(error)) if self._lives.placement.restarts else error
            self._retries.failed(pending, lost, maybe_shared=True)
        if replica.failures >= FAILURES:
            self._lose(replica, engine, f"its engine failed {FAILURES} times in a row: {failure}")

    def _lose(self, replica: Replica, engine: TokenSource | None, why: str) -> None:
        requests = self._at(replica)
        on_trial = bool(requests) and all(pending in self._retries.bisection for pending in requests)
        self._lives.lose(replica, engine, why, on_trial=on_trial)

    def _at(self, replica: Replica) -> list[PendingRequest]:
        return [pending for pending in self.sent.values() if pending.at is replica]

    # -- what the replicas say ----------------------------------------------------------------------------------------

    def replica_lost(self, replica: Replica, why: str) -> None:
        """Take back what a replica has: what its engine was asked for is tried again, the rest waits for another."""
        requests = self._at(replica)
        returned: list[dict[PendingRequest, None]] = [{}, {}, {}]  # what was taken out of its lane for nothing
        for pending in requests:
            if not pending.asked:
                replica.in_flight -= 1
                pending.at = None
                returned[pending.lane][pending] = None
        self._lanes = [before | lane for before, lane in zip(returned, self._lanes, strict=True)]
        for pending in filter(attrgetter("asked"), requests):
            replica.moved += 1
            self._retries.failed(pending, ReplicaLost(why), maybe_shared=True)
        self.replicas_changed()

    def replica_is_silent(self, replica: Replica, seconds: float) -> None:
        """Give a silent replica up."""
        silence = f"said nothing for {seconds:.0f} s"
        self._lose(replica, replica.engine, f"it has {replica.in_flight} request(s) and {silence}")

    def request_is_silent(self, pending: PendingRequest, seconds: float) -> None:
        """Give up a try for which nothing comes."""
        self._engine_ids.abort_soon(pending.request_id)
        self._retries.failed(pending, EngineError(f"the engine sent nothing for {seconds:g} s; is it alive?"))

    def _look_at(self, replica: Replica) -> None:
        """Lose a replica if its engine is gone."""
        if replica.state == "up" and (failure := failure_of(replica.live)) is not None:
            self._lose(replica, replica.engine, str(failure))

    def replicas_changed(self) -> None:
        """Send what waits, with all that is made in this pass of the loop."""
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def hold_changed(self) -> None:
        """Let the deadlines of requests stand still while nothing is sampled."""
        self._sleep_logged = False
        for pending in self._open:
            pending.paused = self.paused
            pending.keep_time()
        self._silence.begin(p for p in self.sent.values() if p.at is not None and p.asked and not p.has_chunk)

    def all_lost(self, error: EngineError) -> None:
        """End every request with the reason."""
        self._retries.bisection.clear()
        for pending in list(self._open):
            self.end(pending, FinishReason.ABORT, error)

    # -- ends ---------------------------------------------------------------------------------------------------------

    async def abort(self, pending: PendingRequest) -> None:
        """End a request soon and wait (a bounded time) for its last tokens; it is done afterwards."""
        if pending.done.happened:
            return
        pending.aborted = True
        try:
            if pending.at is not None and pending.asked:  # else it is not sent yet, or between tries
                self._engine_ids.abort_soon(pending.request_id)
                with suppress(TimeoutError):
                    async with asyncio.timeout(ABORT_GRACE):
                        await pending.done.wait()
        finally:
            self.end(pending, FinishReason.ABORT)

    async def drain(self, client: object = None) -> None:
        """End every request of a client, or of all, and every task that has nothing to do any more."""
        if self._loop is not asyncio.get_running_loop():
            return
        theirs = self.under_way(client) if self._open else []
        others = len(theirs) < len(self._open)
        if to_abort := [name for name in self._engine_ids if not others or self.sent.get(name) in theirs]:
            await self._engine_ids.abort(to_abort)
        for pending in theirs:
            self.end(pending, FinishReason.ABORT)
        if self._open:
            return
        self._retries.bisection.clear()
        self._silence.stop()
        tasks = [*self._tasks, *self._engine_ids.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def aclose(self) -> None:
        """End everything with "abort" and stop every replica."""
        if self._lives.closed:
            return
        self._lives.closed = True
        self._lives.fallen = self._lives.fallen or EngineError("the pool is closed; build another")
        # 1. What is under way has a moment to send what it has sampled.
        if self._loop is asyncio.get_running_loop():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lives.times.close):
                    await asyncio.gather(*map(self.abort, list(self._open)))
            await self.drain()
        # 2. Stop every replica, and free what they shared.
        await self._lives.close()
