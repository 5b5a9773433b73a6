"""Pictures where people look: how each is named, and its bytes, once for a page.

Invariant: whatever shows a picture names it by its hash. Its bytes stand in the page's data, once, however often the
page shows it, and are never fetched from anywhere.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.stream import media_of, text_of
from fsm_rollout.trajectory.trajectory import Trajectory

MOST_BYTES = 48 * 2**20  # of the pictures of one page; of those beyond, it has the names
_TYPES = ("image/png", "image/jpeg", "image/webp")  # a journal may say anything


def words_of(picture: StoredPicture, tokens: Iterable[int] = ()) -> str:
    """Return how large a picture is, and how many tokens; several numbers where several models saw it."""
    counts = " or ".join(f"{count:,}" for count in sorted(set(tokens)))
    return f"{picture.width:,}×{picture.height:,}" + (f", {counts} token{'s' * (counts != '1')}" if counts else "")


def line_of(picture: StoredPicture, tokens: Iterable[int] = ()) -> str:
    """Return what stands for a picture where there is only text."""
    return f"[picture {words_of(picture, tokens)}, {picture.sha256[:12]}]"


def words_in(picture: StoredPicture, trajectory: Trajectory) -> str:
    """Return :func:`words_of` a picture with as many tokens as it has in a trajectory."""
    spans = (span for stream in trajectory.streams for span in stream.media)
    return words_of(picture, (span.length for span in spans if span.picture is picture))


def pieces(content: object) -> list[tuple[object, StoredPicture | None]]:
    """Return what a message's content shows in turn: texts, and pictures; content without pictures as it is."""
    if not pictures_in(content) or not isinstance(content, list | tuple):
        return [(content, None)]
    found: list[tuple[object, StoredPicture | None]] = []
    for part in content:
        picture = part.get("image") if isinstance(part, Mapping) else None
        if isinstance(picture, StoredPicture):
            found.append((None, picture))
        else:
            found.append((part.get("text", part) if isinstance(part, Mapping) else part, None))
    return found


def text_with_pictures(message: Message) -> str:
    """Return a message's text, behind a line for each of its pictures."""
    return " ".join([*map(line_of, pictures_in(*media_of(message))), text_of(message)])


def pictures_in(*things: object) -> list[StoredPicture]:
    """Return the different pictures in plain data, in the order in which they come."""
    found: dict[str, StoredPicture] = {}
    waiting = list(things[::-1])
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, StoredPicture):
            found.setdefault(thing.sha256, thing)
        elif isinstance(thing, Mapping):
            waiting += [*thing.values()][::-1]
        elif isinstance(thing, list | tuple):
            waiting += thing[::-1]
    return list(found.values())


def picture_data(pictures: Iterable[StoredPicture], most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the pictures for a page's script, by hash: their bytes as base64, as far as ``most`` of them go."""
    data, left = dict[str, Any](), most
    for picture in pictures:
        left -= len(picture.data)
        if left < 0:
            break
        mime = picture.mime if picture.mime in _TYPES else "application/octet-stream"
        data[picture.sha256] = {"mime": mime, "data": base64.b64encode(picture.data).decode()}
    return data
