"""The README's pictures of a trajectory page are those of the page as it is now, told without a browser."""

import struct
import zlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.kit import script

MOST = 400_000
"""Bytes of a picture that a README loads."""


@pytest.fixture(scope="module")
def photograph() -> ModuleType:
    return script("diagrams/photograph.py")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_shipped_picture_is_that_of_the_page(photograph: ModuleType, theme: str) -> None:
    picture = photograph.PICTURES[theme]
    assert photograph.shown_by(picture) == photograph.fingerprint(photograph.page()), "stale: run `make diagrams`"
    assert picture.stat().st_size < MOST


def test_the_fingerprint_is_of_what_is_shown(photograph: ModuleType) -> None:
    page = photograph.page()
    same = page.replace('<polygon fill="black"', '<polygon points="9,9" fill="black"')
    assert same != page
    assert photograph.fingerprint(same) == photograph.fingerprint(page), "where Graphviz puts things is its own affair"
    for other in (page.replace("PROCESSING_TOOLS</text>", "TOOLS</text>"), page.replace("</h1>", "!</h1>"), page + " "):
        assert other != page
        assert photograph.fingerprint(other) != photograph.fingerprint(page)


def test_a_marked_picture_is_still_one(photograph: ModuleType, tmp_path: Path) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    rest = chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")
    plain, picture = b"\x89PNG\r\n\x1a\n" + head + rest, tmp_path / "p.png"
    picture.write_bytes(plain)
    assert photograph.shown_by(picture) is None
    picture.write_bytes(photograph.marked(plain, "abc"))
    assert photograph.shown_by(picture) == "abc"
    assert picture.read_bytes() == b"\x89PNG\r\n\x1a\n" + head + chunk(b"tEXt", b"page\0abc") + rest
