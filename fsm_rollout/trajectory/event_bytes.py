"""Events as bytes (MessagePack).

Invariant: what comes back equals what went in, bit for bit. A picture goes as its name, by its hash; its bytes are kept
elsewhere, once, and whoever unpacks an event says where they are found.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from fsm_rollout.trajectory.events import AnyEvent, Message
from fsm_rollout.trajectory.pictures import StoredPicture, known
from fsm_rollout.trajectory.tokens import Ids, Logprobs


def array_of(kind: type, value: tuple[str, bytes]) -> object:
    """Return the array that :func:`plain` was given; hook of decoders."""
    if isinstance(value, StoredPicture):  # it is whole already
        return value
    typecode, data = value
    decoded: Ids | Logprobs = array(typecode)
    decoded.frombytes(data)
    return decoded


# -- pictures -------------------------------------------------------------------------------------------------------

PictureName = tuple[str, str, int, int]  # its SHA-256, media type, width and height: all but its bytes
FindPicture = Callable[[PictureName], StoredPicture]
PICTURE_EXTENSION = 1  # MessagePack's code of a picture that is named; its bytes are elsewhere
_MARK = b"fsm_rollout.picture"  # how what MessagePack holds of one begins, so that the names can be found in an event


def plain(value: object) -> object:
    """Return an array, or a picture's name, as MessagePack can have it; hook of encoders."""
    if isinstance(value, array):
        return (value.typecode, value.tobytes())
    if isinstance(value, StoredPicture):
        name: PictureName = (value.sha256, value.mime, value.width, value.height)
        return msgspec.msgpack.Ext(PICTURE_EXTENSION, _MARK + msgspec.msgpack.encode(name))
    raise TypeError(f"an event cannot hold a {type(value).__name__}; give plain data (str, numbers, lists, dicts)")


def pictures_in(encoded: bytes) -> list[StoredPicture]:
    """Return the pictures that an encoded event names; this process holds them."""
    if _MARK not in encoded:
        return []
    names = [name[3:67].decode("latin-1") for name in encoded.split(_MARK)[1:]]  # behind MessagePack's own three bytes
    return [picture for name in names if (picture := known(name)) is not None]


def _held(name: PictureName) -> StoredPicture:
    if (picture := known(name[0])) is None:
        raise ValueError(f"the bytes of picture {name[0][:12]} are not there")
    return picture


def _named(find: FindPicture, code: int, data: memoryview) -> StoredPicture:
    """Return what an extension of MessagePack's stands for; hook of decoders, ``find`` bound."""
    raw = bytes(data)
    if code != PICTURE_EXTENSION or not raw.startswith(_MARK):
        raise ValueError(f"an extension of an unknown kind ({code})")
    return find(msgspec.msgpack.decode(raw[len(_MARK) :], type=PictureName))


def unpacker(find: FindPicture = _held) -> Callable[[bytes], list[AnyEvent]]:
    """Return what unpacks what :func:`pack` joined; ``find`` gives the pictures that it names."""
    return msgspec.msgpack.Decoder(list[AnyEvent], dec_hook=array_of, ext_hook=partial(_named, find)).decode


# -- as bytes -------------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder(enc_hook=plain)
_decoder: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(
    AnyEvent, dec_hook=array_of, ext_hook=partial(_named, _held)
)


# Unpacks plain data that is no event, such as a prompt's.
unpack_plain: Callable[[bytes], Any] = msgspec.msgpack.Decoder(ext_hook=partial(_named, _held)).decode

# Packs an event, or other plain data (MessagePack); a TypeError says that it holds something that is none, such as an
# object in a prompt's extra fields.
encode: Callable[[Any], bytes] = _encoder.encode


def unwritable(data: object) -> str | None:
    """Return why plain data cannot stand in an event (lone surrogates, integers over 64 bits), or ``None``."""
    try:
        _encoder.encode(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return f"the values cannot be written down: {error}"
    return None


def comparable(messages: Sequence[Message]) -> object:
    """Return messages as plain data that is equal where they are: pictures by their hash."""
    return msgspec.to_builtins(list(messages), enc_hook=lambda picture: picture.sha256)


def decode(data: bytes) -> AnyEvent:
    """Unpack what :func:`encode` packed; equal to the event that went in."""
    return _decoder.decode(data)


def pack(encoded: Sequence[bytes]) -> bytes:
    """Join what :func:`encode` packed to one MessagePack array, without encoding anything again."""
    return b"".join((b"\xdd", len(encoded).to_bytes(4, "big"), *encoded))
