"""What the SGLang engine and the process that owns SGLang say to each other, and how it travels.

Invariant: one frame is one message: eight bytes of length, then MessagePack. Token ids are the bytes of an int32 array,
logprobs those of a float32 array. Requests are named by handles (integers that are never used twice), and frames arrive
in the order they were sent.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

import msgspec

_LENGTH = struct.Struct("<Q")


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """One generation to run; everything that decides how it is sampled."""

    handle: int
    ids: bytes
    """int32"""
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    seed: int


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What one request has got since its last piece; see :class:`fsm_rollout.engines.protocol.Chunk`."""

    handle: int
    ids: bytes = b""
    logprobs: bytes = b""
    version: int = 0
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int = 0


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first frame: build ``sglang.Engine`` with these arguments of ``ServerArgs``."""

    arguments: dict[str, object]
    threads: int | None
    vocabulary: int | None
    """How many tokens the model has, where that is known."""


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Start these."""

    asks: list[Ask]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End these soon."""

    handles: list[int]


class Do(msgspec.Struct, frozen=True, tag=True):
    """Carry out an order; answered by one :class:`Done` with the same number."""

    number: int
    order: str
    version: int | None = None
    path: str = ""
    tensors: bytes = b""
    """See :func:`fsm_rollout.engines.sglang.weights.packed`."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """SGLang has started; ``max_input`` is the longest input it takes, exclusive."""

    max_input: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """SGLang cannot start."""

    reason: str


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """What came since the last flush, of all requests."""

    pieces: list[Piece]


class Done(msgspec.Struct, frozen=True, tag=True):
    """An order has been carried out, or (``error``) not."""

    number: int
    error: str | None = None


ToHost = Start | Generate | Abort | Do
FromHost = Ready | Failed | Pieces | Done


class Wire:
    """One end of the connection. Sending is safe from any thread; one thread receives."""

    def __init__(self, connection: socket.socket, receives: object) -> None:
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._sending = threading.Lock()

    def send(self, message: ToHost | FromHost) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone.
        """
        frame = self._encoder.encode(message)
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame if len(frame) < 65_536 else _LENGTH.pack(len(frame)))
            if len(frame) >= 65_536:  # not worth a copy
                self._socket.sendall(frame)

    def receive(self) -> object | None:
        """Wait for the next message; ``None`` when the other end is gone."""
        head = self._read(_LENGTH.size)
        body = None if head is None else self._read(_LENGTH.unpack(head)[0])
        return None if body is None else self._decoder.decode(body)

    def _read(self, count: int) -> bytearray | None:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            try:
                more = self._socket.recv_into(view[got:])
            except OSError:
                return None
            if not more:
                return None
            got += more
        return data

    def close(self) -> None:
        """Let both ends' :meth:`receive` return ``None``."""
        with suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
