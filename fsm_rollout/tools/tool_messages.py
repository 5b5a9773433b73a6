"""What a model reads and sees of its tool calls, and how it is cut to size.

Invariant: an error reads ``error: <what was wrong>; <what to do>`` and is short, whatever an exception may hold; all
text is valid Unicode, so that any tokenizer can encode it. Text that is cut, encoded again, is at most ``limit`` tokens
long, and consists of whole characters of the original: it is cut where tokens begin and end in it, never by decoding
tokens, since a decoded cut can split a character, and may encode to more tokens than it had.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, cast

from pydantic_core import to_jsonable_python

from fsm_rollout.errors import PictureError, did_you_mean
from fsm_rollout.trajectory.pictures import StoredPicture, is_picture, stored_pictures
from fsm_rollout.trajectory.stream import media_of, text_of

Part: TypeAlias = dict[str, Any]  # of a message's content

# Plain data of about so many characters is made text on the event loop, in less than a millisecond.
QUICK_CHARACTERS = 20_000
LONGEST_MESSAGE = 500  # characters of an exception's message that a model is shown
GO_ON = "try again or go on without it"
Side = Literal["left", "right", "middle"]
# Of longer text only so much is tokenised: 100 MB would take minutes, and no context has room for them.
EXACT_CHARACTERS = 200_000


class Unshowable(Exception):
    """What a tool returned cannot be made text: its author's mistake, which neither the model nor a retry can mend."""


def result(value: object) -> str:
    """Return a tool's return value as text: strings and numbers as they are, the rest as JSON.

    Dataclasses, pydantic models, dates, sets and arrays (what has ``tolist``) become plain data first.

    Raises:
        Unshowable: the value holds something that has no JSON form, or a number of more digits than Python writes out.
    """
    if isinstance(value, str):
        return clean(str.__str__(value))
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        return clean(json.dumps(to_jsonable_python(value, fallback=_plain_data), ensure_ascii=False))
    except Exception as error:  # a type's own hooks may raise anything
        kind = type(value).__name__
        raise Unshowable(f"{kind} was returned, which cannot be shown to a model: {message_of(error)}") from error


def content(value: object) -> tuple[str, list[Part]]:
    """Return a tool's return value as text, and as the parts of a message where it shows pictures.

    It shows one if it is one: a stored picture, an image of Pillow's, an array ``[height, width, 3]`` of uint8, a part
    of a message's content; a part of type video shows its frames. A list or tuple shows those that stand in it, its
    other items as :func:`result` writes them.

    Raises:
        Unshowable: as for :func:`result`; or a picture is damaged, or beyond the bounds of pictures.
    """
    if isinstance(value, str | int | float | None):  # by far the most common
        return result(value), []
    items = value if isinstance(value, list | tuple) else [value]
    if not any(map(_is_drawn, items)):
        return result(value), []
    try:
        parts = [part for item in items for part in _parts_of(item)]
    except PictureError as error:
        raise Unshowable(f"{type(value).__name__} was returned, which cannot be shown: {error}") from error
    return text_of({"content": parts}), parts


def _is_drawn(value: object) -> bool:
    if isinstance(value, Mapping):  # `{"type": "image", "url": …}` may be any search's plain data
        if value.get("type") == "video":
            return isinstance(value.get("video"), list | tuple)
        holds = "image", "source", "data", "bytes"
        return is_picture(value) and (value["type"] != "image" or any(key in value for key in holds))
    shape: Sequence[int] = getattr(value, "shape", ())
    kind = str(getattr(value, "dtype", ""))
    if kind.endswith("uint8") and len(shape) == 3 and shape[2] == 3:
        return True
    return isinstance(value, StoredPicture) or any(cls.__module__ == "PIL.Image" for cls in type(value).__mro__)


def _parts_of(item: object) -> list[Part]:
    if isinstance(item, Mapping) and item.get("type") == "text" and isinstance(item.get("text"), str):
        return [{"type": "text", "text": clean(item["text"])}]
    if not _is_drawn(item):
        return [{"type": "text", "text": result(item)}]
    part = item if isinstance(item, Mapping) else {"type": "image", "image": item}
    return cast(list[Part], [*media_of(stored_pictures({"content": [part]}))])


