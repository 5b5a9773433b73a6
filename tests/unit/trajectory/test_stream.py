"""What a message says, however its content is written."""

from enum import StrEnum
from typing import Any

import pytest

from fsm_rollout.trajectory.stream import media_of, text_of


class Said(StrEnum):
    """A text that shows another one."""

    HI = "hi"

    def __str__(self) -> str:
        return "Said.HI"


PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("message", "text", "media"),
    [
        ({"content": "a"}, "a", ()),
        ({"content": None}, "", ()),
        ({}, "", ()),
        ({"content": Said.HI}, "hi", ()),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab", ()),
        ({"content": ({"type": "text", "text": "a"}, PICTURE, "b")}, "a", (PICTURE, "b")),
        ({"content": [{"type": "text"}]}, "", ({"type": "text"},)),
    ],
)
def test_text_and_media(message: dict[str, Any], text: str, media: tuple[object, ...]) -> None:
    assert (text_of(message), type(text_of(message)), media_of(message)) == (text, str, media)


@pytest.mark.parametrize("read", [text_of, media_of])
def test_what_is_no_content(read: Any) -> None:
    with pytest.raises(TypeError, match="content must be a string, got int"):
        read({"content": 1})
