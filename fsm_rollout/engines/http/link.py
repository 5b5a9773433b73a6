"""The requests under way in one server, and the orders given to it, on a thread with an event loop of its own.

Invariants:

1. Every request taken gets its last chunk or its dispatch's error, once, on the event loop that it came from. All that
   arrives together reaches a loop in one callback.
2. While the engine is held (paused, asleep, being updated) the server has no request of ours. Holding ends what is
   under way with all that was sampled, and releasing sends the rest of it again, its ids grown by what was sampled. So
   every token that arrives was sampled by the present weights, nothing sampled is ever lost, and no cache outlives an
   update. (SGLang's own pause keeps requests inside; it then says which weights sampled which token only at a request's
   end.)
3. A server that was lost is not trusted again: it may have been restarted, with other weights. Whoever owns the engine
   builds another, which meets the server anew and is given the weights. Only one whose process is ours, and lives, has
   the weights that it had.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Protocol, TypeVar

from msgspec.structs import replace

from fsm_rollout.concurrency.tasks import Tasks
from fsm_rollout.engines.chunk_stream import ChunkStream, hand_over, refusal
from fsm_rollout.engines.http.endpoint import NO_NUMBER, AnswerPart, Endpoint, Entry
from fsm_rollout.engines.pending import settled
from fsm_rollout.engines.protocol import Chunk, HalfLoaded, Load, ReplicaLost, Request
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import Ids, Logprobs, Note, NoteKind, routed_experts

T = TypeVar("T")

LAST_TOKENS = 2.0  # seconds that a server has to hand over what was sampled when the engine is closed in mid-generation
RECALL_WITHIN = 30.0  # seconds after which a request that the server was asked to end, and does not, is left behind
HEALTHY_WITHIN = 30.0  # seconds that a server has to say that it is well
EXIT_WITHIN = 5.0  # seconds in which the process of a server that broke a connection is seen to have ended


class OwnProcess(Protocol):
    """The process of a server that was started here."""

    exited: Future[int]

    def failure(self) -> EngineError:
        """Say why it has ended."""

    def kill(self) -> object:
        """End it soon."""

    def stop(self) -> None:
        """End it, and wait for that."""


class ServerLink(threading.Thread):
    """See the module. Holds no reference to the engine, so that can be collected.

    Args:
        endpoint: the server.
        replica: a name that every chunk carries.
        vocabulary: how many tokens the model has, where that is known.
        process: that of a server that is ours alone.
    """

    def __init__(
        self, endpoint: Endpoint, replica: str, vocabulary: int | None, process: OwnProcess | None = None
    ) -> None:
        super().__init__(name="fsm-rollout-server", daemon=True)
        self.version = 0  # that of the present weights
        self.failure: EngineError | None = None  # why no request will ever be taken again
        self._endpoint = endpoint
        self._process = process
        self._replica = replica
        self._vocabulary = vocabulary
        self.entries: dict[str, Entry] = {}  # what is under way, by its ids
        self.ended: deque[tuple[float, Entry]] | None = None  # what has ended, and when, for who wants to know
        self._taking = threading.Lock()  # guards what `submit` looks at: `entries` and `failure`
        self._chunks: list[tuple[ChunkStream, Chunk]] = []  # what has come in this pass of the loop
        self._held: set[str] = set()  # why the server may have no requests: "paused", "asleep", "updating"
        # All ids have one length: SGLang aborts every request whose id *begins* with the one that it is given.
        prefix = secrets.token_hex(4)
        self._rids = (f"{prefix}-{number:012d}" for number in itertools.count())
        self._sent: dict[Entry, asyncio.Task[None]] = {}  # what the server has at present
        self._tasks, self._ends = Tasks(), Tasks()  # the latter end sessions
        # Gives up what is under way when the process has not ended by then.
        self._ending: asyncio.TimerHandle | None = None
        self._enough = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self.start()

    # -- from any thread ---------------------------------------------------------------------------------------------

    def do(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Run something on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """End the thread and the process; requests under way get no further chunks."""
        if self._process is not None:
            self._process.stop()
        if self.is_alive():
            with suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._enough.set)
            if self is not threading.current_thread():
                self.join()

    def submit(self, requests: Sequence[Request]) -> ChunkStream:
        """Start a dispatch; EngineError for an id that is under way, or an engine that has failed."""
        entries, longest = [], self._endpoint.max_context
        with self._taking:
            if self.failure is not None:
                raise self.failure
            stream = ChunkStream(requests, self.abandon, self.entries)
            for request in requests:
                error = refusal(request, longest, self._vocabulary)
                if error is not None:
                    stream.put(self._last_chunk(request, FinishReason.ABORT, error))
                    continue
                room = min(request.sampling.max_tokens, longest - len(request.ids))
                entry = Entry(request, stream, request.ids[:], room, routed=request.routed)
                self.entries[request.request_id] = entry
                entries.append(entry)
        if entries:
            self._loop.call_soon_threadsafe(self._launch, entries)
        return stream

    def abandon(self, request_ids: Iterable[str]) -> None:
        """End those of these requests that are under way, soon."""
        if under_way := [request_id for request_id in request_ids if request_id in self.entries]:
            with suppress(RuntimeError):  # the loop is closed, and with it everything
                self._loop.call_soon_threadsafe(self._abort, under_way)

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Have the server keep nothing more for these, soon."""
        if self._endpoint.keeps_sessions and self.failure is None:
            with suppress(RuntimeError):  # the loop is closed, and with it everything
                self._loop.call_soon_threadsafe(self._end_soon, list(sessions))

    def load(self) -> Load:
        """Return how many have been admitted, how many wait for that, and the tokens of the former."""
        entries = list(self.entries.values())
        admitted = [len(entry.ids) for entry in entries if entry.admitted]
        waiting = len(entries) - len(admitted)
        return Load(len(admitted), waiting, used_tokens=sum(admitted), capacity=self._endpoint.capacity)

    # -- the thread --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        if self._process is not None:
            self._tasks.begin(self._await_exit(self._process))
        await self._enough.wait()
        await self._endpoint.aclose()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _launch(self, entries: Iterable[Entry]) -> None:
        """Send what the server does not have, unless it is held."""
        for entry in () if self._held else entries:
            if entry in self._sent or self.entries.get(entry.request.request_id) is not entry:
                continue
            if entry.stopped or not entry.room:  # the end came just as it was taken back
                self._end(entry, FinishReason.STOP if entry.stopped else FinishReason.LENGTH)
                continue
            entry.rid = next(self._rids)
            self._sent[entry] = self._tasks.begin(self._run_entry(entry))

    async def _run_entry(self, entry: Entry) -> None:
        """Send one request, once the server knows which sessions have left it room, and pass on what comes."""
        before, name = entry.sampled, self._endpoint.name
        reason, message, error, scored = FinishReason.ABORT, None, None, False
        try:
            if self._ends:
                await asyncio.wait(self._ends)
            body, trace = self._endpoint.body(entry), entry.request.trace
            async with aclosing(self._endpoint.stream(entry.ids[:], body, trace)) as parts:
                async for part in parts:
                    # Parts may hold the whole answer so far, or what is new; their ends are the same.
                    count = len(part.ids) if part.sampled is None else before + part.sampled - entry.sampled
                    if entry.request.scored_from:
                        scored = self._take_scores(entry, part) or scored
                    elif count > 0:
                        self._take(entry, part, count)
                    if part.experts is not None:
                        self._take_experts(entry, part)
                    if part.finish_reason is not None:
                        reason, message = part.finish_reason, part.message
            if reason is not FinishReason.ABORT and entry.request.scored_from:
                if not scored:
                    raise EngineError(f"{name} gave no log-probs of the ids that it was sent: it can be no teacher")
            elif reason is not FinishReason.ABORT and entry.sampled == before:  # else an empty answer would be one
                raise EngineError(f"{name} ended the request with '{reason}' and without a token")
        except ReplicaLost as failure:
            self._lost(failure)
            return
        except Exception as failure:  # whatever a server says of this request is this request's end
            reason, error = FinishReason.ABORT, f"{type(failure).__name__}: {failure}"
        else:
            if reason is FinishReason.ABORT and not entry.aborted:
                if self._held:  # taken back
                    return
                error = f"EngineError: {name} gave the request up: {message}"
        finally:
            self._sent.pop(entry, None)
        self._end(entry, reason, error)

    def _take(self, entry: Entry, part: AnswerPart, count: int) -> None:
        """Pass on the last ``count`` tokens that a part brought; the first ones say that it was admitted."""
        request_id = entry.request.request_id
        ids = Ids("i", part.ids[-count:])
        logprobs = Logprobs("f", [NO_NUMBER if value is None else value for value in part.logprobs[-count:]])
        if not len(ids) == len(logprobs) == count:
            raise EngineError(f"{self._endpoint.name} sent {len(ids)} tokens and {len(logprobs)} logprobs of {count}")
        notes: tuple[Note, ...] = ()
        logprobs = settled(logprobs, request_id)
        if part.masks:
            masks = part.masks[-count:]
            counts, values = array("i", map(len, masks)), array("i", itertools.chain.from_iterable(masks))
            notes = (Note(NoteKind.SAMPLING_MASK, len(entry.ids), counts, values),)
        if not entry.admitted:
            entry.admitted = True
            admission = Chunk(request_id, weight_version=self.version, replica=self._replica)
            self._put(entry, replace(admission, cached_tokens=part.cached_tokens))
        entry.ids += ids
        entry.sampled += count
        entry.room -= count
        self._put(entry, Chunk(request_id, ids, logprobs, self.version, replica=self._replica, notes=notes))

    def _take_scores(self, entry: Entry, part: AnswerPart) -> bool:
        """Pass the log-probs of a request's own ids on; return whether the part had them."""
        if part.scores is not None:
            scores, count = part.scores, len(entry.request.ids) - entry.request.scored_from
            if len(scores.logprobs) > count:  # of the whole prompt
                scores = replace(scores, logprobs=scores.logprobs[-count:])
            chunk = Chunk(entry.request.request_id, weight_version=self.version, replica=self._replica)
            self._put(entry, replace(chunk, cached_tokens=part.cached_tokens, scores=scores))
        return part.scores is not None

    def _take_experts(self, entry: Entry, part: AnswerPart) -> None:
        """Pass on the experts that all tokens but the last were routed to, those known before apart."""
        assert part.experts is not None
        tokens = len(entry.ids) - 1 - entry.routed
        if len(part.experts) != tokens:
            sent = len(part.experts)
            raise EngineError(f"{self._endpoint.name} sent the routed experts of {sent} tokens of {tokens}")
        note = routed_experts(entry.routed, part.experts)
        entry.routed, name = note.end, entry.request.request_id
        self._put(entry, Chunk(name, weight_version=self.version, replica=self._replica, notes=(note,)))

    def _end(self, entry: Entry, reason: FinishReason, error: str | None = None) -> None:
        if self.entries.get(entry.request.request_id) is entry:
            del self.entries[entry.request.request_id]
            if self.ended is not None:
                self.ended.append((self._loop.time(), entry))
            self._put(entry, self._last_chunk(entry.request, reason, error))

    def _last_chunk(self, request: Request, reason: FinishReason, error: str | None) -> Chunk:
        name, version = request.request_id, self.version
        return Chunk(name, weight_version=version, finish_reason=reason, error=error, replica=self._replica)

    def _put(self, entry: Entry, chunk: Chunk) -> None:
        if not self._chunks:
            self._loop.call_soon(self._flush)
        self._chunks.append((entry.stream, chunk))

    def _flush(self) -> None:
        chunks, self._chunks = self._chunks, []
        hand_over(chunks, self._unheard)

    def _unheard(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sample nothing for a loop that is closed."""
        self._abort([request_id for request_id, entry in self.entries.items() if entry.stream.loop is loop])

    def _abort(self, request_ids: Iterable[str]) -> None:
        """End these with what they have."""
        entries = [self.entries[request_id] for request_id in request_ids if request_id in self.entries]
        if entries := [entry for entry in entries if not entry.aborted]:
            for entry in entries:
                entry.aborted = True
            self._tasks.begin(self._end_aborted(entries))

    async def _end_aborted(self, entries: Collection[Entry]) -> None:
        await self._recall(entries)
        for entry in entries:
            self._end(entry, FinishReason.ABORT)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def _end_soon(self, sessions: list[str]) -> None:
        self._ends.begin(self._end_sessions(sessions))

    async def _end_sessions(self, sessions: list[str]) -> None:
        with suppress(EngineError):  # a server that is gone keeps nothing
            for session in sessions:
                await self._endpoint.end_session(session)

    # -- holds -------------------------------------------------------------------------------------------------------

    async def _recall(self, entries: Collection[Entry], *, everything: bool = False) -> None:
        """Have the server end these; asked again and again, as it may forget what it is asked before it has them."""
        delay = 0.02
        with suppress(TimeoutError):
            async with asyncio.timeout(RECALL_WITHIN):
                while running := {entry.rid: self._sent[entry] for entry in entries if entry in self._sent}:
                    if not await self._endpoint.abort(running, everything=everything):
                        break
                    await asyncio.wait(running.values(), timeout=delay)
                    delay = min(2 * delay, 1.0)
        left_behind = [self._sent[entry] for entry in entries if entry in self._sent]
        for task in left_behind:
            task.cancel()  # which closes its connection
        await asyncio.gather(*left_behind, return_exceptions=True)

    async def hold(self, why: str) -> None:
        """Take everything back from the server; when this returns, everything sampled has been sent on."""
        self._held.add(why)
        await self._recall(list(self.entries.values()), everything=True)
        self._flush()

    async def release(self, why: str) -> None:
        """Go on, unless there is another reason not to."""
        self._held.discard(why)
        self._launch(list(self.entries.values()))

    async def sleep(self) -> None:
        """Have the server give memory back; EngineError when requests are under way and the engine is not paused."""
        if self.entries and "paused" not in self._held:
            raise EngineError(f"{len(self.entries)} request(s) are under way; pause the engine before it sleeps")
        if "asleep" not in self._held:
            async with self._changing("falling asleep"):
                await self._endpoint.sleep()
                self._held.add("asleep")

    async def wake(self) -> None:
        """Have it take the memory again."""
        if "asleep" in self._held:
            async with self._changing("waking"):
                await self._endpoint.wake()
                self._held.discard("asleep")

    async def update(self, step: Callable[[], Awaitable[int | None]]) -> None:
        """Have ``step`` load weights while the server has no request of ours; they are of the version it returns.

        ``None``: there is more to come, and nothing is sampled until there is a version.

        Raises:
            EngineError: they were refused, and the server has its old ones. HalfLoaded: it has a part of them; as for
                ``None``. ReplicaLost: nobody knows which it has.
        """
        async with self._changing("told"):
            try:
                version = await step()
            except HalfLoaded:
                self._held.add("updating")
                raise
            if version is None:
                self._held.add("updating")
            else:
                self._held.discard("updating")
                self.version = version

    @asynccontextmanager
    async def _changing(self, why: str) -> AsyncIterator[None]:
        """Hold while the server is told to change; it is given up when nobody knows whether it has."""
        try:
            await self.hold(why)
            try:
                yield
            except BaseException as error:
                lost = isinstance(error, ReplicaLost) and not isinstance(error, HalfLoaded)
                if lost or not isinstance(error, EngineError):
                    broken = f"an order to {self._endpoint.url} broke off, so nobody knows its weights and memory"
                    self._give_up(EngineError(f"{broken}: {error or type(error).__name__}"), for_good=True)
                    if self._process is not None:
                        self._process.kill()
                raise
        finally:
            await self.release(why)

    # -- losses and the end ------------------------------------------------------------------------------------------

    async def ping(self) -> None:
        """Return if the server is there: a machine that is gone breaks no connection. ReplicaLost: it is not.

        A process of our own is known to be there, however busy it is.
        """
        if self.failure is not None:
            raise ReplicaLost(str(self.failure))
        if self._process is None:
            await self._endpoint.call(self._endpoint.health, within=HEALTHY_WITHIN)

    def _lost(self, error: EngineError) -> None:
        """End what is under way: the server has failed."""
        if self._process is None:
            self._give_up(error, for_good=True)
        elif self._ending is None:  # a process that is about to end says why, and :meth:`_await_exit` hears of that
            self._ending = self._loop.call_later(EXIT_WITHIN, self._give_up, error)

    async def _await_exit(self, process: OwnProcess) -> None:
        """Notice the end of the process, also while no request is under way."""
        await asyncio.shield(asyncio.wrap_future(process.exited))
        self._give_up(process.failure(), for_good=True)

    def _give_up(self, error: EngineError, *, for_good: bool = False) -> None:
        """End everything under way with ``error``, and (``for_good``) refuse all that comes later with it."""
        with self._taking:
            if for_good and self.failure is None:
                self.failure = error
            entries, self.entries = self.entries, {}
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._flush()  # what has come belongs to those who asked
        for task in self._sent.values():
            if task is not asyncio.current_task(self._loop):
                task.cancel()
        self._sent.clear()
        hand_over([(stream, error) for stream in dict.fromkeys(e.stream for e in entries.values())], self._unheard)

    async def close(self, error: EngineError) -> None:
        """End everything under way with "abort" and with what it has; refuse all that comes later with ``error``."""
        if self.entries:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_TOKENS):
                    await self.hold("paused")
        for entry in list(self.entries.values()):
            self._end(entry, FinishReason.ABORT)
        if self._ends:
            await asyncio.wait(self._ends, timeout=LAST_TOKENS)
        self._give_up(error, for_good=True)