def is_short(value: object) -> bool:
    """Say whether :func:`result` of a value is quick: text, or plain data of less than some thousand characters."""
    if isinstance(value, str | int | float | None):
        return True
    room, waiting = QUICK_CHARACTERS, [value]
    while waiting and room > 0:
        item = waiting.pop()
        if isinstance(item, str):
            room -= len(item)
        elif isinstance(item, Mapping):
            room -= 8 * len(item)
            waiting += [*item, *item.values()] if room > 0 else []
        elif isinstance(item, list | tuple):
            room -= 8 * len(item)
            waiting += item if room > 0 else []
        elif not isinstance(item, int | float | None):
            return False  # arrays, models: only their own code knows
    return room > 0


def error_text(problem: str, advice: str) -> str:
    """Answer a call that failed."""
    return clean(f"error: {problem}; {advice}")


def unknown_tool(name: str, tools: Sequence[str]) -> str:
    """Answer a call of a tool that does not exist."""
    hint = did_you_mean(name, tools).removeprefix("; ")
    hint = f"{hint} " if hint.startswith("did") else ""
    listed = f"the tools are: {', '.join(tools)}" if tools else "there are no tools here"
    return error_text(f"there is no tool '{_short(name, 100)}'", hint + listed)


def interrupted(name: str) -> str:
    """Answer a call that was cut off, and may have had its effect, when the run was interrupted."""
    return error_text(f"{name}: the call was interrupted and may have had its effect", "check before you call it again")


def timed_out(name: str, seconds: float | None) -> str:
    """Answer a call that took too long."""
    after = f" after {seconds:g} s" if seconds is not None else ""
    return error_text(f"{name} did not answer and was stopped{after}", GO_ON)


def described(error: BaseException, name: str = "") -> str:
    """Return the name of an error's class (or the ``name`` given for it) and its message, shortened."""
    name, message = name or type(error).__name__, message_of(error)
    return f"{name}: {message}" if message else name


def message_of(error: BaseException) -> str:
    """Return an error's message, shortened, as valid Unicode."""
    try:
        return clean(_short(str(error), LONGEST_MESSAGE))
    except Exception:  # an exception that cannot even be printed
        return ""


