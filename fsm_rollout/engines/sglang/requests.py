"""The requests under way in one SGLang server.

Invariants:

1. Every request taken gets its last chunk or its dispatch's error, once, on the event loop that it came from. All that
   arrives together reaches a loop in one callback.
2. While the engine is held (paused, asleep, being updated) SGLang has no request of ours. Holding ends what is under
   way with all that was sampled, and releasing sends the rest of it again, its ids grown by what was sampled. So every
   token that arrives was sampled by the present weights, nothing sampled is ever lost, and no cache outlives an update.
   (SGLang's own pause keeps requests inside; it then says which weights sampled which token only at a request's end.)
3. A logprob is that of the distribution which the token was sampled from: SGLang's own is after temperature but before
   top_k and top_p, so where these cut, the renormalised one of its sampling mask is taken instead.

Ids that SGLang gets all have one length: it aborts every request whose id *begins* with the one given.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from fsm_rollout.engines.chunk_stream import (
    NO_IDS,
    NO_LOGPROBS,
    ChunkStream,
    check_unique,
    fail_all,
    hand_over,
    refusal,
)
from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.engines.sglang.server import Meta, Server
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.reasons import FinishReason
from fsm_rollout.trajectory.tokens import Ids

GIVE_UP = 30.0
"""Seconds after which a request that SGLang does not end is left behind."""


@dataclass(slots=True, eq=False)
class Entry:
    """One request under way."""

    request: Request
    stream: ChunkStream
    ids: Ids
    """The prompt, and what has been sampled."""
    room: int
    """How many tokens may still be sampled."""
    since: float
    sampled: int = 0
    admitted: bool = False
    rid: str = ""
    """What SGLang calls it at present."""
    task: asyncio.Task[None] | None = None
    """Runs while SGLang has the request."""
    aborted: bool = False

    @property
    def stopped(self) -> bool:
        """Whether the last token is one that ends the answer."""
        sampling = self.request.sampling
        return bool(self.sampled) and not sampling.ignore_eos and self.ids[-1] in sampling.stop_ids


class Requests:
    """See the module. ``take``, ``load`` and ``under_way`` serve any thread, all else the event loop of the server.

    Args:
        server: the SGLang.
        replica: a name that every chunk carries.
        vocabulary: how many tokens the model has; ``None`` where that is unknown.
        lost: called with the error when the server as a whole has failed a request; it calls :meth:`give_up`.
    """

    def __init__(
        self, server: Server, replica: str, vocabulary: int | None, lost: Callable[[EngineError], None]
    ) -> None:
        self._server = server
        self._replica = replica
        self._vocabulary = vocabulary
        self._lost = lost
        self.max_context = 0
        """The longest input plus output, in tokens."""
        self.mask_tokens = 0
        """The longest sampling mask that the server gives."""
        self.version = 0
        """Of the present weights; whoever updates them while the requests are held sets it."""
        self.held: set[str] = set()
        """Why SGLang may have no requests."""
        self.heard = 0.0
        """When SGLang last said something of a request, or was given one (the loop's time)."""
        self.failure: EngineError | None = None
        """Why no request will ever be taken again."""
        self._entries: dict[str, Entry] = {}
        self._taking = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._chunks: list[tuple[ChunkStream, Chunk]] = []
        self._prefix = secrets.token_hex(4)
        self._launched = 0

    # -- from any thread ------------------------------------------------------------------------------------------

    def take(self, requests: Sequence[Request], stream: ChunkStream) -> list[Entry]:
        """Register a dispatch and return what to :meth:`start`; requests that cannot be served are answered at once.

        Raises:
            EngineError: an id is under way already, or the engine has failed.
        """
        entries = []
        with self._taking:
            if self.failure is not None:
                raise self.failure
            check_unique(requests, self._entries)
            for request in requests:
                error = refusal(request, self.max_context, self._vocabulary)
                if error is not None:
                    stream.put(self._last(request.request_id, FinishReason.ABORT, error))
                    continue
                room = min(request.sampling.max_tokens, self.max_context - len(request.ids))
                entry = Entry(request, stream, request.ids[:], room, time.monotonic())
                self._entries[request.request_id] = entry
                entries.append(entry)
        return entries

    def under_way(self, request_ids: Iterable[str]) -> list[str]:
        """Return those of these requests that are under way."""
        return [request_id for request_id in request_ids if request_id in self._entries]

    def load(self) -> Load:
        """Return how many have been admitted, how many wait for that, and the tokens of the former."""
        entries = list(self._entries.values())
        admitted = [len(entry.ids) for entry in entries if entry.admitted]
        return Load(running=len(admitted), waiting=len(entries) - len(admitted), used_tokens=sum(admitted))

    def __len__(self) -> int:
        """How many have not had their last chunk."""
        return len(self._entries)

    # -- on the server's loop -------------------------------------------------------------------------------------

    def start(self, entries: Iterable[Entry]) -> None:
        """Start what was taken: now, or when the engine is released."""
        for entry in entries:
            if not self.held and self._is_open(entry):
                self._launch(entry)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these with what they have; returns when they have ended. Unknown ones are harmless."""
        entries = [self._entries[request_id] for request_id in request_ids if request_id in self._entries]
        for entry in entries:
            entry.aborted = True
        await self._recall(entries)
        for entry in entries:
            if self._is_open(entry):
                self._end(entry, FinishReason.ABORT)
        self._flush()

    async def hold(self, why: str) -> None:
        """Take everything back from SGLang; when this returns, everything sampled has been sent on."""
        self.held.add(why)
        await self._recall(list(self._entries.values()))
        self._flush()

    def release(self, why: str) -> None:
        """Go on, unless there is another reason not to."""
        self.held.discard(why)
        if not self.held:
            for entry in list(self._entries.values()):
                if entry.task is None:
                    self._launch(entry)

    def give_up(self, error: EngineError, *, for_good: bool = False) -> None:
        """End everything under way with ``error``, and (``for_good``) refuse all that comes later with it."""
        with self._taking:
            if for_good and self.failure is None:
                self.failure = error
            entries, self._entries = self._entries, {}
        self._flush()  # what has come belongs to those who asked
        for entry in entries.values():
            if entry.task is not None and entry.task is not asyncio.current_task():
                entry.task.cancel()
            entry.task = None
        fail_all((entry.stream for entry in entries.values()), error, self._unheard)

    def close(self, error: EngineError) -> None:
        """End everything under way with "abort" and with what it has; refuse all that comes later with ``error``."""
        for entry in list(self._entries.values()):
            if entry.task is not None:
                entry.task.cancel()
            self._end(entry, FinishReason.ABORT)
        self.give_up(error, for_good=True)

    def _is_open(self, entry: Entry) -> bool:
        return self._entries.get(entry.request.request_id) is entry

    def _launch(self, entry: Entry) -> None:
        if entry.stopped or not entry.room:  # the end came just as it was taken back
            self._end(entry, FinishReason.STOP if entry.stopped else FinishReason.LENGTH)
            return
        loop = asyncio.get_running_loop()
        self._launched += 1
        self.heard = loop.time()
        entry.rid = f"{self._prefix}-{self._launched:012d}"
        entry.task = loop.create_task(self._run(entry))
        self._tasks.add(entry.task)
        entry.task.add_done_callback(self._tasks.discard)

    async def _recall(self, entries: Collection[Entry]) -> None:
        """Have SGLang end these; asked again and again, as it forgets what it is asked before it has the request."""
        waited, delay = 0.0, 0.02
        while running := {entry.task: entry for entry in entries if entry.task is not None}:
            if waited > GIVE_UP:
                for task, entry in running.items():
                    task.cancel()
                    entry.task = None
                return
            await asyncio.gather(*(self._server.abort(entry.rid) for entry in running.values()))
            await asyncio.wait(running, timeout=delay)
            waited, delay = waited + delay, min(2 * delay, 1.0)

    async def _run(self, entry: Entry) -> None:
        """Send one request to SGLang and pass on what comes, to its end."""
        finish = None
        error = "EngineError: SGLang ended the request without saying why"
        before = entry.sampled
        try:
            arguments, sampling = self._arguments(entry)
            async for ids, meta in self._server.stream(entry.rid, arguments, sampling):
                self.heard = asyncio.get_running_loop().time()
                # Outputs may be the whole answer so far, or what is new; their ends are the same.
                if (count := before + meta.completion_tokens - entry.sampled) > 0:
                    self._take(entry, ids[-count:], meta, count, renormalised="return_sampling_mask" in arguments)
                finish = meta.finish_reason
        except EngineError as failure:
            entry.task = None
            self._lost(failure)
            return
        except Exception as failure:  # whatever SGLang raises about this request is this request's end
            finish, error = None, f"{type(failure).__name__}: {failure}"
        entry.task = None
        match None if finish is None else finish.type:
            case FinishReason.STOP | FinishReason.LENGTH if (
                entry.sampled == before
            ):  # else an empty answer would be one
                error = f"EngineError: SGLang ended the request with '{finish and finish.type}' and without a token"
                self._end(entry, FinishReason.ABORT, error)
            case FinishReason.STOP:
                self._end(entry, FinishReason.STOP)
            case FinishReason.LENGTH:
                self._end(entry, FinishReason.LENGTH)
            case FinishReason.ABORT if entry.aborted:
                self._end(entry, FinishReason.ABORT)
            case FinishReason.ABORT if self.held:
                pass  # taken back
            case FinishReason.ABORT:
                error = f"EngineError: SGLang gave the request up: {finish and finish.message}"
                self._end(entry, FinishReason.ABORT, error)
            case _:
                self._end(entry, FinishReason.ABORT, error)

    def _arguments(self, entry: Entry) -> tuple[dict[str, object], dict[str, object]]:
        """Write a request in SGLang's words: its arguments, and those of its sampling.

        Raises:
            ValueError: SGLang cannot say the logprobs of such sampling.
        """
        params = entry.request.sampling
        sampling: dict[str, object] = {
            "max_new_tokens": entry.room,
            "temperature": params.temperature,
            "ignore_eos": params.ignore_eos,
            "sampling_seed": params.seed % 2**63,
        }
        if not params.ignore_eos:
            sampling["stop_token_ids"] = list(params.stop_ids)
        arguments: dict[str, object] = {"input_ids": entry.ids.tolist(), "return_logprob": True}
        if params.temperature > 0 and (params.top_p < 1 or params.top_k > 0):
            if params.top_k > self.mask_tokens:
                raise ValueError(
                    f"top_k is {params.top_k}, and SGLang says exact logprobs of at most {self.mask_tokens} kept "
                    f"tokens; lower top_k or raise SGLang's sampling_mask_max_tokens"
                )
            # A mask that is longer than allowed costs the request; ties at the cut may add a few tokens.
            most = self.mask_tokens - self.mask_tokens // 16
            if self._vocabulary is not None and self._vocabulary <= self.mask_tokens:
                most = self._vocabulary
            sampling |= {"top_p": params.top_p, "top_k": params.top_k or most}
            arguments |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        return arguments, sampling

    def _take(self, entry: Entry, ids: Sequence[int], meta: Meta, count: int, *, renormalised: bool) -> None:
        """Pass on the last ``count`` tokens that an output brought; the first ones say that it was admitted."""
        if renormalised:
            logprobs = meta.output_token_sampling_logprobs[-count:]
        else:
            logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs[-count:]]
        fresh, values = array("i", ids), array("f", [min(0.0, logprob) for logprob in logprobs])  # 1e-9 by rounding
        if not len(fresh) == len(values) == count:
            raise ValueError(f"SGLang sent {len(fresh)} tokens and {len(values)} logprobs of {count}")
        request_id = entry.request.request_id
        if not entry.admitted:
            entry.admitted = True
            admission = Chunk(
                request_id,
                NO_IDS,
                NO_LOGPROBS,
                weight_version=self.version,
                cached_tokens=meta.cached_tokens,
                queue_seconds=time.monotonic() - entry.since,
                replica=self._replica,
            )
            self._put(entry, admission)
        entry.ids += fresh
        entry.sampled += count
        entry.room -= count
        self._put(entry, Chunk(request_id, fresh, values, weight_version=self.version, replica=self._replica))

    def _end(self, entry: Entry, reason: FinishReason, error: str | None = None) -> None:
        if self._is_open(entry):
            del self._entries[entry.request.request_id]
            self._put(entry, self._last(entry.request.request_id, reason, error))

    def _last(self, request_id: str, reason: FinishReason, error: str | None) -> Chunk:
        return Chunk(
            request_id,
            NO_IDS,
            NO_LOGPROBS,
            weight_version=self.version,
            finish_reason=reason,
            error=error,
            replica=self._replica,
        )

    # -- on to those who asked ------------------------------------------------------------------------------------

    def _put(self, entry: Entry, chunk: Chunk) -> None:
        if not self._chunks:
            asyncio.get_running_loop().call_soon(self._flush)
        self._chunks.append((entry.stream, chunk))

    def _flush(self) -> None:
        """Send on what has come."""
        chunks, self._chunks = self._chunks, []
        hand_over(chunks, self._unheard)

    def _unheard(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sample nothing for a loop that is closed."""
        entries = [entry for entry in self._entries.values() if entry.stream.loop is loop and not entry.aborted]
        if entries:
            abort = self.abort([entry.request.request_id for entry in entries])
            task = asyncio.get_running_loop().create_task(abort)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
