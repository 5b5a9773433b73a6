"""What a chat message says: the one place where its ``content`` is read.

Invariant: a content is a text, nothing, or a list of parts in OpenAI's form; whoever wants the text of a message or
what else it shows asks here, so that a new kind of part is met in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its content, or that of its text parts; empty where there is none.

    Raises:
        TypeError: the content is neither text nor a list of parts.
    """
    content = message.get("content")
    if type(content) is str:
        return content
    if content is None:
        return ""
    if isinstance(content, str):
        return str.__str__(content)  # of an enum too, whose own `str` is its name
    return "".join([part["text"] for part in _parts(content) if _is_text(part)])


def media_of(message: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the parts of a message that are not text, as they came; TypeError as for :func:`text_of`."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return ()
    return tuple([part for part in _parts(content) if not _is_text(part)])


def _parts(content: object) -> list[Any] | tuple[Any, ...]:
    if not isinstance(content, list | tuple):
        raise TypeError(f"content must be a string, got {type(content).__name__}")
    return content


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