def clean(text: str) -> str:
    """Return ``text`` as valid Unicode: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def fit(
    parts: Sequence[Part], sizes: Sequence[int], tokenizer: Tokenizer, limit: int, side: Side
) -> tuple[list[Part], int]:
    """Cut a result with pictures to at most ``limit`` tokens, and say how many were dropped.

    Pictures stay whole or go: the first ones that fit beside the text stay, or beside half the limit, of which the text
    is sure. A text says how many were left out. Where text is cut, the pictures stand behind all of it.

    Args:
        parts: texts and pictures.
        sizes: how many tokens each of the pictures has.
        tokenizer: as for :func:`truncate`.
        limit: in tokens, at least 1.
        side: which part of the text is dropped.
    """

    def count(text: str) -> int:
        return len(
            tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        )

    # 1. Which pictures stay.
    text = text_of({"content": parts})
    length = count(text)
    if length + sum(sizes) <= limit:
        return list(parts), 0
    room = limit - min(length + count(_note(len(sizes), len(sizes))), limit // 2)
    kept = next((number for number in range(len(sizes)) if sum(sizes[: number + 1]) > room), len(sizes))
    spent = sum(sizes[:kept])
    note = _note(len(sizes) - kept, len(sizes)) if kept < len(sizes) else ""
    # 2. The text beside them: whole, or cut to what is left. Texts that meet may encode to more tokens than apart.
    over = 0
    while True:
        left = limit - spent - count(note) - over
        shorter, dropped = truncate(text, tokenizer, left, side) if left > 0 else ("", length)
        if (excess := count(shorter + note) + spent - limit) <= 0 or left <= 0:
            break
        over += excess
    dropped += sum(sizes[kept:])
    shown = [part for part in parts if is_picture(part)][:kept]
    if shorter == text and left > 0:
        stays = {id(part) for part in shown}
        kept_parts = [part for part in parts if not is_picture(part) or id(part) in stays]
        return kept_parts + ([{"type": "text", "text": note.lstrip()}] if note else []), dropped
    whole = truncate(shorter + note, tokenizer, limit - spent, "right")[0]  # where there is not even room for the note
    return [{"type": "text", "text": whole.lstrip()}, *shown], dropped


class Tokenizer(Protocol):
    """A transformers fast tokenizer, as far as it is needed here."""

    def __call__(self, text: str, **options: bool) -> Mapping[str, list[tuple[int, int]]]:
        """Return ``offset_mapping``, where each token of a text begins and ends."""


def truncate(text: str, tokenizer: Tokenizer, limit: int, side: Side = "middle") -> tuple[str, int]:
    """Shorten ``text`` to at most ``limit`` tokens and say how many were dropped.

    ``side`` is what goes: ``left`` drops the beginning, ``right`` the end, ``middle`` keeps both ends. Where something
    went stands ``…[N tokens cut]…``, counted in the limit, unless it would take more than half of it.

    Args:
        text: valid Unicode.
        tokenizer: a transformers fast tokenizer. A control token written in the text counts as one token.
        limit: in tokens, at least 1.
        side: which part is dropped.

    Returns:
        The text (the same object when it fits) and the number of tokens dropped: 0 when it fits; an estimate when the
        text is longer than ``EXACT_CHARACTERS``.
    """

    def offsets_of(text: str) -> list[tuple[int, int]]:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["offset_mapping"]

    # 1. Whether it fits. Of a very long text only the ends that may be kept are looked at.
    examined, unseen = text, max(0, len(text) - EXACT_CHARACTERS)
    if unseen:
        first = _beginning(EXACT_CHARACTERS, side)
        examined = text[:first] + text[first + unseen :]
    offsets = offsets_of(examined)
    if unseen and len(offsets) <= limit:
        examined, unseen = text, 0
        offsets = offsets_of(text)
    if len(offsets) <= limit:
        return text, 0
    # 2. The room that the marker takes.
    beyond = round(unseen * len(offsets) / len(examined))
    marker_size = len(offsets_of(_marker(len(offsets) + beyond)))
    if marker_size * 2 > limit:
        marker_size = 0
    kept_size = limit - marker_size
    while True:
        # 3. A cut, in whole characters. The tokens of one character share its place in the text, so the first dropped
        # token's start and the last dropped token's end are never inside a character.
        first = _beginning(kept_size, side)
        last = kept_size - first
        head = examined[: offsets[first][0]] if first else ""
        tail = examined[offsets[len(offsets) - last - 1][1] :] if last else ""
        dropped = beyond + sum(1 for start, end in offsets if end > len(head) and start < len(examined) - len(tail))
        shorter = head + (_marker(dropped) if marker_size else "") + tail
        excess = len(offsets_of(shorter)) - limit
        if excess <= 0:
            return shorter, dropped
        # 4. Cutting may have changed how the edges encode; a few tokens less will do. Should the marker alone be too
        # long (its number is not the one it was measured with), it goes too; in the end nothing is left, which fits.
        if kept_size == 0:
            marker_size, kept_size = 0, limit
        else:
            kept_size = max(0, kept_size - excess)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length // 2]} … {text[-length // 2 :]}"


def _plain_data(value: object) -> object:
    if (tolist := getattr(value, "tolist", None)) is not None:
        return tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form; return text, numbers or plain data")


def _beginning(size: int, side: Side) -> int:
    """Return how much of ``size`` stands before the cut."""
    return {"left": 0, "right": size, "middle": (size + 1) // 2}[side]


def notices_in(text: str) -> Iterable[tuple[int, int]]:
    """Return where a text says, in the words of :func:`truncate` and :func:`fit`, how much of it was cut."""
    if not any(word in text for word in _CUT_WORDS):
        return ()
    return [match.span() for match in _CUT.finditer(text)]


def _note(left_out: int, pictures: int) -> str:
    return f"\n[{left_out} of {pictures} pictures left out]"


def _marker(tokens: int) -> str:
    return f"…[{tokens:,} tokens cut]…"


_CUT_WORDS = (" tokens cut]", " pictures left out]")  # quick to look for
# As templates may have escaped the ellipsis.
_CUT = re.compile(r"(?:…|\\u2026)\[[\d,]+ tokens cut\](?:…|\\u2026)|\[\d+ of \d+ pictures left out\]")
