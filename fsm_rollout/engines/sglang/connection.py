"""The requests under way in one SGLang server, and the orders given to it, on a thread with an event loop of its own.

Invariants:

1. Every request taken gets its last chunk or its dispatch's error, once, on the event loop that it came from. All that
   arrives together reaches a loop in one callback.
2. While the engine is held (paused, asleep, being updated) SGLang has no request of ours. Holding ends what is under
   way with all that was sampled, and releasing sends the rest of it again, its ids grown by what was sampled. So every
   token that arrives was sampled by the present weights, nothing sampled is ever lost, and no cache outlives an update.
   (SGLang's own pause keeps requests inside; it then says which weights sampled which token only at a request's end.)
3. A logprob is that of the distribution which the token was sampled from: SGLang's own is after temperature but before
   top_k and top_p, so where these cut, the renormalised one of its sampling mask is taken instead.
4. After a lost connection the server is asked for its weight version before it gets another request. One that was
   restarted is given our last weights again, or is an error. A server of our own does not come back: with its process
   the connection is gone for good.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import math
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fsm_rollout.engines.chunk_stream import ChunkStream, check_unique, fail_all, hand_over, refusal
from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.engines.sglang.server import MEMORY_WITHIN, Meta, Server, WeightsRefused
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import LAST_VERSION, Ids, Note, NoteKind, routed_experts

if TYPE_CHECKING:
    from fsm_rollout.engines.sglang.process import ServerProcess

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_EVERY = 5.0  # seconds between two looks whether a server that owes answers is still there
LAST_TOKENS = 2.0  # seconds that a server has to hand over what was sampled when the engine is closed in mid-generation
RECALL_WITHIN = 30.0  # seconds after which a request that SGLang was asked to end, and does not, is left behind
MISSING_FOR = 30.0  # seconds after which a server that does not answer these is given up
# Seconds without a word about any request after which a server that has some is given up, however healthy it says it
# is.
SILENT_FOR = 300.0
READY_EVERY = 0.1  # seconds between two looks whether a server that starts is ready
EXIT_WITHIN = 5.0  # seconds in which the process of a server that broke a connection is seen to have ended


@dataclass(slots=True, eq=False)
class Entry:
    """One request under way."""

    request: Request
    stream: ChunkStream
    ids: Ids  # the prompt, and what has been sampled
    room: int  # how many tokens may still be sampled
    since: float
    routed: int = 0  # of how many of the first `ids` the routed experts are known
    sampled: int = 0
    admitted: bool = False
    rid: str = ""  # what SGLang calls it at present
    task: asyncio.Task[None] | None = None  # runs while SGLang has the request
    aborted: bool = False

    @property
    def stopped(self) -> bool:
        """Whether the last token is one that ends the answer."""
        sampling = self.request.sampling
        return bool(self.sampled) and not sampling.ignore_eos and self.ids[-1] in sampling.stop_ids


class Connection(threading.Thread):
    """See the module. Holds no reference to the engine, so that can be collected.

    Args:
        server: where to reach it.
        replica: a name that every chunk carries.
        vocabulary: how many tokens the model has, where that is known.
        experts: how many layers the model has, and how many experts of each a token is routed to, where that is known.
        process: that of a server that is ours alone.
    """

    def __init__(
        self,
        server: Server,
        replica: str,
        vocabulary: int | None,
        experts: Sequence[int | None] = (),
        process: ServerProcess | None = None,
    ) -> None:
        super().__init__(name="fsm-rollout-sglang", daemon=True)
        self.server = server
        self.max_context = 0  # the longest input plus output, in tokens
        self.version = 0  # that of the present weights
        self.failure: EngineError | None = None  # why no request will ever be taken again
        self._process = process
        self._replica = replica
        self._vocabulary = vocabulary
        self._experts = experts
        self._says_experts = False  # whether the server says which experts tokens were routed to
        self._mask_tokens = 0  # the longest sampling mask that the server gives
        self._memory = ["kv_cache"]  # what the server gives back while it sleeps
        self._folder: Path | None = None  # the weights that the server was last given from here
        self._entries: dict[str, Entry] = {}
        self._taking = threading.Lock()  # guards what `submit` looks at: `_entries` and `failure`
        self._chunks: list[tuple[ChunkStream, Chunk]] = []  # what has come in this pass of the loop
        self._held: set[str] = set()  # why SGLang may have no requests: "paused", "asleep", "updating", "doubted"
        self._last_activity = 0.0  # when SGLang last said something of a request, or was given one (the loop's time)
        # All ids have one length: SGLang aborts every request whose id *begins* with the one that it is given.
        prefix = secrets.token_hex(4)
        self._rids = (f"{prefix}-{number:012d}" for number in itertools.count())
        self._orders = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        # Gives up what is under way when the process has not ended by then.
        self._ending: asyncio.TimerHandle | None = None
        self._enough = asyncio.Event()
        if process is None:  # else the next connection cannot meet another server
            server.doubt = self._doubt
        self._loop = asyncio.new_event_loop()
        self.start()

    # -- from any thread ------------------------------------------------------------------------------------------

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

    def submit(self, requests: Sequence[Request], stream: ChunkStream) -> None:
        """Start a dispatch; EngineError for an id that is under way, or an engine that has failed."""
        entries = []
        with self._taking:
            if self.failure is not None:
                raise self.failure
            check_unique(requests, self._entries)
            for request in requests:
                error = refusal(request, self.max_context, self._vocabulary)
                if error is not None:
                    stream.put(self._last_chunk(request, FinishReason.ABORT, error))
                    continue
                room = min(request.sampling.max_tokens, self.max_context - len(request.ids))
                entry = Entry(request, stream, request.ids[:], room, time.monotonic(), request.routed)
                self._entries[request.request_id] = entry
                entries.append(entry)
        if entries:
            self._loop.call_soon_threadsafe(self._begin, entries)

    def abandon(self, request_ids: Iterable[str]) -> None:
        """End those of these requests that are under way, soon."""
        if under_way := [request_id for request_id in request_ids if request_id in self._entries]:
            with suppress(RuntimeError):  # the loop is closed, and with it everything
                self._loop.call_soon_threadsafe(self._abort, under_way)

    def load(self) -> Load:
        """Return how many have been admitted, how many wait for that, and the tokens of the former."""
        entries = list(self._entries.values())
        admitted = [len(entry.ids) for entry in entries if entry.admitted]
        return Load(running=len(admitted), waiting=len(entries) - len(admitted), used_tokens=sum(admitted))

    # -- the thread -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._spawn(self._watch() if self._process is None else self._await_exit(self._process))
        await self._enough.wait()
        await self.server.aclose()

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def meet(self) -> None:
        """Learn what the server is."""
        info = await self.server.ask_info()
        self.max_context = info.max_req_input_len
        self._mask_tokens = info.sampling_mask_max_tokens
        self._says_experts = info.enable_return_routed_experts
        if self._says_experts and not all(self._experts):
            raise EngineError(
                f"{self.server.name} at {self.server.url} returns routed experts, and the model folder's config.json "
                "does not say num_hidden_layers and num_experts_per_tok; start it without enable_return_routed_experts"
            )
        # What sleep gives back must be there again later: the weights only when SGLang keeps a copy of them.
        self._memory = ["kv_cache", "weights"] if info.enable_weights_cpu_backup else ["kv_cache"]
        self.server.label = label = await self.server.ask_label()
        self.version = int(label) if label.isdecimal() and int(label) <= LAST_VERSION else 0

    async def await_start(self, process: ServerProcess) -> None:
        """Wait until the server that ``process`` starts is ready, and meet it; EngineError if the process ends."""
        while not process.exited.done():
            with suppress(EngineError):
                await self.server.call("/ready")
                break
            await asyncio.sleep(READY_EVERY)
        else:
            raise process.failure()
        await self.meet()
        self.server.labelled_here = True

    # -- requests -------------------------------------------------------------------------------------------------

    def _begin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if not self._held and self._is_open(entry):
                self._launch(entry)
        self._look_if_doubted()

    def _is_open(self, entry: Entry) -> bool:
        return self._entries.get(entry.request.request_id) is entry

    def _launch(self, entry: Entry) -> None:
        if entry.stopped or not entry.room:  # the end came just as it was taken back
            self._end(entry, FinishReason.STOP if entry.stopped else FinishReason.LENGTH)
            return
        self._last_activity = self._loop.time()
        entry.rid = next(self._rids)
        entry.task = self._spawn(self._run_entry(entry))

    async def _run_entry(self, entry: Entry) -> None:
        """Send one request to SGLang and pass on what comes, to its end."""
        sampled_before, error = entry.sampled, None
        reason, message = FinishReason.ABORT, None
        try:
            body = self._body(entry)
            async for ids, meta in self.server.stream(body):
                self._last_activity = self._loop.time()
                # Outputs may be the whole answer so far, or what is new; their ends are the same.
                if (count := sampled_before + meta.completion_tokens - entry.sampled) > 0:
                    self._take(entry, ids[-count:], meta, count, renormalised="return_sampling_mask" in body)
                if meta.routed_experts:
                    self._take_experts(entry, meta.routed_experts)
                if meta.finish_reason is not None:
                    reason, message = FinishReason(meta.finish_reason.type), meta.finish_reason.message
        except EngineError as failure:
            entry.task = None
            self._lost(failure)
            return
        except Exception as failure:  # whatever SGLang says of this request is this request's end
            reason, error = FinishReason.ABORT, f"{type(failure).__name__}: {failure}"
        else:
            if (
                reason is not FinishReason.ABORT and entry.sampled == sampled_before
            ):  # else an empty answer would be one
                error = f"EngineError: {self.server.name} ended the request with '{reason}' and without a token"
                reason = FinishReason.ABORT
            elif reason is FinishReason.ABORT and not entry.aborted:
                if self._held:  # taken back
                    entry.task = None
                    return
                error = f"EngineError: {self.server.name} gave the request up: {message}"
        entry.task = None
        self._end(entry, reason, error)

    def _body(self, entry: Entry) -> dict[str, object]:
        """Write a request in SGLang's words; ValueError if SGLang cannot say the logprobs of such sampling."""
        params = entry.request.sampling
        sampling: dict[str, object] = {
            "max_new_tokens": entry.room,
            "temperature": params.temperature,
            "ignore_eos": params.ignore_eos,
            "sampling_seed": params.seed % 2**63,
            "stream_interval": self.server.send_every,
        }
        if not params.ignore_eos:
            sampling["stop_token_ids"] = list(params.stop_ids)
        body: dict[str, object] = {"rid": entry.rid, "input_ids": entry.ids.tolist(), "sampling_params": sampling}
        body |= {"return_logprob": True, "stream": True}
        if self._says_experts:
            body |= {"return_routed_experts": True, "routed_experts_start_len": entry.routed}
        if params.temperature > 0 and (params.top_p < 1 or params.top_k > 0):
            if params.top_k > self._mask_tokens:
                raise ValueError(
                    f"top_k is {params.top_k}, and SGLang gives exact logprobs for at most {self._mask_tokens} kept "
                    f"tokens; lower top_k or raise SGLang's sampling_mask_max_tokens"
                )
            # A mask that is longer than allowed costs the request; ties at the cut may add a few tokens.
            most = self._mask_tokens - self._mask_tokens // 16
            if self._vocabulary is not None and self._vocabulary <= self._mask_tokens:
                most = self._vocabulary
            sampling |= {"top_p": params.top_p, "top_k": params.top_k or most}
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        return body

    def _take(self, entry: Entry, ids: Sequence[int], meta: Meta, count: int, *, renormalised: bool) -> None:
        """Pass on the last ``count`` tokens that an output brought; the first ones say that it was admitted."""
        notes: tuple[Note, ...] = ()
        if renormalised:
            masks = meta.output_token_sampling_mask[-count:]
            counts, values = array("i", map(len, masks)), array("i", itertools.chain.from_iterable(masks))
            notes = (Note(NoteKind.SAMPLING_MASK, len(entry.ids), counts, values),)
            logprobs = meta.output_token_sampling_logprobs[-count:]
        else:
            logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs[-count:]]
        fresh, chosen = array("i", ids), array("f", [min(0.0, logprob) for logprob in logprobs])  # 1e-9 by rounding
        if not len(fresh) == len(chosen) == count:
            raise ValueError(f"{self.server.name} sent {len(fresh)} tokens and {len(chosen)} logprobs of {count}")
        request_id = entry.request.request_id
        if not entry.admitted:
            entry.admitted = True
            admission = Chunk(
                request_id,
                weight_version=self.version,
                cached_tokens=meta.cached_tokens,
                queue_seconds=time.monotonic() - entry.since,
                replica=self._replica,
            )
            self._put(entry, admission)
        entry.ids += fresh
        entry.sampled += count
        entry.room -= count
        self._put(entry, Chunk(request_id, fresh, chosen, self.version, replica=self._replica, notes=notes))

    def _take_experts(self, entry: Entry, encoded: str) -> None:
        """Pass on the experts that all tokens but the last were routed to, those known before apart."""
        experts, shape = np.frombuffer(base64.b64decode(encoded), np.int32), [number or 0 for number in self._experts]
        tokens = len(entry.ids) - 1 - entry.routed
        if len(experts) != tokens * math.prod(shape):
            raise ValueError(
                f"{self.server.name} sent {len(experts)} routed experts of {tokens} tokens; the model has "
                f"{' layers with '.join(map(str, shape))} each"
            )
        note = routed_experts(entry.routed, experts.reshape(tokens, *shape))
        entry.routed = note.end
        request_id = entry.request.request_id
        self._put(entry, Chunk(request_id, weight_version=self.version, replica=self._replica, notes=(note,)))

    def _end(self, entry: Entry, reason: FinishReason, error: str | None = None) -> None:
        if self._is_open(entry):
            del self._entries[entry.request.request_id]
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
        self._abort([request_id for request_id, entry in self._entries.items() if entry.stream.loop is loop])

    def _abort(self, request_ids: Iterable[str]) -> None:
        """End these with what they have."""
        entries = [self._entries[request_id] for request_id in request_ids if request_id in self._entries]
        if entries := [entry for entry in entries if not entry.aborted]:
            for entry in entries:
                entry.aborted = True
            self._spawn(self._end_aborted(entries))

    async def _end_aborted(self, entries: Collection[Entry]) -> None:
        await self._recall(entries)
        for entry in entries:
            self._end(entry, FinishReason.ABORT)

    async def _recall(self, entries: Collection[Entry]) -> None:
        """Have SGLang end these; asked again and again, as it forgets what it is asked before it has the request."""
        delay = 0.02
        with suppress(TimeoutError):
            async with asyncio.timeout(RECALL_WITHIN):
                while running := {entry.task: entry.rid for entry in entries if entry.task is not None}:
                    await asyncio.gather(*map(self.server.abort, running.values()))
                    await asyncio.wait(running, timeout=delay)
                    delay = min(2 * delay, 1.0)
        for entry in entries:
            if entry.task is not None:  # left behind
                entry.task.cancel()
                entry.task = None

    async def _hold(self, why: str) -> None:
        """Take everything back from SGLang; when this returns, everything sampled has been sent on."""
        self._held.add(why)
        await self._recall(list(self._entries.values()))
        self._flush()

    def _release(self, why: str) -> None:
        """Go on, unless there is another reason not to."""
        self._held.discard(why)
        if not self._held:
            for entry in list(self._entries.values()):
                if entry.task is None:
                    self._launch(entry)

    def _give_up(self, error: EngineError, *, for_good: bool = False) -> None:
        """End everything under way with ``error``, and (``for_good``) refuse all that comes later with it."""
        with self._taking:
            if for_good and self.failure is None:
                self.failure = error
            entries, self._entries = self._entries, {}
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._flush()  # what has come belongs to those who asked
        for entry in entries.values():
            if entry.task is not None and entry.task is not asyncio.current_task():
                entry.task.cancel()
            entry.task = None
        fail_all((entry.stream for entry in entries.values()), error, self._unheard)

    async def close(self, error: EngineError) -> None:
        """End everything under way with "abort" and with what it has; refuse all that comes later with ``error``."""
        if self._entries:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_TOKENS):
                    await self.carry_out(self.pause)
        for entry in list(self._entries.values()):
            if entry.task is not None:
                entry.task.cancel()
            self._end(entry, FinishReason.ABORT)
        self._give_up(error, for_good=True)

    # -- losses ---------------------------------------------------------------------------------------------------

    def _doubt(self) -> None:
        """Send nothing until the server has been looked at: now if requests wait for that, else with the next ones."""
        self._held.add("doubted")
        self._loop.call_soon(self._look_if_doubted)

    def _look_if_doubted(self) -> None:
        looking = self._looking is not None and not self._looking.done()
        if "doubted" in self._held and self._entries and not looking:
            self._looking = self._spawn(self.carry_out(self._look_again))

    async def _look_again(self) -> None:
        """See whether the server has our weights, give it those it lacks, and let the requests go."""
        try:
            await self._check_weights()
        except EngineError as error:
            self._give_up(error)
        else:
            self._release("doubted")

    async def _check_weights(self) -> None:
        """Give a server that lost our weights the last ones again; EngineError if there are none, or it refuses."""
        server = self.server
        if (label := await server.ask_label()) == server.label:
            return
        lost = f"{server.url} now has weights of version '{label}' instead of '{server.label}', so it was restarted"
        if self._folder is None:
            raise EngineError(
                f"{lost}, and no folder was loaded here that could be loaded again; call update_weights(folder), or "
                f"build another engine to use the server's present weights"
            )
        try:
            await server.flush_cache()
            await server.load_weights(self._folder, server.label)
        except EngineError as error:
            raise EngineError(f"{lost}, and cannot be given '{self._folder}' again: {error}") from None
        logger.warning("%s; it was given '%s' again", lost, self._folder)

    def _lost(self, error: EngineError) -> None:
        """End what is under way: the server has failed."""
        if self._process is None:
            self._give_up(error)
        elif self._ending is None:  # a process that is about to end says why, and :meth:`_await_exit` hears of that
            self._ending = self._loop.call_later(EXIT_WITHIN, self._give_up, error)

    async def _await_exit(self, process: ServerProcess) -> None:
        """Notice the end of the process, also while no request is under way."""
        await asyncio.shield(asyncio.wrap_future(process.exited))
        self._give_up(process.failure(), for_good=True)

    async def _watch(self) -> None:
        """Check while requests are under way that the server is there: a machine that is gone breaks no connection.

        One that is there may still be stuck, so its health check alone is not enough.
        """
        while True:
            await asyncio.sleep(LOOK_EVERY)
            unanswered = len(self._entries)
            silent = 0.0 if self._held else self._loop.time() - self._last_activity
            try:
                if unanswered and silent > SILENT_FOR:
                    self._doubt()
                    raise EngineError(
                        f"the {self.server.kind} {self.server.url} has {unanswered} request(s) and sent nothing for "
                        f"any in {silent:.0f} s, though it answers health checks; is it stuck?"
                    )
                if unanswered:
                    await self.server.call(self.server.health, within=MISSING_FOR)
            except EngineError as error:
                self._give_up(error)

    # -- orders, carried out one at a time, as they come --------------------------------------------------------------

    async def carry_out(self, order: Callable[[], Coroutine[object, object, None]]) -> None:
        """Carry out one of what follows."""
        async with self._orders:
            await order()

    async def pause(self) -> None:
        """Take all requests back."""
        await self._hold("paused")

    async def resume(self) -> None:
        """Send them again."""
        self._release("paused")

    async def check_idle(self) -> None:
        """Raise EngineError when requests are under way and the engine is not paused."""
        if self._entries and "paused" not in self._held:
            raise EngineError(f"{len(self._entries)} request(s) are under way; pause the engine before it sleeps")

    async def sleep(self) -> None:
        """Have the server give memory back."""
        await self.check_idle()
        if "asleep" not in self._held:
            await self._empty("asleep")
            await self.server.call("/release_memory_occupation", {"tags": self._memory}, within=MEMORY_WITHIN)

    async def wake(self) -> None:
        """Have it take the memory again."""
        if "asleep" in self._held:
            await self.server.call("/resume_memory_occupation", {"tags": self._memory}, within=MEMORY_WITHIN)
            self._release("asleep")

    async def update(self, folder: Path | None, version: int) -> None:
        """Load the weights of a folder, or (without) give the present ones a new version.

        Raises:
            EngineError: the server refuses, or is not there. One of ours that may have half of the weights is ended.
        """
        if folder is None:
            await self._hold("updating")
        else:
            await self._empty("updating")
        try:
            if folder is not None:
                await self.server.load_weights(folder, str(version))
                self._folder = folder
            else:
                if "doubted" in self._held:
                    await self._check_weights()  # or those of a restarted server would get the new label
                label = {"new_version": str(version), "abort_all_requests": False}
                await self.server.call("/update_weight_version", label)
            self.version = version
            self.server.label, self.server.labelled_here = str(version), True
        except BaseException as error:
            if self._process is not None and folder is not None and not isinstance(error, WeightsRefused):
                why = f"an update broke off, so nobody knows the weights any more: {error or type(error).__name__}"
                self._give_up(EngineError(why), for_good=True)
                self._process.kill()
            raise
        finally:
            self._release("updating")

    async def _empty(self, why: str) -> None:
        """Hold our requests, and wait until the server has nothing else to do and has dropped its cache."""
        await self._hold(why)
        try:
            await self.server.flush_cache()
        except EngineError:
            self._release(why)
            raise
