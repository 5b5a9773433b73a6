"""Pictures in messages: bytes known by their hash, and what may come in as one.

Invariant: a :class:`StoredPicture` is bytes that every decoder reads alike: PNG, JPEG or WebP, upright, 8 bits, RGB or
grey, within the bounds below; what comes otherwise is converted or refused when it is made. Equal bytes are one object
in a process, so a picture that stands in a thousand messages is held once, and as long as one of them is. Nothing is
ever fetched from an address.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from hashlib import sha256
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
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # what is read; the last two, and odd modes of the others, become PNG
_KEPT = {"PNG": ("RGB", "L"), "JPEG": ("RGB", "L"), "WEBP": ("RGB",)}  # what every decoder reads alike
_ORIENTATION = 0x0112  # the EXIF tag that says how a camera was held
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
        return _known, (self.data, self.mime, self.width, self.height)

    def __repr__(self) -> str:
        return f"<StoredPicture {self.width}×{self.height} {self.sha256[:12]}>"


def picture_of(source: object, base: Path = Path()) -> StoredPicture:
    """Return the picture that something is: bytes, a path, a ``data:`` URI, an image of Pillow's, an array, or a part.

    An array is ``[height, width]`` or ``[height, width, 3]``, of uint8. A part is what messages hold in the forms of
    OpenAI, Anthropic and MCP, or a mapping with ``bytes`` or ``path`` as data sets have it. Paths are relative to
    ``base`` and stay within it. EXIF rotation is carried out; transparency lies on white; CMYK, palettes and 16 bits
    become 8-bit RGB.

    Raises:
        PictureError: it is none, is damaged, moves (an animation), or is beyond the bounds of this module.
    """
    if isinstance(source, StoredPicture):
        return source
    if isinstance(source, Mapping):
        return picture_of(_in_part(source), base)
    if isinstance(source, bytes | bytearray | memoryview):
        return _checked(bytes(source))
    if isinstance(source, str | Path):
        return _checked(_read(source, base))
    return _drawn(source)


def is_picture(part: object) -> bool:
    """Say whether a part of a message's content is meant to be a picture."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "input_image")


def _in_part(part: Mapping[str, Any]) -> object:
    """Return what a part holds as its picture."""
    url = part.get("image_url")
    source = part.get("source")
    if isinstance(source, Mapping):  # Anthropic's
        part = source
    for found in (part.get("image"), part.get("bytes"), url.get("url") if isinstance(url, Mapping) else url):
        if found is not None:
            return found
    if isinstance(data := part.get("data"), str):  # MCP's, Anthropic's
        return _decoded(data)
    if (found := part.get("path", part.get("url"))) is not None:
        return found
    raise PictureError(
        f"a part of type {part.get('type')!r} holds no picture: it has {', '.join(map(str, part)) or 'nothing'}"
    )


def _read(source: str | Path, base: Path) -> bytes:
    text = str(source)
    if text.startswith("data:"):
        head, comma, body = text.partition(",")
        if not comma:
            raise PictureError("a data: URI needs a comma before its data")
        return _decoded(body) if head.endswith(";base64") else unquote_to_bytes(body)
    if "://" in text:
        raise PictureError(
            f"'{text[:80]}' is an address; nothing is fetched for a picture: give a file, bytes or a data: URI"
        )
    path = (base / text).resolve()
    if not path.is_relative_to(base.resolve()):
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
    from PIL import Image, ImageOps, UnidentifiedImageError

    digest = sha256(data).hexdigest()
    if (known := _PICTURES.get(digest)) is not None:
        return known
    if len(data) > MOST_BYTES:
        raise PictureError(f"has {len(data):,} bytes; {MOST_BYTES:,} are read at most")
    try:
        # 1. Its size, before anything is decoded.
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_size(*image.size)
        if (frames := getattr(image, "n_frames", 1)) > 1:
            raise PictureError(f"is an animation of {frames} pictures; give the ones that are meant")
        # 2. All of it.
        image.load()
        kept = image.mode in _KEPT.get(image.format or "", ()) and "transparency" not in image.info
        if kept and image.getexif().get(_ORIENTATION, 1) == 1:
            return _known(data, f"image/{(image.format or '').lower()}", *image.size)
        # 3. What decoders read differently.
        return _drawn(ImageOps.exif_transpose(image))
    except UnidentifiedImageError:
        hint = "an SVG is a drawing: render it first" if b"<svg" in data[:1000] else f"{', '.join(FORMATS)} are read"
        raise PictureError(f"is no picture ({hint})") from None
    except Image.DecompressionBombError:
        raise PictureError(f"is far larger than the {MOST_PIXELS:,} pixels that are read") from None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
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
    _plain(source).save(buffer, "PNG")
    return _known(buffer.getvalue(), "image/png", *source.size)


def _plain(image: Image) -> Image:
    """Return an image as 8-bit RGB or grey, transparency on white."""
    from PIL import Image

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


def _known(data: bytes, mime: str, width: int, height: int) -> StoredPicture:
    """Return the one object that these bytes are."""
    picture = StoredPicture(data, mime, width, height)
    return _PICTURES.setdefault(picture.sha256, picture)
