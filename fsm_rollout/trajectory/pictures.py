"""Pictures in messages: bytes known by their hash, and what may come in as one.

Invariant: a :class:`StoredPicture` is bytes that every decoder reads alike: PNG, JPEG or WebP, upright, 8 bits, RGB or
grey, within the bounds below; what comes otherwise is converted or refused when it is made. Equal bytes are one object
in a process, so a picture that stands in a thousand messages is held once, and as long as one of them is. Nothing is
ever fetched from an address, and no file is read for a text but where somebody said below which folder.

A message shows pictures in one form, whoever wrote it: its content is a list of the parts ``{"type": "text", "text":
…}`` and ``{"type": "image", "image": StoredPicture}``. :func:`stored_pictures` is the way into that form.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes
from weakref import WeakValueDictionary

from fsm_rollout.errors import PictureError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 32 * 2**20
MOST_PIXELS = 40_000_000  # decoded, 120 MB
LONGEST_SIDE = 16_384
ENCODED = 3 * MOST_BYTES  # characters of a picture as text: %89%50%4E is the longest way to write one
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # what is read; the last two, and odd modes of the others, become PNG
_KEPT = {"PNG": ("RGB", "L"), "JPEG": ("RGB", "L"), "WEBP": ("RGB",)}  # what every decoder reads alike
_PICTURE_TYPES = ("image", "image_url", "input_image")
_READ = (*_PICTURE_TYPES, "video", "input_text")  # types of parts that come in in one form and stay in another
_PLACE = {"type": "image"}  # where a picture stands that came beside its message
_ORIENTATION = 0x0112  # the EXIF tag that says how a camera was held
_DAMAGE = (OSError, ValueError, SyntaxError, EOFError)  # what Pillow raises while it decodes
_16_BIT = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_PICTURES: WeakValueDictionary[str, StoredPicture] = WeakValueDictionary()


class StoredPicture:
    """A picture's bytes, under their SHA-256. Made by :func:`picture_of`; equal bytes are the same object."""

    __slots__ = ("__weakref__", "data", "height", "mime", "sha256", "width")

    def __init__(self, data: bytes, mime: str, width: int, height: int) -> None:
        self.data = data
        self.mime = mime
        self.width = width
        self.height = height
        self.sha256 = sha256(data).hexdigest()

    def image(self) -> Image:
        """Decode it: an RGB image of Pillow's."""
        from PIL import Image

        return Image.open(io.BytesIO(self.data)).convert("RGB")

    def data_uri(self) -> str:
        """Return it as a ``data:`` URI."""
        return f"data:{self.mime};base64,{base64.b64encode(self.data).decode()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return stored, (self.data, self.mime, self.width, self.height)

    def __repr__(self) -> str:
        return f"<StoredPicture {self.width}×{self.height} {self.sha256[:12]}>"


def picture_of(source: object, base: Path | None = None) -> StoredPicture:
    """Return the picture that something is: bytes, a path, a ``data:`` URI, an image of Pillow's, an array, or a part.

    An array is ``[height, width]`` or ``[height, width, 3]``, of uint8. A part is what messages hold in the forms of
    OpenAI, Anthropic, MCP and transformers, or a mapping with ``bytes`` or ``path`` as data sets have it. A text that
    names a file is relative to ``base`` and stays within it; without a base no file is read for a text. A ``Path``,
    which only code can give, may lead anywhere. EXIF rotation is carried out; transparency lies on white; CMYK,
    palettes and 16 bits become 8-bit RGB.

    Raises:
        PictureError: it is none, is damaged, moves (an animation), or is beyond the bounds of this module; or Pillow
            is not installed.
    """
    if isinstance(source, StoredPicture):
        return source
    if find_spec("PIL") is None:
        raise PictureError("reading pictures needs Pillow: pip install 'fsm-rollout[vision]'")
    if isinstance(source, Mapping):
        return picture_of(_in_part(source), base)
    if isinstance(source, bytes | bytearray | memoryview):
        return _checked(bytes(source))
    if isinstance(source, str | Path):
        return _checked(_read(source, base))
    return _drawn(source)


def stored_pictures(message: dict[str, Any], base: Path | None = None) -> dict[str, Any]:
    """Return a message with its pictures in the one form that the framework knows: the same where it shows none.

    Parts are read in the forms of OpenAI, Anthropic, MCP and transformers; ``base`` is as for :func:`picture_of`. A
    ``video`` part with a list of frames becomes a picture for each frame. Parts of other kinds stay as they are.

    Raises:
        PictureError: a part that should be a picture is none; the message says which part.
    """
    content = message.get("content")
    if not isinstance(content, list | tuple) or all(map(_is_stored, content)):
        return message
    return {
        **message,
        "content": [shown for number, part in enumerate(content) for shown in _shown(part, number, base)],
    }


