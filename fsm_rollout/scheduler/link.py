"""Messages between a run's driver and one of its shards.

Invariant: messages arrive whole and in the order in which they were sent, until the link is lost; then that is said
once, and nothing comes any more. What is sent in one pass of the event loop travels as one block, or as a few where it
is much: the other end works on the first while the pass goes on.

A message is a tuple: what it is, then its parts. Rows and histories travel packed as bytes, so no token becomes a
Python object on the way. What comes from a shard, where tools run, is plain data (MessagePack): reading it runs
nothing. Only what a driver sends its shards is pickled.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import msgspec

logger = logging.getLogger(__name__)

Receive = Callable[..., None]  # is called with the parts of each message
MOST_UNSENT = 64  # so many messages wait at most for others of the same pass of the event loop
_SIZE = struct.Struct("<Q")
_encode = msgspec.msgpack.Encoder(enc_hook=str).encode
_decode = msgspec.msgpack.Decoder(list[tuple[Any, ...]]).decode


class Link(ABC):
    """One end, the ``shard``'s or the driver's. ``receive`` and ``lost`` are set before anything can come."""

    def __init__(self, *, shard: bool) -> None:
        self._shard = shard
        self.receive: Receive = _nobody
        self.lost: Callable[[], None] = _nobody
        self.open = True
        self.wire_bytes = 0  # of messages, in both directions
        self._unsent: list[tuple[Any, ...]] = []

    def send(self, *message: Any) -> None:
        """Send a message; on a link that is lost it goes nowhere."""
        if self.open:
            self._unsent.append(message)
            if len(self._unsent) == 1:
                asyncio.get_running_loop().call_soon(self.flush)
            elif len(self._unsent) == MOST_UNSENT:
                self.flush()

    def flush(self) -> None:
        """Let what was sent go out now."""
        if self.open and self._unsent:
            messages, self._unsent = self._unsent, []
            block = _encode(messages) if self._shard else pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
            self.wire_bytes += len(block)
            self._write(block)

    def _take(self, block: bytes | bytearray | memoryview) -> None:
        if not self.open:
            return
        self.wire_bytes += len(block)
        try:
            messages = pickle.loads(block) if self._shard else _decode(block)
        except msgspec.DecodeError as error:
            logger.warning("a shard sent an invalid message and is given up: %s", error)
            self._end()
            return
        for message in messages:
            if self.open:
                self.receive(*message)

    def _end(self) -> None:
        if self.open:
            self.open = False
            self.lost()

    @abstractmethod
    def _write(self, block: bytes) -> None:
        """Send a block."""

    @abstractmethod
    def close(self) -> None:
        """Close this end; the other one is told that the link is lost."""


def _nobody(*message: Any) -> None:
    """Where a link's messages go that nobody uses yet."""


def framed(block: bytes) -> bytes:
    """Return a block as it travels on a stream: behind its size."""
    return _SIZE.pack(len(block)) + block


class SocketLink(Link, asyncio.Protocol):
    """A link over a stream socket."""

    def __init__(self, *, shard: bool) -> None:
        super().__init__(shard=shard)
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take the blocks that are complete."""
        received = self._received
        received += data
        start = 0
        while len(received) - start >= _SIZE.size:
            (size,) = _SIZE.unpack_from(received, start)
            end = start + _SIZE.size + size
            if len(received) < end:
                break
            self._take(bytes(memoryview(received)[start + _SIZE.size : end]))
            start = end
        if start:
            del received[:start]

    def connection_lost(self, error: Exception | None) -> None:
        """Say so, unless it was let go."""
        if self._transport is not None:
            self._end()

    def detach(self) -> None:
        """Let the event loop go, which ends; another may take the connection up."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def _write(self, block: bytes) -> None:
        assert self._transport is not None
        self._transport.write(framed(block))

    def close(self) -> None:
        """Send what is left, and close."""
        self.flush()
        self.open = False
        if self._transport is not None:
            self._transport.close()


class PairedLink(Link):
    """One of two ends on the same event loop: a shard in the driver's own process, for simulations."""

    def __init__(self, *, shard: bool) -> None:
        super().__init__(shard=shard)
        self._other: PairedLink | None = None

    @classmethod
    def pair(cls) -> tuple[PairedLink, PairedLink]:
        """Return the driver's end and the shard's."""
        ours, theirs = cls(shard=False), cls(shard=True)
        ours._other, theirs._other = theirs, ours
        return ours, theirs

    def _write(self, block: bytes) -> None:
        assert self._other is not None
        asyncio.get_running_loop().call_soon(self._other._take, block)

    def cut(self) -> None:
        """Lose the link at this end."""
        self._end()

    def close(self) -> None:
        """Close this end, once what was sent is on its way."""
        self.flush()
        self.open = False
        if self._other is not None:
            asyncio.get_running_loop().call_soon(self._other.cut)


def read_block(connection: socket.socket) -> bytes:
    """Read one block, and nothing behind it; EOFError: there comes none any more."""
    size, block = 0, bytearray()
    while len(block) < (size or 8):
        received = connection.recv(min((size or 8) - len(block), 2**20))
        if not received:
            raise EOFError("the other end is gone")
        block += received
        if not size and len(block) == 8:
            (size,), block = _SIZE.unpack(block), bytearray()
    return bytes(block)


def read_messages(connection: socket.socket) -> list[tuple[Any, ...]]:
    """Read a block of a shard's messages, before any event loop does."""
    return _decode(read_block(connection))
