"""What may come in as a picture, and what is made of it: every decoder sees the same pixels, or nobody does."""

import base64
import gc
import io
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fsm_rollout.errors import PictureError
from fsm_rollout.trajectory import pictures
from fsm_rollout.trajectory.pictures import StoredPicture, is_picture, picture_of, stored_pictures
from tests.cases import cases
from tests.kit import new_objects

RED = Image.new("RGB", (4, 2), (255, 0, 0))


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png_of(width: int, height: int, bits: int = 8, data: bytes = bytes(4)) -> bytes:
    """A PNG of colours that says how large it is; without data what a bomb looks like."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


DATA = saved(RED)
NOISE = saved(Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)))
MOVING = saved(RED, "GIF", save_all=True, append_images=[Image.new("RGB", (4, 2))])
TEXT = base64.b64encode(DATA).decode()


PARTS = [
    {"type": "image", "image": DATA},
    {"type": "image", "image": RED},
    {"type": "image", "image": {"bytes": DATA, "path": None}},
    {"type": "image", "image": "red.png", "text": None},  # data sets, which give all parts the same keys
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}"}},  # OpenAI, chat
    {"type": "input_image", "image_url": f"data:image/png;base64,{TEXT}"},  # OpenAI, responses
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TEXT}},  # Anthropic
    {"type": "image", "data": TEXT, "mimeType": "image/png"},  # MCP
    {"type": "image", "bytes": DATA, "path": None},  # data sets
    {"type": "image", "path": "red.png"},  # transformers
    {"type": "image", "url": "file://red.png"},
]


@pytest.mark.parametrize(
    "source",
    [
        DATA,
        bytearray(DATA),
        f"data:image/png;base64,{TEXT}",
        f"DATA:image/png;BASE64,{TEXT}",
        "data:image/png," + "".join(f"%{byte:02x}" for byte in DATA),
        *PARTS,
        "red.png",
        RED,
        np.array(RED),
    ],
)
def test_equal_pixels_of_any_source_are_one_object(source: object, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(DATA)
    picture = picture_of(source, tmp_path)
    assert picture is picture_of(DATA)
    assert (picture.width, picture.height, picture.mime) == (4, 2, "image/png")
    assert picture_of(picture) is pickle.loads(pickle.dumps(picture)) is picture
    assert picture_of(picture.data_uri()) is picture
    assert picture_of(tmp_path / "red.png") is picture, "a Path, which only code can give, may lead anywhere"
    assert picture.image().getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("part", PARTS)
def test_a_message_has_each_part_that_is_a_picture_in_one_form(part: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(DATA)
    ours = {"type": "image", "image": picture_of(DATA)}
    text = {"type": "text", "text": "What is it?"}
    message = {"role": "user", "content": [text, part, {"type": "input_text", "text": "And this?"}, part], "name": "x"}
    shown = stored_pictures(message, tmp_path)
    assert shown == message | {"content": [text, ours, text | {"text": "And this?"}, ours]}
    assert message["content"][1] is part, "messages of a caller's are left alone"
    assert stored_pictures(shown) is shown


def test_a_video_becomes_its_frames() -> None:
    blue = Image.new("RGB", (4, 2), (0, 0, 255))
    video = {"type": "video", "video": [RED, np.array(blue), DATA], "fps": 2.0}
    content = stored_pictures({"role": "user", "content": [video]})["content"]
    assert content == [{"type": "image", "image": picture_of(frame)} for frame in (RED, blue, RED)]


@pytest.mark.parametrize("content", [None, "text", [], [{"type": "text", "text": "x"}], [{"type": "audio"}], ["x"], 7])
def test_a_message_without_pictures_is_left_as_it_is(content: object) -> None:
    message = {"role": "user", "content": content}
    assert stored_pictures(message) is message


@cases("trajectory", ({"type": "video", "video": [RED, b"x"]}, "part 1: is no picture"))
def test_a_part_that_shows_nothing_says_which_it_is(part: dict[str, Any], words: str) -> None:
    with pytest.raises(PictureError, match=words):
        stored_pictures({"role": "user", "content": [{"type": "text", "text": "x"}, part]})


def test_without_pillow_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    known = picture_of(DATA)
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    assert picture_of(known) is known
    with pytest.raises(PictureError, match=r"pip install 'fsm-rollout\[vision\]'"):
        picture_of(DATA)


def turned(image: Image.Image = RED) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # held on its side
    return saved(image, "JPEG", exif=exif)


@pytest.mark.parametrize(
    ("source", "size", "pixel"),
    [
        (turned(), (2, 4), (254, 0, 0)),
        (Image.open(io.BytesIO(turned())), (2, 4), (254, 0, 0)),
        (saved(RED, "MPO", save_all=True, append_images=[RED.resize((2, 1))]), (4, 2), (254, 0, 0)),  # with a thumbnail
        (saved(RED.convert("CMYK"), "JPEG"), (4, 2), (254, 0, 0)),
        (saved(Image.new("RGBA", (4, 2), (255, 0, 0, 0))), (4, 2), (255, 255, 255)),
        (saved(Image.new("P", (4, 2), 0), transparency=0), (4, 2), (255, 255, 255)),
        (saved(Image.new("I;16", (4, 2), 0x8000)), (4, 2), (128, 128, 128)),
        (png_of(4, 2, 16, zlib.compress(2 * (b"\0" + 4 * b"\x80\xff\0\0\0\0"))), (4, 2), (128, 0, 0)),
        (saved(RED.convert("1")), (4, 2), (0, 0, 0)),
        (saved(RED, "GIF"), (4, 2), (255, 0, 0)),
        (saved(RED, "BMP"), (4, 2), (255, 0, 0)),
    ],
)
def test_what_decoders_read_differently_becomes_plain(
    source: object, size: tuple[int, int], pixel: tuple[int, int, int]
) -> None:
    picture = picture_of(source)
    stored = Image.open(io.BytesIO(picture.data))
    assert (picture.mime, stored.format, stored.size) == ("image/png", "PNG", size)
    assert stored.mode in ("RGB", "L")
    assert picture.data[24] == 8, "bits, by its head"
    assert np.allclose(picture.image().getpixel((0, 0)), pixel, atol=2)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_what_all_read_alike_stays_as_it_is(form: str) -> None:
    data = saved(RED, form)
    assert picture_of(data).data == data


@cases(
    "trajectory",
    (NOISE[:-200], "damaged"),
    (Image.open(io.BytesIO(NOISE[:-200])), "damaged"),
    (Image.new("L", (20_000, 1)), "20,000 × 1 pixels"),
    (Image.new("L", (10_000, 4_001)), "10,000 × 4,001 pixels"),
    ("data:," + "x" * (pictures.ENCODED + 1), "100,663,296 are read"),
    ({"type": "image", "data": "x" * (pictures.ENCODED + 1)}, "100,663,296 are read"),
    (b"no picture", "PNG, JPEG, WEBP"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "render it first"),
    (MOVING, "animation of"),
    (png_of(60_000, 1), "60,000 × 1 pixels"),
    (png_of(16_000, 16_000), "far larger than the 40,000,000"),
    (b"x" * (pictures.MOST_BYTES + 1), "33,554,432 are read"),
    (np.zeros((4, 2, 3)), "float64"),
)
def test_what_is_no_picture_says_so(source: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(PictureError, match=words):
        picture_of(source, tmp_path)


def test_a_picture_is_held_as_long_as_somebody_holds_it() -> None:
    with new_objects():
        picture = picture_of(Image.new("RGB", (3, 3), (1, 2, 3)))
        name = picture.sha256
        assert name in pictures._PICTURES
        del picture
        gc.collect()
    assert name not in pictures._PICTURES


def test_only_parts_that_are_meant_as_pictures_are() -> None:
    assert is_picture({"type": "image_url", "image_url": {"url": "data:,"}})
    assert not is_picture({"type": "input_audio"})
    assert isinstance(picture_of(DATA), StoredPicture)