def in_form(message: Mapping[str, Any], form: Callable[[StoredPicture], Mapping[str, Any]]) -> dict[str, Any]:
    """Return a message with its pictures as parts of another form, a protocol's say."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    return {**message, "content": [form(part["image"]) if is_picture(part) else part for part in content]}


def openai_part(picture: StoredPicture) -> dict[str, Any]:
    """Return a picture as a part of a message in OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": picture.data_uri()}}


def with_images(messages: Sequence[Any], images: Sequence[object]) -> list[Any]:
    """Return messages with pictures that came beside them, in their order: as parts, for :func:`stored_pictures`.

    One stands where a text says ``<image>`` and where there is a part of type image that holds none. Where no message
    has such a place, all stand before the text of the user's first.

    Raises:
        PictureError: there are more or fewer pictures than places.
    """
    # 1. Their places.
    parts = [_apart(message) for message in messages]
    if images and not any(map(is_picture, chain.from_iterable(parts))):
        first = next((at for at, message in enumerate(messages) if parts[at] and message.get("role") == "user"), None)
        if first is not None:
            parts[first][:0] = [_PLACE] * len(images)
    places = sum(part is _PLACE for part in chain.from_iterable(parts))
    if places != len(images):
        raise PictureError(
            f"there are {len(images)} images, and the messages have {places} places for them (<image>, or a part of "
            "type image)"
        )
    # 2. What stands there.
    waiting = iter(images)
    return [
        {**message, "content": [{**_PLACE, "image": next(waiting)} if part is _PLACE else part for part in shown]}
        if any(part is _PLACE for part in shown)
        else message
        for message, shown in zip(messages, parts, strict=True)
    ]


def _apart(message: object) -> list[Any]:
    """Return the parts of a message, of which those that stand for a picture of the column's are ``_PLACE``."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts: list[Any] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or ():
        if is_picture(part) and all(value is None for key, value in part.items() if key != "type"):
            parts.append(_PLACE)
        elif isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            for number, piece in enumerate(text.split("<image>")):
                parts += [_PLACE] * bool(number) + [{**part, "text": piece}] * bool(piece)
        else:
            parts.append(part)
    return parts


def _is_stored(part: object) -> bool:
    """Say whether nothing is to be done to a part of a message's content."""
    if not isinstance(part, Mapping) or part.get("type") not in _READ:
        return True
    return part["type"] == "image" and isinstance(part.get("image"), StoredPicture) and len(part) == 2


def _shown(part: Any, number: int, base: Path | None) -> list[Any]:
    """Return what a part, the ``number``-th of its message, shows: pictures and texts in our form."""
    if _is_stored(part):
        return [part]
    if part["type"] == "input_text":  # Responses of OpenAI's
        return [{"type": "text", "text": part.get("text")}]
    sources = [part]
    if part["type"] == "video":
        sources = part.get("video")
        if not isinstance(sources, list | tuple) or not sources:
            raise PictureError(f"part {number}: a video is read as the list of its frames: {{'video': [picture, …]}}")
    try:
        return [{"type": "image", "image": picture_of(source, base)} for source in sources]
    except PictureError as error:
        raise PictureError(f"part {number}: {error}") from error.__cause__


def stored(data: bytes, mime: str, width: int, height: int) -> StoredPicture:
    """Return the one object that the bytes of a picture are, which was made before, here or elsewhere."""
    picture = StoredPicture(data, mime, width, height)
    return _PICTURES.setdefault(picture.sha256, picture)


def known(sha256: str) -> StoredPicture | None:
    """Return the picture of a hash, if this process holds it."""
    return _PICTURES.get(sha256)


def is_picture(part: object) -> bool:
    """Say whether a part of a message's content is meant to be a picture."""
    return isinstance(part, Mapping) and part.get("type") in _PICTURE_TYPES


def _in_part(part: Mapping[str, Any]) -> object:
    """Return what a part holds as its picture."""
    url = part.get("image_url")
    source = part.get("source")
    if isinstance(source, Mapping):  # Anthropic's
        part = source
    if isinstance(text := part.get("bytes"), str):  # a table's, made JSON
        return f"data:;base64,{text}"
    for found in (part.get("image"), part.get("bytes"), url.get("url") if isinstance(url, Mapping) else url):
        if found is not None:
            return found
    if isinstance(data := part.get("data"), str):  # MCP's, Anthropic's
        return f"data:;base64,{data}"
    if (found := part.get("path", part.get("url"))) is not None:
        return found
    raise PictureError(
        f"a part of type {part.get('type')!r} holds no picture: it has {', '.join(map(str, part)) or 'nothing'}"
    )


