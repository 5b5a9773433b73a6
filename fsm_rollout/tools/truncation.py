"""Shortening text to a number of *tokens*.

Invariant: what comes back, encoded again, is at most ``limit`` tokens long, and consists of whole characters of the
original. Text is cut where tokens begin and end in it, never by decoding tokens: a decoded cut can split a character,
and may encode to more tokens than it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

Side = Literal["left", "right", "middle"]

EXACT_CHARACTERS = 200_000
"""Of longer text only so much is tokenised (10 MB would hold up every trajectory for seconds)."""


class Tokenizer(Protocol):
    """A transformers fast tokenizer, as far as it is needed here."""

    def __call__(self, text: str, **options: bool) -> Mapping[str, Any]:
        """Return the tokens of a text: ``offset_mapping``, among others."""


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
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        return offsets

    # 1. Whether it fits. Of a very long text only the ends that may be kept are looked at.
    seen, unseen = text, max(0, len(text) - EXACT_CHARACTERS)
    if unseen:
        first = _beginning(EXACT_CHARACTERS, side)
        seen = text[:first] + text[first + unseen :]
    offsets = offsets_of(seen)
    if unseen and len(offsets) <= limit:
        seen, unseen = text, 0
        offsets = offsets_of(text)
    if len(offsets) <= limit:
        return text, 0
    # 2. The room that the marker takes.
    beyond = round(unseen * len(offsets) / len(seen))
    marker_size = len(offsets_of(_marker(len(offsets) + beyond)))
    if marker_size * 2 > limit:
        marker_size = 0
    kept = limit - marker_size
    while True:
        # 3. A cut, in whole characters. The tokens of one character share its place in the text, so the first dropped
        # token's start and the last dropped token's end are never inside a character.
        first = _beginning(kept, side)
        last = kept - first
        head = seen[: offsets[first][0]] if first else ""
        tail = seen[offsets[len(offsets) - last - 1][1] :] if last else ""
        dropped = beyond + sum(1 for start, end in offsets if end > len(head) and start < len(seen) - len(tail))
        shorter = head + (_marker(dropped) if marker_size else "") + tail
        excess = len(offsets_of(shorter)) - limit
        if excess <= 0:
            return shorter, dropped
        # 4. Cutting may have changed how the edges encode; a few tokens less will do. Should the marker alone be too
        # long (its number is not the one it was measured with), it goes too; in the end nothing is left, which fits.
        if kept == 0:
            marker_size, kept = 0, limit
        else:
            kept = max(0, kept - excess)


def _beginning(size: int, side: Side) -> int:
    """Return how much of ``size`` stands before the cut."""
    return {"left": 0, "right": size, "middle": (size + 1) // 2}[side]


def _marker(tokens: int) -> str:
    return f"…[{tokens} tokens cut]…"
