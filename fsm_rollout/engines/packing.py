"""Requests and chunks as one block of bytes per flush, and what both ends remember so that little need be sent.

Invariant: unpacking gives back what was packed, field by field, whatever came before; that holds as long as both ends
see the same blocks in the same order, each with a :class:`Contexts` of its own that began empty.

The ids of all requests travel as one run of int32, the logprobs as one of float32. A request that extends what its
session last sent (the usual case: a conversation goes on) travels as what is new, so a turn costs the same at 64k
tokens of context as at 1k. Inputs that are not of one stream are compared with the tokens sent before.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import msgspec
import numpy as np

from fsm_rollout.engines.protocol import Chunk, Load, Request, SamplingParams
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.reasons import FinishReason
from fsm_rollout.trajectory.tokens import Ids, Logprobs

assert sys.byteorder == "little", "blocks are little-endian"
REMEMBERED = 16 * 2**20
"""Tokens of past inputs that each end keeps per replica: 64 MiB."""


@dataclass(frozen=True, slots=True)
class Flush:
    """What a replica has to tell since it was last asked."""

    chunks: Sequence[Chunk] = ()
    failures: Sequence[tuple[Sequence[str], str]] = ()
    """Dispatches that its engine failed as a whole: the requests without their last chunk, and why."""
    load: Load = field(default_factory=Load)


class Contexts:
    """The latest input of each session, the least recent forgotten beyond ``capacity`` tokens."""

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self.capacity = capacity
        self.tokens = 0
        self._ids: OrderedDict[str, Ids] = OrderedDict()

    def get(self, session: str) -> Ids | None:
        """Return the session's latest input, if it is still known."""
        return self._ids.get(session)

    def put(self, session: str, ids: Ids) -> None:
        """Remember ``ids``, which nobody may change any more."""
        old = self._ids.pop(session, None)
        self.tokens += len(ids) - (0 if old is None else len(old))
        self._ids[session] = ids
        while self.tokens > self.capacity:
            _, forgotten = self._ids.popitem(last=False)
            self.tokens -= len(forgotten)

    def known(self, session: str, ids: Ids) -> int:
        """Return how many of the first ``ids`` are the session's latest input: all of that, or 0."""
        old = self._ids.get(session)
        if not old or len(old) > len(ids):
            return 0
        origin = getattr(ids, "origin", None)
        if origin is not None and origin is getattr(old, "origin", None):
            return len(old)  # of one stream, which only grows
        # numpy compares 64k tokens in 20 us; slices of an array would be copied, and are compared one by one.
        same = np.array_equal(np.frombuffer(old, np.int32), np.frombuffer(ids, np.int32, count=len(old)))
        return len(old) if same else 0


class _Requests(msgspec.Struct, array_like=True, gc=False):
    """A block of requests, by columns; ``known`` tokens of each are those that its session last sent."""

    rows: list[tuple[str, str, str, str, str, int, int, int, int, int]]
    """Request, trajectory and group id, agent, context, turn, sampled, known, new tokens, seed."""
    params: list[tuple[int, float, float, int, frozenset[int], bool]]
    """Distinct sampling parameters but for the seed."""
    of_row: list[int]
    """Which of ``params`` a row has."""
    ids: bytes


class _Flush(msgspec.Struct, array_like=True, gc=False):
    """A flush, by columns."""

    rows: list[tuple[str, int, int, FinishReason | None, str | None, int, float]]
    """Request id, tokens, weight version, finish reason, error, cached tokens, queue seconds."""
    ids: bytes
    logprobs: bytes
    failures: list[tuple[list[str], str]]
    load: tuple[int, int, int, int | None, dict[str, float]]


_encode = msgspec.msgpack.Encoder().encode
_decode_requests = msgspec.msgpack.Decoder(_Requests).decode
_decode_flush = msgspec.msgpack.Decoder(_Flush).decode


def pack_requests(requests: Sequence[Request], contexts: Contexts) -> bytes:
    """Return ``requests`` as a block; ``contexts`` is what the other end has been sent, this block included after."""
    rows, of_row, parts = [], [], []
    params: dict[Any, int] = {}
    for request in requests:
        session, sampling = request.session, request.sampling
        known = contexts.known(session, request.ids)
        contexts.put(session, request.ids)
        new = memoryview(request.ids)[known:]
        parts.append(new)
        unseeded = (
            sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k,
            sampling.stop_ids, sampling.ignore_eos,
        )  # fmt: skip
        of_row.append(params.setdefault(unseeded, len(params)))
        rows.append((
            request.request_id, request.trajectory_id, request.group_id, request.agent, request.context,
            request.turn, request.sampled, known, len(new), sampling.seed,
        ))  # fmt: skip
    return _encode(_Requests(rows, list(params), of_row, b"".join(parts)))


def unpack_requests(block: bytes, contexts: Contexts) -> list[Request]:
    """Return the requests of a block.

    Raises:
        EngineError: a request goes on from what this end does not have: the ends have seen different blocks.
    """
    said = _decode_requests(block)
    ids = memoryview(said.ids).cast("i")
    requests, start = [], 0
    for row, index in zip(said.rows, said.of_row, strict=True):
        request_id, trajectory_id, group_id, agent, context, turn, sampled, known, new, seed = row
        whole = array("i", ids[start : start + new].tobytes())
        start += new
        session = f"{trajectory_id}/{context}"
        if known:
            past = contexts.get(session)
            if past is None or len(past) != known:
                have = "nothing" if past is None else f"{len(past)} tokens"
                raise EngineError(f"request '{request_id}' goes on from {known} tokens of '{session}'; here is {have}")
            whole = past + whole
        contexts.put(session, whole)
        sampling = SamplingParams(*said.params[index], seed)
        requests.append(Request(request_id, whole, sampling, trajectory_id, group_id, agent, context, turn, sampled))
    return requests


def pack_flush(flush: Flush) -> bytes:
    """Return ``flush`` as a block; ``Chunk.replica`` is left to the other end, which knows whom it asks."""
    chunks = flush.chunks
    rows = [
        (c.request_id, len(c.ids), c.weight_version, c.finish_reason, c.error, c.cached_tokens, c.queue_seconds)
        for c in chunks
    ]
    load = astuple(flush.load)
    return _encode(
        _Flush(
            rows,
            b"".join([chunk.ids.tobytes() for chunk in chunks if chunk.ids]),
            b"".join([chunk.logprobs.tobytes() for chunk in chunks if chunk.logprobs]),
            [(list(request_ids), why) for request_ids, why in flush.failures],
            (*load[:4], dict(flush.load.details)),
        )
    )


def unpack_flush(block: bytes, replica: str = "") -> Flush:
    """Return the flush of a block, its chunks from ``replica``."""
    said = _decode_flush(block)
    all_ids, all_logprobs = memoryview(said.ids), memoryview(said.logprobs)
    chunks, start = [], 0
    for request_id, count, version, reason, error, cached, queued in said.rows:
        stop = start + 4 * count
        ids: Ids = array("i")
        logprobs: Logprobs = array("f")
        if count:
            ids.frombytes(all_ids[start:stop])
            logprobs.frombytes(all_logprobs[start:stop])
        chunks.append(Chunk(request_id, ids, logprobs, version, reason, error, cached, queued, replica))
        start = stop
    return Flush(chunks, said.failures, Load(*said.load))