def _read(source: str | Path, base: Path | None) -> bytes:
    """Return the bytes that a text or a path stands for."""
    text = str(source)
    if text[:5].lower() == "data:":
        head, comma, body = text.partition(",")
        if not comma:
            raise PictureError("a data: URI needs a comma before its data")
        if len(body) > ENCODED:
            raise PictureError(f"has {len(body):,} characters; {ENCODED:,} are read at most")
        return _decoded(body) if head.lower().endswith(";base64") else unquote_to_bytes(body)
    text = text.removeprefix("file://")
    if "://" in text:
        raise PictureError(
            f"'{text[:80]}' is an address; nothing is fetched for a picture: give a file, bytes or a data: URI"
        )
    if base is None and isinstance(source, str):
        raise PictureError(f"'{text[:80]}' is text, and no file is read for it here: give bytes or a data: URI")
    path = (base or Path()) / text
    if isinstance(source, str) and not path.resolve().is_relative_to((base or Path()).resolve()):
        raise PictureError(f"'{text}' leads out of '{base}'; pictures lie beside or below the file that names them")
    try:
        if path.stat().st_size > MOST_BYTES:
            raise PictureError(f"'{text}' has {path.stat().st_size:,} bytes; {MOST_BYTES:,} are read at most")
        return path.read_bytes()
    except OSError as error:
        raise PictureError(f"'{text}' cannot be read: {error.strerror or error}") from error


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"is not base64: {error}") from None


def _checked(data: bytes) -> StoredPicture:
    """Return the picture that some bytes are, decoded once to see that they are whole."""
    from PIL import Image, UnidentifiedImageError

    if (picture := _PICTURES.get(sha256(data).hexdigest())) is not None:
        return picture
    if len(data) > MOST_BYTES:
        raise PictureError(f"has {len(data):,} bytes; {MOST_BYTES:,} are read at most")
    try:
        # 1. Its size, before anything is decoded.
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_size(*image.size)
        if (frames := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":  # a photo with its thumbnails
            raise PictureError(f"is an animation of {frames} pictures; give the ones that are meant")
        # 2. All of it.
        deep = ";16" in str(image.tile)  # colours of 16 bits, which Pillow reads as 8
        image.load()
        kept = image.mode in _KEPT.get(image.format or "", ()) and "transparency" not in image.info and not deep
        if kept and image.getexif().get(_ORIENTATION, 1) == 1:
            return stored(data, f"image/{(image.format or '').lower()}", *image.size)
        # 3. What decoders read differently.
        return _drawn(image)
    except UnidentifiedImageError:
        hint = "an SVG is a drawing: render it first" if b"<svg" in data[:1000] else f"{', '.join(FORMATS)} are read"
        raise PictureError(f"is no picture ({hint})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise PictureError(f"is far larger than the {MOST_PIXELS:,} pixels that are read") from None
    except _DAMAGE as error:
        raise PictureError(f"is damaged: {error}") from None


def _drawn(source: object) -> StoredPicture:
    """Return an image of Pillow's, or an array, as a picture."""
    from PIL import Image

    if not isinstance(source, Image.Image):
        shape, kind = getattr(source, "shape", None), str(getattr(source, "dtype", ""))
        if shape is None or not (len(shape) == 2 or (len(shape) == 3 and shape[2] == 3)) or not kind.endswith("uint8"):
            what = (
                f"an array of shape {tuple(shape)} and type {kind}"
                if shape is not None
                else f"a {type(source).__name__}"
            )
            raise PictureError(
                f"{what} is no picture; give [height, width, 3] of uint8, an image of Pillow's, bytes or a path"
            )
        import numpy as np

        source = Image.fromarray(np.ascontiguousarray(source))
    _check_size(*source.size)
    buffer = io.BytesIO()
    try:
        image = _plain(source)
        image.save(buffer, "PNG")
    except _DAMAGE as error:
        raise PictureError(f"is damaged: {error}") from None
    return stored(buffer.getvalue(), "image/png", *image.size)


def _plain(image: Image) -> Image:
    """Return an image upright, as 8-bit RGB or grey, transparency on white."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode in _16_BIT:
        return image.convert("I").point(lambda value: value / 256).convert("L")
    if "A" in image.getbands() or "transparency" in image.info:
        clear = image.convert("RGBA")
        white = Image.new("RGBA", clear.size, "white")
        return Image.alpha_composite(white, clear).convert("RGB")
    return image if image.mode in ("RGB", "L") else image.convert("RGB")


def _check_size(width: int, height: int) -> None:
    if max(width, height) > LONGEST_SIDE or width * height > MOST_PIXELS or not width * height:
        raise PictureError(
            f"is {width:,} × {height:,} pixels; at most {LONGEST_SIDE:,} to a side and {MOST_PIXELS:,} in all are read"
        )
