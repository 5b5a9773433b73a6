"""Requests and chunks as one block of bytes per flush, and what both ends remember so that little need be sent.

Invariant: unpacking gives back what was packed, field by field, whatever came before; that holds as long as both ends
see the same blocks in the same order, each with a :class:`Contexts` of its own that began empty.

A request that extends what its session last sent (the usual case: a conversation goes on) travels as what is new, so a
turn costs about the same at 64k tokens of context as at 1k.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import astuple

import msgspec
import numpy as np

from fsm_rollout.engines.protocol import Chunk, Load, Request, SamplingParams, session_of
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import array_of, plain_array
from fsm_rollout.trajectory.tokens import Ids, Note

assert sys.byteorder == "little", "blocks are little-endian"
REMEMBERED = 16 * 2**20  # tokens of past inputs that each end keeps per replica: 64 MiB
# A dispatch that an engine failed as a whole: the requests without their last chunk, and why.
Failure = tuple[Sequence[str], str]
_encode = msgspec.msgpack.Encoder(enc_hook=plain_array).encode
_decode = msgspec.msgpack.Decoder().decode


class Contexts:
    """The latest input of each session, the least recent forgotten beyond ``capacity`` tokens."""

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self.capacity = capacity
        self.tokens = 0
        self._ids: OrderedDict[str, Ids] = OrderedDict()

    def get(self, session: str) -> Ids:
        """Return the session's latest input; nothing when it is not known any more."""
        return self._ids.get(session, array("i"))

    def put(self, session: str, ids: Ids) -> None:
        """Remember ``ids``, which nobody may change any more."""
        self.tokens += len(ids) - len(self._ids.pop(session, ()))
        self._ids[session] = ids
        while self.tokens > self.capacity:
            self.tokens -= len(self._ids.popitem(last=False)[1])

    def shared_length(self, session: str, ids: Ids) -> int:
        """Return how many of the first ``ids`` are the session's latest input: all of that, or 0."""
        old = self.get(session)
        if not old or len(old) > len(ids):
            return 0
        # numpy compares 64k tokens in 20 us; slices of an array would be copied, and are compared one by one.
        same = np.frombuffer(old, np.int32) == np.frombuffer(ids, np.int32, count=len(old))
        return len(old) if same.all() else 0


def pack_requests(requests: Iterable[Request], contexts: Contexts) -> bytes:
    """Return ``requests`` as a block; ``contexts`` is what the other end has been sent, this block included after."""
    rows: list[tuple[object, ...]] = []
    for request in requests:
        session, sampling = request.session, request.sampling
        shared = contexts.shared_length(session, request.ids)
        contexts.put(session, request.ids)
        rows.append((
            shared, memoryview(request.ids)[shared:].tobytes(),
            sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop_ids,
            sampling.ignore_eos, sampling.seed,
            request.request_id, request.trajectory_id, request.group_id, request.agent, request.context,
            request.turn, request.sampled, request.routed,
        ))  # fmt: skip
    return _encode(rows)


def unpack_requests(block: bytes, contexts: Contexts) -> list[Request]:
    """Return a block's requests; EngineError if one goes on from what this end lacks: the ends saw different blocks."""
    requests = []
    for shared, new, most, temperature, top_p, top_k, stops, ignore_eos, seed, request_id, *names in _decode(block):
        trajectory_id, _, _, context, *_ = names
        ids, session = array("i", new), session_of(trajectory_id, context)
        sampling = SamplingParams(most, temperature, top_p, top_k, frozenset(stops), ignore_eos, seed)
        if shared:
            past = contexts.get(session)
            if len(past) != shared:
                have = f"{len(past)} tokens" if past else "nothing"
                raise EngineError(f"request '{request_id}' extends {shared} tokens of '{session}'; this end has {have}")
            ids = past + ids
        contexts.put(session, ids)
        requests.append(Request(request_id, ids, sampling, *names))
    return requests


def pack_flush(chunks: Iterable[Chunk], failures: Iterable[Failure], load: Load) -> bytes:
    """Pack chunks, failures and load into one block, without ``Chunk.replica``, which the other end knows."""
    rows = [
        (
            c.ids.tobytes(), c.logprobs.tobytes(), c.request_id, c.weight_version, c.finish_reason, c.error,
            c.cached_tokens, c.queue_seconds, c.waits, c.notes,
        )
        for c in chunks
    ]  # fmt: skip
    return _encode((rows, failures, astuple(load)))


def unpack_flush(block: bytes, replica: str = "") -> tuple[list[Chunk], list[Failure], Load]:
    """Return what :func:`pack_flush` was given, the chunks as ``replica``'s."""
    rows, failures, load = _decode(block)
    chunks = [
        Chunk(
            name, array("i", ids), array("f", logprobs), version, reason and FinishReason(reason), error, cached,
            queued, replica, waits, msgspec.convert(notes, tuple[Note, ...], dec_hook=array_of) if notes else (),
        )
        for ids, logprobs, name, version, reason, error, cached, queued, waits, notes in rows
    ]  # fmt: skip
    return chunks, [(request_ids, why) for request_ids, why in failures], Load(*load)
