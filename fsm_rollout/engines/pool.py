"""The pool of an engine's replicas, and the one ledger of the requests to them.

Invariant: every request ends exactly once, whatever the replicas do, and holds every token that was streamed for it, in
order. One is at one replica, or waits in the queue until one has room, or between two tries. All that can be sent in
one pass of the event loop goes to each replica in one call (a *dispatch*), and so do all aborts; no request waits for
another's end. In what order they wait says :mod:`fsm_rollout.engines.request_queue`. Only the pool tries requests
again: one that failed, or that was lost with its replica, goes on from the tokens already streamed.

A request is given up only for failures of its own. What fails together is tried again together, then in parts
(:mod:`fsm_rollout.engines.retries`), until the one is found that fails by itself. Which replicas there are is
:mod:`fsm_rollout.engines.replicas`' business.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from fsm_rollout.concurrency.cancellation import being_cancelled
from fsm_rollout.engines.engine_ids import ABORT_GRACE, EngineIds
from fsm_rollout.engines.following import FollowingReplicas
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.placing import Placing
from fsm_rollout.engines.present_weights import PresentWeights
from fsm_rollout.engines.protocol import Chunk, EngineFacts, ReplicaLost, Request, TokenSource, facts_of
from fsm_rollout.engines.replica import Placement, PoolTimes, Replica, Rows, rows_of
from fsm_rollout.engines.replicas import Replicas
from fsm_rollout.engines.retries import Retries, Tries
from fsm_rollout.engines.router import Router, StickyRouter
from fsm_rollout.engines.silence import SilenceWatch
from fsm_rollout.errors import EngineError
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
        self, placement: Placement, count: int = 1, *, router: Router | None = None, tries: Tries | None = None,
        restarts: int = 3, times: PoolTimes | None = None, sleeps: bool = False,
    ) -> None:  # fmt: skip
        self.tries, self.sleeps, self.clients = tries or Tries(), sleeps, 0  # and how many clients there have been
        self.runs: set[object] = set()  # the clients that have a run, of a pool that sleeps between runs
        self.dispatches = self.requests = 0  # engine calls and requests so far; the ratio is the mean batch
        self.before_dispatch: dict[object, Callable[[], object]] = {}  # what is called before requests go out
        self.placing = Placing(router or StickyRouter(), self.tries, self.replicas_changed)
        lives = FollowingReplicas if placement.follows else Replicas
        self._lives = lives(placement, count, restarts, times or PoolTimes(), self)
        self.replicas, self.update_times = self._lives.all, self._lives.update_times
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin_anew()
        if placement.restarts:
            self._lives.start_in_thread()
        self.placing.look(self._lives.open, count == 1, 0.0)
        windows = [replica.live.max_context for replica in self.replicas]
        self.facts: EngineFacts = replace(facts_of(self.replicas[0].live), max_context=min(windows))
        self.tokenizer = self.facts.tokenizer
        self._lives.weights = PresentWeights(model=self.facts.tensors)

    # -- facts, holds, weights ----------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """How many policy updates the present weights have had."""
        return self._lives.weight_version

    @property
    def paused(self) -> bool:
        """Whether nothing is sampled."""
        return bool(self._lives.held)

    def here(self) -> Replicas:
        """Belong to the running event loop (what an earlier one left has no listener), and return the replicas."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return self._lives
        if self._lives.closed:
            raise EngineError("the pool is closed; build another")
        busy = self._lives.busy or self._dispatches or self._engine_ids.tasks
        if self._loop is not None and not self._loop.is_closed() and busy:
            raise EngineError(
                "the engine serves another event loop, which is still open; use either the plain forms (run, "
                "update_weights, …) or the async ones (arun, stream, aupdate_weights, …) of a rollout, not both"
            )
        left_over, self._loop = self._engine_ids, loop
        self._begin_anew()
        self._lives.begin(loop)
        if left_over:
            self._engine_ids.tasks.begin(left_over.abort([*left_over]))
        return self._lives

    async def add(self, url: str | None = None) -> str:
        """Have one more replica, which is the server at ``url`` or is started here; return its name when it is up."""
        return await self.here().add(url)

    async def remove(self, name: str, within: float = math.inf) -> None:
        """Have a replica leave; what it has not said ``within`` so many seconds goes on elsewhere, nothing lost."""
        await self.here().remove(name, within)

    async def rows(self) -> Rows:
        """Return what is known of each replica; see :func:`~fsm_rollout.engines.replica.rows_of`."""
        return rows_of(self.replicas, self.urls)

    @property
    def urls(self) -> list[str] | None:
        """Those of the replicas, where they are servers that others started."""
        return self._lives.placement.urls

    def _begin_anew(self) -> None:
        """Have no request."""
        self.placing.begin_anew()
        self._open: dict[PendingRequest, None] = {}  # all that have not ended, in order: also those between two tries
        self.sent: dict[str, PendingRequest] = {}  # those that a replica has, or is about to get, by the present id
        self._dispatches: dict[asyncio.Task[None], Replica] = {}  # the tasks that pass on what their replicas answer
        self._engine_ids = EngineIds(self._look_at)  # also of requests that a replica did not end in time
        self._retries, self._silence = Retries(self, self.tries), SilenceWatch(self, self._lives)
        self._dispatching = self._sleep_logged = False  # whether what waits is about to be sent; waits for a sleeper

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, pending: PendingRequest, label: str = "") -> None:
        """Take a request into the ledger, and send it soon; ``label``: of the client who has it."""
        if self._loop is not asyncio.get_running_loop():
            self.here()
        pending.paused = bool(self._lives.held)
        pending.keep_time()
        if "asleep" in self._lives.held and not (self._sleep_logged or self.sleeps):
            self._sleep_logged = True
            logger.warning("the engine is asleep: generations wait until it is woken")
        self.requests = pending.place = self.requests + 1
        self._open[pending] = None
        if self.placing.residency is not None:
            self.placing.ask(pending, label)
        if self._lives.fallen is not None:
            asyncio.get_running_loop().call_soon(self.end, pending, FinishReason.ABORT, self._lives.fallen)
        else:
            self.enqueue(pending)

    def enqueue(self, pending: PendingRequest, *, on_trial: bool = False) -> None:
        """Send a request soon, under an id that nobody has; while another is tried by itself, afterwards."""
        if pending.done.happened:  # ended between two tries
            return
        request, request_id = pending.request, pending.request.request_id
        if pending.attempt > 1 or pending.ids or request_id in self.sent or request_id in self._engine_ids:
            pending.begin_again(self._engine_ids.unused(request_id, pending.attempt, self.sent))
        else:
            pending.request_id, pending.rest = request_id, request
        if pending.thinking is not None:
            pending.bound_thinking()
        if (bisection := self._retries.bisection).busy and bisection.isolates and not on_trial:
            bisection.hold(pending)
            return
        pending.lane = 0 if pending.attempt > 1 or request.sampled else 1 if request.turn else 2
        self.sent[pending.request_id] = pending
        self.placing.queue.lanes[pending.lane][pending] = None
        if pending.tree is not None and pending.tree.home is None:
            self.placing.hold_in_line(pending)
        self.replicas_changed()

    def under_way(self, client: object = None) -> list[PendingRequest]:
        """Return the requests that have not ended, in order; those of one client if it is given."""
        return [pending for pending in self._open if client is None or pending.client is client]

    def _dispatch(self) -> None:
        """Send what waits, in order, as far as replicas have room: one dispatch per replica."""
        self._dispatching, queue = False, self.placing.queue
        if not (any(queue.lanes) or queue.held) or self._lives.closed or self._lives.looks:
            return
        # 1. Find the replicas that are up and have room; nothing is sent while it is in doubt which are up.
        for replica in list(self._lives.up):
            if replica.process is not None:
                self._look_at(replica)
        if self._lives.looks:
            return
        # 2. Choose, as long as anybody has room.
        loop = asyncio.get_running_loop()
        self.placing.look(self._lives.open, len(self.replicas) == 1, loop.time())
        batches, refused = self.placing.assign()
        # 3. Send what was chosen.
        for pending, why in refused:
            self.end(pending, FinishReason.ABORT, why)
        for prepare in self.before_dispatch.values() if batches else ():
            prepare()
        for replica, batch in batches.items():
            for pending in batch:
                queue.lanes[pending.lane].pop(pending, None)
                pending.at, pending.replica = replica, replica.name or pending.replica
            if replica.in_flight == len(batch):  # it had nothing to do
                replica.last_active = loop.time()
            task = loop.create_task(self._serve(replica, batch))
            self._dispatches[task] = replica
            task.add_done_callback(self._dispatches.pop)

    async def _serve(self, replica: Replica, batch: list[PendingRequest]) -> None:
        """Run one engine call to its end, and give its chunks to their requests."""
        # 1. Ask for what is still wanted of it.
        unfinished, requests = dict[str, PendingRequest](), list[Request]()
        for pending in batch:
            if pending.at is replica:
                pending.started, self._engine_ids[pending.request_id] = True, replica
                unfinished[pending.request_id] = pending
                requests.append(pending.rest)
        if not requests:
            return
        loop, engine, failure = asyncio.get_running_loop(), replica.engine, None
        assert engine is not None
        self.dispatches += 1
        if replica.keeper is not None:
            self.placing.sent(requests, replica.keeper)
        replica.requests += len(requests)
        self._silence.begin(unfinished.values())
        if any(self.placing.queue.lanes):
            loop.call_soon(self.replicas_changed)  # asked once, it can say how many more it takes
        # 2. Give every chunk to its request.
        try:
            async for chunk in engine.generate(requests):
                now = loop.time()
                if len(self.replicas) > 1:
                    replica.measure_pace(len(chunk.ids), now)
                replica.tokens, replica.last_active = replica.tokens + len(chunk.ids), now
                if replica.looked_at:
                    self.placing.heard(replica)
                answered = unfinished.get(chunk.request_id)
                if answered is not None and answered.at is replica and answered.request_id == chunk.request_id:
                    self._take(answered, chunk, now)
                elif answered is None:  # else it was ended here, and its engine has not heard of that yet
                    logger.warning("the engine answered an unknown or ended request %r", chunk.request_id)
                if chunk.finish_reason is not None and unfinished.pop(chunk.request_id, None) is not None:
                    self._engine_ids.pop(chunk.request_id, None)  # from here on another request may have the id
                    if chunk.error is None:
                        replica.failures = replica.losses = 0  # whatever went wrong before is forgiven
                if any(self.placing.queue.lanes):
                    self.replicas_changed()
        except (Exception, asyncio.CancelledError) as error:  # whatever an engine raises is the engine's failure
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            name = type(error).__name__
            failure = error if isinstance(error, EngineError) else EngineError(f"{name}: {error}", kind=name)
        finally:
            for request_id in unfinished:
                self._engine_ids.pop(request_id, None)
        # 3. Whatever has no end now has failed.
        if not unfinished.keys().isdisjoint(self.sent):
            self._dispatch_failed(replica, engine, unfinished, failure)

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
        if pending.stopped or pending.in_parts:
            if chunk.finish_reason is None:
                self._engine_ids.abort_soon(pending.request_id)
            self._retries.go_on(pending)
        elif chunk.finish_reason is not None or chunk.error is not None:
            if (failure := pending.failed_by(chunk)) is not None:
                self._retries.failed(pending, failure, maybe_shared=isinstance(failure, ReplicaLost))
            else:
                self.end(pending, FinishReason(chunk.finish_reason or FinishReason.ABORT))

    def leave(self, pending: PendingRequest) -> None:
        """Take a request from where it is: its replica, or the queue."""
        if self.sent.get(pending.request_id) is pending:  # between two tries, another may have the id
            del self.sent[pending.request_id]
        pending.silent_until = None
        if pending.at is not None:
            pending.at.in_flight -= 1
            if pending.at.looked_at:
                self.placing.heard(pending.at)
            if pending.at.leaving:
                self._lives.look_again()
            pending.at = None
            if any(self.placing.queue.lanes):
                self.replicas_changed()
        else:
            self.placing.queue.remove(pending)

    def end(self, pending: PendingRequest, finish_reason: FinishReason, error: EngineError | None = None) -> None:
        """End a request, wherever it is."""
        self.leave(pending)
        if self._open.pop(pending, pending) is None and pending.tree is not None:
            self.placing.answered(pending)
        pending.end(finish_reason, error)
        if self._retries.bisection.busy:
            self._retries.bisection.go_on()

    # -- failures, and what else the replicas say ---------------------------------------------------------------------

    def _dispatch_failed(
        self, replica: Replica, engine: TokenSource, request_ids: Iterable[str], failure: EngineError | None
    ) -> None:
        """Try again what an engine has left of a dispatch; one that fails dispatch after dispatch is lost."""
        unfinished = [self.sent[request_id] for request_id in request_ids if request_id in self.sent]
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

    def replica_lost(self, replica: Replica, why: str) -> None:
        """Take back what a replica has: what its engine was asked for is tried again, the rest waits for another."""
        for task, at in self._dispatches.items():
            if at is replica and task is not asyncio.current_task():  # from here on others sample what it has
                task.cancel()
        returned: list[PendingRequest] = []  # what was taken out of the queue for nothing
        for pending in self._at(replica):
            if pending.started:
                replica.moved += 1
                if replica.state == "left":  # nothing has failed
                    self._retries.go_on(pending)
                else:
                    self._retries.failed(pending, ReplicaLost(why), maybe_shared=True)
            else:
                replica.in_flight -= 1
                pending.at = None
                returned.append(pending)
        self.placing.queue.put_back(returned)
        self.replicas_changed()

    def replica_is_silent(self, replica: Replica, seconds: float) -> None:
        """Give a silent replica up."""
        why = f"it has {replica.in_flight} request(s) and said nothing for {seconds:.0f} s"
        self._lose(replica, replica.engine, why)

    def request_is_silent(self, pending: PendingRequest, seconds: float) -> None:
        """Give up a try for which nothing comes."""
        self._engine_ids.abort_soon(pending.request_id)
        pending.silenced = True
        self._retries.failed(pending, EngineError(f"the engine sent nothing for {seconds:g} s; is it alive?"))

    def _look_at(self, replica: Replica) -> None:
        """Lose a replica if its engine is gone."""
        if replica.state == "up" and (failure := replica.failure) is not None:
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
        self._silence.begin(p for p in self.sent.values() if p.at is not None and p.started and not p.has_chunk)

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
            if pending.at is not None and pending.started:  # else it is not sent yet, or between tries
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
        if self._open or self._engine_ids:
            theirs = self.under_way(client)
            others = len(theirs) < len(self._open)
            await self._engine_ids.abort(n for n in self._engine_ids if not others or self.sent.get(n) in theirs)
            for pending in theirs:
                self.end(pending, FinishReason.ABORT)
        if self._open:
            return
        if self._retries.bisection.busy:
            self._retries.bisection.clear()
        self._silence.stop()
        if self.placing.residency is not None:
            self.placing.stop()
        if tasks := [*self._dispatches, *self._engine_ids.tasks]:
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
