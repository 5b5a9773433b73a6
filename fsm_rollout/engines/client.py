"""The client of an engine: the one ledger of requests under way.

Invariant: every submitted :class:`PendingRequest` ends exactly once, whatever the engine does; it holds every token
that the engine streamed for it, in order. All requests made in one pass of the event loop go to the engine in one call
(a *flush*), and so do all aborts; no request waits for another's end. Only the client retries requests: one
that failed, or that was lost with its replica, goes on from the tokens already streamed.

A request is given up only for failures of its own. What fails together is tried again together, then in parts
(:mod:`fsm_rollout.engines.bisection`), until the one is found that fails by itself. Nothing that an engine answers is
taken unchecked (:mod:`fsm_rollout.engines.answer_check`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import TYPE_CHECKING, SupportsIndex
from weakref import WeakSet

from msgspec.structs import replace

from fsm_rollout.concurrency.cancellation import being_cancelled
from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.engines.bisection import Bisection
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import FOR_GOOD, Chunk, Engine, ReplicaLost, Request, Weights, facts_of
from fsm_rollout.errors import EngineError, PromptTooLong
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import LAST_VERSION

if TYPE_CHECKING:
    from fsm_rollout.chat import ChatTemplate

logger = logging.getLogger(__name__)

# Seconds that an aborted request's last tokens are waited for (and that the engine has to take the abort).
ABORT_GRACE = 10.0


class EngineClient:
    """The only way to one engine. All methods are called on the scheduler's event loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        attempts: int = 3,
        backoff: float = 0.1,
        elsewhere: bool = False,
        queue_timeout: float = 600.0,
    ) -> None:
        self.engine = engine
        self.facts = facts_of(engine)
        self.attempts = attempts  # a request is given up after so many failures of its own
        self.backoff = backoff  # seconds before the second try; twice as long before each further one
        # Whether a request that a replica has failed is retried at another one, if there is one.
        self.elsewhere = elsewhere
        self.queue_timeout = queue_timeout
        self.dispatches = 0  # engine calls so far
        self.requests = 0  # requests submitted so far; over `dispatches` it is the mean batch
        self.paused = False
        self.before_dispatch: Callable[[], None] | None = None  # called before requests go out; must not block or raise
        self.chats: dict[object, ChatTemplate] = {}  # the chat templates of this engine's model, by settings
        # All requests that have not ended, in order: also those between two tries.
        self._open: dict[PendingRequest, None] = {}
        # Those that the engine has, or is about to get, by the id of the present try.
        self._sent: dict[str, PendingRequest] = {}
        self._waiting: list[PendingRequest] = []  # those of them that go out with the next flush
        # The ids that the engine may still have: also of requests that it did not end in time.
        self._engine_ids: set[str] = set()
        self._aborts: list[str] = []  # the ids that the engine is told to end in this pass of the loop
        # It is given up, too, after so many tries in all, those lost with a replica included (a pool allows more).
        self._max_tries: int = getattr(engine, "attempts", attempts)
        self._bisection = Bisection(self)  # requests that failed together, which are tried again in parts
        self._warned: set[str | None] = set()  # the kinds of failures that have been logged
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None  # looks for requests that the engine is silent about
        self._updating = asyncio.Lock()  # held while weights are loaded
        self._pausing = asyncio.Lock()  # held while the engine is being paused or resumed
        self._reasons: set[str] = set()  # why the engine is paused
        self._paused_too: WeakSet[EngineClient] = WeakSet()  # further clients of the engine, for evaluations
        self._sleep_logged = False

    @property
    def weight_version(self) -> int:
        """How many policy updates the present weights have had."""
        return self.engine.weight_version

    @property
    def serves_another_loop(self) -> bool:
        """Whether the engine belongs to an event loop that still lives and is not the running one."""
        loop: asyncio.AbstractEventLoop | None = getattr(self.engine, "loop", None)
        return loop is not None and loop is not asyncio.get_running_loop() and not loop.is_closed()

    def submit(self, request: Request, deadline: Deadline | None = None) -> PendingRequest:
        """Queue a request (under another id where its own is under way); ``deadline`` runs from its first chunk."""
        request_id = self._free_id(request.request_id)
        pending = PendingRequest(
            request, asyncio.get_running_loop().time(), deadline, request_id=request_id, paused=self.paused
        )
        pending.keep_time()
        if "asleep" in self._reasons and not self._sleep_logged:
            self._sleep_logged = True
            logger.warning("the engine is asleep: generations wait until it is woken")
        self.requests += 1
        self._open[pending] = None
        self.enqueue(pending)
        return pending

    # -- pauses and weights ---------------------------------------------------------------------------------------

    async def pause(self, reason: str = "asked") -> None:
        """Let the engine sample nothing until :meth:`resume`; timeouts of what waits for it stand still.

        ``reason``: it goes on when every reason has been taken back.
        """
        async with self._pausing:
            self._reasons.add(reason)
            if not self.paused:
                self._set_paused(True)
                try:
                    await self.engine.pause()
                except BaseException:
                    self._reasons.discard(reason)
                    self._set_paused(False)
                    raise

    async def resume(self, reason: str = "asked") -> None:
        """Take a reason for :meth:`pause` back, and go on if it was the last."""
        async with self._pausing:
            self._reasons.discard(reason)
            if self.paused and not self._reasons:
                try:
                    await self.engine.resume()
                finally:  # an engine that cannot be resumed has failed; the deadlines run again all the same
                    self._set_paused(False)

    def paused_with(self, further: EngineClient) -> EngineClient:
        """Return a further client of the same engine, whose timeouts stand still while this one is paused."""
        self._paused_too.add(further)
        further._set_paused(self.paused)
        return further

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused
        for further in self._paused_too:
            further._set_paused(paused)
        self._sleep_logged = False
        for pending in self._open:
            pending.paused = paused
            pending.keep_time()
            if paused:
                pending.silent_until = None
            elif pending.request_id in self._sent and pending not in self._waiting and not pending.has_chunk:
                self._watch([pending])

    async def update_weights(self, weights: Weights, version: int | None = None) -> int:
        """Load new weights (a model folder, or tensors by name) while everything waits; return their version.

        Generations under way go on afterwards, and timeouts stand still meanwhile; tools and interactions go on all
        the time.

        Raises:
            EngineError: they are neither, or older than the present ones, or ``version`` is no int32; or the engine
                could not load them. It goes on with the old ones.
        """
        if not isinstance(weights, Mapping | str | PathLike):
            raise EngineError(f"new weights are a model's folder, or tensors by name; got a {type(weights).__name__}")
        present = self.engine.weight_version
        coming = present + 1 if version is None else version
        if not isinstance(coming, SupportsIndex) or coming.__index__() > LAST_VERSION:
            raise EngineError(f"weight versions are whole numbers up to {LAST_VERSION:,}, got {coming!r}")
        if coming < present:
            raise EngineError(f"weights of version {coming} cannot follow version {present}")
        async with self._updating:
            await self.pause("update")
            try:
                # NumPy has whole numbers of its own. Without one, the engine counts from what it has by then.
                return await self.engine.update_weights(weights, None if version is None else version.__index__())
            finally:
                await self.resume("update")

    def waits_of(self, trajectory_id: str) -> list[PendingRequest]:
        """Return the requests of a trajectory that have not ended."""
        return [pending for pending in self._open if pending.request.trajectory_id == trajectory_id]

    def sampling_since(self) -> dict[tuple[str, str], int]:
        """Return, by trajectory and context, the oldest weight version among the tokens of generations under way."""
        oldest: dict[tuple[str, str], int] = {}
        for pending in self._open:
            for _, version in pending.versions:
                name = pending.request.trajectory_id, pending.request.context
                oldest[name] = min(version, oldest.get(name, version))
        return oldest

    # -- requests -------------------------------------------------------------------------------------------------

    def _free_id(self, request_id: str, number: int = 1) -> str:
        """Return an id that no request under way has, and none that the engine is still aborting."""
        name = request_id if number == 1 else f"{request_id}#{number}"
        while name in self._sent or name in self._engine_ids:
            number += 1
            name = f"{request_id}#{number}"
        return name

    def enqueue(self, pending: PendingRequest, *, on_trial: bool = False) -> None:
        """Send a request with the next flush; while another is tried by itself, afterwards."""
        if pending.done.is_set():  # ended between two tries
            return
        if self._bisection.isolates and not on_trial:
            self._bisection.hold(pending)
            return
        self._sent[pending.request_id] = pending
        self._waiting.append(pending)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self.before_dispatch is not None:
            self.before_dispatch()
        batch, self._waiting = self._waiting, []
        if batch:
            self._spawn(self._serve(batch))

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watch(self, batch: Sequence[PendingRequest]) -> None:
        """Give up tries for which the engine sends nothing for ``queue_timeout``, unless it is paused."""
        silent_until = asyncio.get_running_loop().time() + self.queue_timeout
        for pending in batch:
            pending.silent_until = None if self.paused or pending.lost else silent_until
        if any(pending.silent_until is not None for pending in batch):
            self._check_silence_by(silent_until)

    def _check_silence_by(self, when: float) -> None:
        """Look for silent requests then, at the latest: one timer serves all, since they wait equally long."""
        if self._timer is None or self._timer.when() > when:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(when, self._check_silence)

    def _check_silence(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._timer is not None:
            now = max(now, self._timer.when())  # a loop may be early by its clock's resolution
        self._timer = None
        watched = [(pending.silent_until, pending) for pending in self._sent.values()]
        for silent_until, pending in watched:
            if silent_until is not None and silent_until <= now:
                self._abort_soon(pending.request_id)
                error = EngineError(f"the engine sent nothing for {self.queue_timeout:g} s; is it alive?")
                self._failed(pending, error)
            elif silent_until is not None:
                self._check_silence_by(silent_until)

    async def _serve(self, batch: Sequence[PendingRequest]) -> None:
        """Run one engine call to its end and route its chunks."""
        loop = asyncio.get_running_loop()
        # 1. Ask for what has not been aborted since the flush: the engine was told then, and knew nothing of it.
        for pending in batch:
            if pending.aborted:
                self._end(pending, FinishReason.ABORT)
        batch = [pending for pending in batch if not pending.done.is_set()]
        if not batch:
            return
        self.dispatches += 1
        open_ids = {pending.request_id: pending for pending in batch}
        self._engine_ids |= open_ids.keys()
        batch_ids = list(open_ids)
        failure: EngineError | None = None
        for pending in batch:
            pending.has_chunk = pending.has_tokens = False
        self._watch(batch)
        # 2. Give every chunk to its request.
        try:
            async for chunk in self.engine.generate([self._ask(pending) for pending in batch]):
                answered = self._sent.get(chunk.request_id)
                if answered is None or chunk.request_id not in open_ids:
                    logger.warning("the engine answered an unknown or ended request %r", chunk.request_id)
                elif self._take(answered, chunk, loop.time()):
                    open_ids.pop(chunk.request_id, None)
                if chunk.finish_reason is not None:
                    self._engine_ids.discard(chunk.request_id)
        except (Exception, asyncio.CancelledError) as error:  # whatever an engine raises is the engine's failure
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            name = type(error).__name__
            failure = error if isinstance(error, EngineError) else EngineError(f"{name}: {error}", kind=name)
        # 3. Whatever has no end now has failed.
        self._engine_ids.difference_update(batch_ids)
        for pending in [self._sent[request_id] for request_id in open_ids if request_id in self._sent]:
            unfinished = EngineError(f"the engine never finished request {pending.request_id}")
            self._failed(pending, failure or unfinished, maybe_shared=True)

    def _ask(self, pending: PendingRequest) -> Request:
        if pending.request_id == pending.request.request_id:
            return pending.request
        request = pending.request.continued(pending.ids, pending.request_id)
        avoids = pending.replica if self.elsewhere and pending.failures else ""
        return replace(request, on_trial=pending in self._bisection, avoids=avoids)

    def _take(self, pending: PendingRequest, chunk: Chunk, now: float) -> bool:
        """Give a chunk to its request; return whether this engine call is over for it."""
        try:
            pending.take(chunk, now, self.facts.vocabulary)
        except EngineError as error:
            self._abort_soon(pending.request_id)
            self._end(pending, FinishReason.ABORT, error)  # not tried again: an engine that miscounts would do so again
            return True
        if self._bisection.busy:
            self._bisection.go_on()
        if chunk.error is not None:
            failure = _failure(chunk.error)
            if isinstance(failure, PromptTooLong) or failure.kind in FOR_GOOD:
                self._end(pending, FinishReason.ABORT, failure)
            else:
                self._failed(pending, failure, maybe_shared=isinstance(failure, ReplicaLost))
        elif chunk.finish_reason == FinishReason.ABORT and not pending.aborted:
            self._failed(pending, EngineError(f"the engine aborted request {pending.request_id} by itself"))
        elif chunk.finish_reason is not None and not (pending.ids or pending.aborted):
            self._failed(pending, EngineError(f"the engine ended request {pending.request_id} without a single token"))
        elif chunk.finish_reason is not None:
            self._end(pending, FinishReason(chunk.finish_reason))
        return chunk.finish_reason is not None or chunk.error is not None

    def _failed(self, pending: PendingRequest, error: EngineError, *, maybe_shared: bool = False) -> None:
        """Try a request again from where its tokens stand, or give it up.

        ``maybe_shared``: another request may be the cause. While others are under way, it is not counted against this
        one: they are tried in parts until the cause is found.
        """
        if pending.done.is_set():
            return
        self._sent.pop(pending.request_id, None)
        pending.silent_until = None
        pending.lost = isinstance(error, ReplicaLost)
        if (ended := pending.ended_as) is not None:  # all tokens have arrived; only the finish reason was lost
            self._end(pending, ended)
            return
        pending.waits = True
        pending.keep_time()
        pending.has_tokens = False
        if maybe_shared and (self._sent or self._bisection.busy):
            self._bisection.add(pending, error)
            if not self._sent:  # there is nobody left who could fail with it
                self._bisection.judge()
        else:
            self.failed_alone(pending, error)

    def failed_alone(self, pending: PendingRequest, error: EngineError) -> None:
        """Count a failure as the request's own, and try it again unless it has been tried often enough."""
        if pending.done.is_set():
            return
        if pending.lost:
            pending.losses += 1
        else:
            pending.failures += 1
        tries = pending.failures + pending.losses
        request = pending.request
        culprit = f" (request {request.request_id} of {len(request.ids):,} tokens, by itself)" if pending.shared else ""
        if pending.failures >= self.attempts:
            if culprit:
                error = EngineError(f"{error}{culprit}", kind=error.kind or type(error).__name__)
            self._end(pending, FinishReason.ABORT, error)
        elif tries >= self._max_tries:
            message = f"EngineError: {tries} tries failed, the last one: {error}{culprit}"
            given_up = EngineError(message, kind="EngineError")
            given_up.failure = "infrastructure" if pending.lost else None
            self._end(pending, FinishReason.ABORT, given_up)
        else:
            self.try_again(pending, error)

    def try_again(self, pending: PendingRequest, error: EngineError) -> None:
        """Ask for the rest of a request: at once where another replica may have it, else later each time."""
        failed_id = self.next_try(pending)
        if not pending.lost:
            # Only the first failure of a kind is a warning.
            level = logging.INFO if error.kind in self._warned else logging.WARNING
            self._warned.add(error.kind)
            logger.log(level, "request %s failed (%s); trying again", failed_id, str(error).partition("\n")[0])
        delay = 0.0 if pending.lost else self.backoff * 2 ** max(0, pending.failures - 1)
        if pending in self._bisection:  # it may harm others
            self._bisection.queue([pending], delay)
        elif delay:
            asyncio.get_running_loop().call_later(delay, self.enqueue, pending)
        else:
            self.enqueue(pending)

    def next_try(self, pending: PendingRequest) -> str:
        """Give the next try of a request its id, and return that of the one before."""
        before = pending.request_id
        pending.attempt += 1
        pending.request_id = self._free_id(pending.request.request_id, pending.attempt)
        return before

    def _end(self, pending: PendingRequest, finish_reason: FinishReason, error: EngineError | None = None) -> None:
        self._sent.pop(pending.request_id, None)
        self._open.pop(pending, None)
        pending.end(finish_reason, error)
        if self._bisection.busy:
            self._bisection.go_on()

    # -- aborting requests -----------------------------------------------------------------------------------------

    async def abort(self, pending: PendingRequest) -> None:
        """End a request soon and wait (a bounded time) for its last tokens; it is done afterwards."""
        if pending.done.is_set():
            return
        pending.aborted = True
        if pending in self._waiting or pending.request_id not in self._sent:  # not sent yet, or between tries
            self._waiting = [other for other in self._waiting if other is not pending]
            self._end(pending, FinishReason.ABORT)
            return
        try:
            self._abort_soon(pending.request_id)
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_GRACE):
                    await pending.done.wait()
        finally:
            self._end(pending, FinishReason.ABORT)

    def _abort_soon(self, request_id: str) -> None:
        """Have the engine end a request: all that are ended in one pass of the loop in one call."""
        self._aborts.append(request_id)
        if len(self._aborts) == 1:
            asyncio.get_running_loop().call_soon(self._flush_aborts)

    def _flush_aborts(self) -> None:
        request_ids, self._aborts = self._aborts, []
        self._spawn(self._abort_quietly(request_ids))

    async def _abort_quietly(self, request_ids: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(ABORT_GRACE):
                await self.engine.abort(list(request_ids))
        except Exception:  # an engine that cannot even abort has failed; its requests end all the same
            logger.warning("the engine failed to abort %s", request_ids, exc_info=True)

    async def drain(self) -> None:
        """End every request and every task; the engine itself stays open (whoever made it closes it)."""
        if self._engine_ids:
            await self._abort_quietly(sorted(self._engine_ids))
        self._bisection.clear()
        for pending in list(self._open):
            self._end(pending, FinishReason.ABORT)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _failure(error: str) -> EngineError:
    """Return the error of a chunk, ``Class: message``, as an exception."""
    kind, colon, message = error.partition(": ")
    if kind == "ReplicaLost":
        return ReplicaLost(message)
    if kind == "PromptTooLong":
        return PromptTooLong(error)
    return EngineError(error, kind=kind if colon and kind.isidentifier() else None)
