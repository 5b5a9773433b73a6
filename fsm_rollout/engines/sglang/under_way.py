"""The requests under way in an engine whose answers come from another thread.

Invariant: every request taken gets its last chunk or its dispatch's error, once, on the event loop that it came from;
all that arrives together reaches a loop in one callback. Methods are safe from any thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fsm_rollout.engines.chunk_stream import NO_IDS, NO_LOGPROBS, ChunkStream, check_unique, refusal
from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.engines.sglang.wire import Ask, Piece
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.reasons import FinishReason


@dataclass(slots=True, eq=False)
class _Entry:
    request_id: str
    answers: ChunkStream
    since: float
    tokens: int
    admitted: bool = False


class UnderWay:
    """See the module.

    Args:
        max_context: the longest input plus output, in tokens.
        replica: a name that every chunk carries.
        unheard: called with the handles of requests whose event loop is gone.
        vocabulary: how many tokens the model knows, if that is known.
    """

    def __init__(
        self, max_context: int, replica: str, unheard: Callable[[list[int]], None], vocabulary: int | None = None
    ) -> None:
        self.max_context = max_context
        self._vocabulary = vocabulary
        self._replica = replica
        self._unheard = unheard
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._handles: dict[str, int] = {}
        self._next = 0
        self._failure: EngineError | None = None

    def take(self, requests: Sequence[Request], answers: ChunkStream, version: int) -> list[Ask]:
        """Register a dispatch and return what to ask for; requests that cannot be served are answered at once.

        Raises:
            EngineError: an id is under way already, or the engine has failed.
        """
        now = time.monotonic()
        asks = []
        with self._lock:
            if self._failure is not None:
                raise self._failure
            check_unique(requests, self._handles)
            for request in requests:
                error = refusal(request, self.max_context, self._vocabulary)
                if error is not None:
                    answers.put(_last(request.request_id, FinishReason.ABORT, error, version, self._replica))
                    continue
                self._next += 1
                self._handles[request.request_id] = self._next
                self._entries[self._next] = _Entry(request.request_id, answers, now, len(request.ids))
                asks.append(_ask(self._next, request, self.max_context))
        return asks

    def deliver(self, pieces: Iterable[Piece]) -> None:
        """Turn pieces into chunks and hand them over; a request's first piece says that it was admitted."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[ChunkStream, Chunk]]] = defaultdict(list)
        now = time.monotonic()
        with self._lock:
            for piece in pieces:
                entry = self._entries.get(piece.handle)
                if entry is None:
                    continue
                out = by_loop[entry.answers.loop]
                if not entry.admitted and piece.ids:
                    entry.admitted = True
                    out.append((entry.answers, self._admission(entry, piece, now)))
                if piece.finish_reason is not None:
                    self._forget(piece.handle, entry)
                out.append((entry.answers, self._chunk(entry, piece)))
        for loop, pairs in by_loop.items():
            self._call(loop, _put_all, pairs)

    def fail(self, error: EngineError, *, for_good: bool = True) -> None:
        """End everything under way with ``error``, and (``for_good``) refuse all that comes from now on with it."""
        with self._lock:
            self._failure = error if for_good else self._failure
            failed = dict.fromkeys(entry.answers for entry in self._entries.values())
            self._entries.clear()
            self._handles.clear()
        for answers in failed:
            self._call(answers.loop, answers.fail, error)

    def close(self, version: int, error: EngineError) -> None:
        """End everything under way with "abort", and refuse all that comes from now on with ``error``."""
        with self._lock:
            handles = list(self._entries)
        self.deliver([Piece(handle, version=version, finish_reason=FinishReason.ABORT) for handle in handles])
        self.fail(error)

    def handles(self, request_ids: Iterable[str] | None = None) -> list[int]:
        """Return the handles of these requests, or of all; unknown ones are left out."""
        with self._lock:
            if request_ids is None:
                return list(self._entries)
            return [self._handles[request_id] for request_id in request_ids if request_id in self._handles]

    def load(self) -> Load:
        """Return how many have been admitted, how many wait for that, and the tokens of the former."""
        with self._lock:
            admitted = [entry.tokens for entry in self._entries.values() if entry.admitted]
            return Load(running=len(admitted), waiting=len(self._entries) - len(admitted), used_tokens=sum(admitted))

    def _admission(self, entry: _Entry, piece: Piece, now: float) -> Chunk:
        return Chunk(
            entry.request_id,
            NO_IDS,
            NO_LOGPROBS,
            weight_version=piece.version,
            cached_tokens=piece.cached_tokens,
            queue_seconds=now - entry.since,
            replica=self._replica,
        )

    def _chunk(self, entry: _Entry, piece: Piece) -> Chunk:
        if not piece.ids:
            return _last(entry.request_id, piece.finish_reason, piece.error, piece.version, self._replica)
        ids = array("i", piece.ids)
        entry.tokens += len(ids)
        return Chunk(
            entry.request_id,
            ids,
            array("f", piece.logprobs),
            weight_version=piece.version,
            finish_reason=_reason(piece.finish_reason),
            error=piece.error,
            replica=self._replica,
        )

    def _forget(self, handle: int, entry: _Entry) -> None:
        del self._entries[handle]
        del self._handles[entry.request_id]

    def _call(self, loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody will ever listen, so nothing need be sampled for it
            with self._lock:
                gone = {handle: entry for handle, entry in self._entries.items() if entry.answers.loop is loop}
                for handle, entry in gone.items():
                    self._forget(handle, entry)
            self._unheard(list(gone))


def _put_all(pairs: list[tuple[ChunkStream, Chunk]]) -> None:
    for answers, chunk in pairs:
        answers.put(chunk)


def _ask(handle: int, request: Request, max_context: int) -> Ask:
    sampling = request.sampling
    return Ask(
        handle,
        request.ids.tobytes(),
        min(sampling.max_tokens, max_context - len(request.ids)),
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        tuple(sampling.stop_ids),
        sampling.ignore_eos,
        sampling.seed,
    )


def _last(request_id: str, reason: str | None, error: str | None, version: int, replica: str) -> Chunk:
    return Chunk(
        request_id,
        NO_IDS,
        NO_LOGPROBS,
        weight_version=version,
        finish_reason=_reason(reason),
        error=error,
        replica=replica,
    )


def _reason(reason: str | None) -> FinishReason | None:
    return None if reason is None else FinishReason(reason)
