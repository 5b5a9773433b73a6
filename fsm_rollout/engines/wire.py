"""Requests and chunks as one block of bytes per flush, and what both ends remember so that little need be sent.

Invariant: unpacking gives back what was packed, field by field, whatever came before; that holds as long as both ends
see the same blocks in the same order, each with a :class:`Contexts` of its own that began empty.

A request that extends what its session last sent (the usual case: a conversation goes on) travels as what is new, so a
turn costs about the same at 64k tokens of context as at 1k. A picture travels once, and then as its hash.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.event_bytes import array_of, plain
from fsm_rollout.trajectory.picture_memory import MOST_BYTES, PictureMemory, PlainPicture
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.tokens import Ids, common_length

assert sys.byteorder == "little", "blocks are little-endian"
REMEMBERED = 16 * 2**20  # tokens of past inputs that each end keeps per replica: 64 MiB
_PICTURE = 1  # MessagePack's code of one


class Extension(msgspec.Struct, frozen=True, array_like=True):
    """A request on its way: ``request.ids`` lack the first ``shared`` ones, which the other end has."""

    shared: int
    request: Request


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A dispatch that an engine failed as a whole: the requests without their last chunk, and why."""

    request_ids: list[str]
    why: str


class Flush(msgspec.Struct, frozen=True, array_like=True):
    """All that an engine has to tell since the last one."""

    chunks: list[Chunk]
    failures: list[Failure]
    load: Load


pack_flush = msgspec.msgpack.Encoder(enc_hook=plain).encode
unpack_flush = msgspec.msgpack.Decoder(Flush, dec_hook=array_of).decode


class Contexts:
    """What both ends remember: the latest input of each session, and pictures; each the least recent forgotten first.

    Args:
        capacity: how many tokens of inputs.
        picture_bytes: how many bytes of pictures.
    """

    def __init__(self, capacity: int = REMEMBERED, picture_bytes: int = MOST_BYTES) -> None:
        self.capacity = capacity
        self.tokens = 0
        self._ids: OrderedDict[str, Ids] = OrderedDict()
        self._pictures = PictureMemory(picture_bytes)
        self.encode = msgspec.msgpack.Encoder(enc_hook=self._plain).encode
        self.decode = msgspec.msgpack.Decoder(list[Extension], dec_hook=array_of, ext_hook=self._picture).decode

    def _plain(self, value: object) -> object:
        """Return what MessagePack can have; hook of the encoder."""
        if not isinstance(value, StoredPicture):
            return plain(value)
        return msgspec.msgpack.Ext(_PICTURE, msgspec.msgpack.encode(self._pictures.plain(value)))

    def _picture(self, code: int, data: memoryview) -> StoredPicture:
        """Return the picture that travels; hook of the decoder."""
        return self._pictures.picture(msgspec.msgpack.decode(data, type=PlainPicture))

    def get(self, session: str) -> Ids:
        """Return the session's latest input; nothing when it is not known any more."""
        return self._ids.get(session, array("i"))

    def put(self, session: str, ids: Ids) -> None:
        """Remember ``ids``, which nobody may change any more; those of no session are not extended."""
        if not session:
            return
        self.tokens += len(ids) - len(self._ids.pop(session, ()))
        self._ids[session] = ids
        while self.tokens > self.capacity:
            self.tokens -= len(self._ids.popitem(last=False)[1])

    def shared_length(self, session: str, ids: Ids) -> int:
        """Return how many of the first ``ids`` are the session's latest input: all of that, or 0."""
        old = self.get(session)
        return len(old) if common_length(old, ids) == len(old) else 0


def pack_requests(requests: Iterable[Request], contexts: Contexts) -> bytes:
    """Return ``requests`` as a block; ``contexts`` is what the other end has been sent, this block included after."""
    extensions = []
    for request in requests:
        shared = contexts.shared_length(request.session, request.ids)
        contexts.put(request.session, request.ids)
        extensions.append(Extension(shared, replace(request, ids=request.ids[shared:]) if shared else request))
    return contexts.encode(extensions)


def unpack_requests(block: bytes, contexts: Contexts) -> list[Request]:
    """Return a block's requests; EngineError if one goes on from what this end lacks: the ends saw different blocks."""
    requests = []
    for extension in contexts.decode(block):
        shared, request = extension.shared, extension.request
        if shared:
            past = contexts.get(request.session)
            if len(past) != shared:
                raise EngineError(
                    f"request '{request.request_id}' extends {shared} tokens of '{request.session}'; this end has "
                    + (f"{len(past)} tokens" if past else "nothing")
                )
            request = replace(request, ids=past + request.ids)
        contexts.put(request.session, request.ids)
        requests.append(request)
    return requests
