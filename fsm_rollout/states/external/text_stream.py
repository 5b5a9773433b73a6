"""A turn's text as it comes, up to where a tool call may begin, and before it what the model thinks.

Invariant: what is shown is a beginning of the turn's final text (or thought), in whole characters, whatever follows: it
is held back where a call, the end of the thought, or half a character, may have begun.
"""

from __future__ import annotations

from collections.abc import Sequence

import regex

from fsm_rollout.chat.formats.base import TextFormat
from fsm_rollout.chat.thinking import ThinkingTags
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.states.bound_agent import BoundContext

REPLACEMENT = "\ufffd"


def split_thought(text: str, tags: ThinkingTags | None, inside: bool = False) -> tuple[str, str]:
    """Return what a turn's text thinks, and what it says; ``inside``: it begins within the thought.

    Without tags, and where no thought stands first, all of it is said.
    """
    begun = text.lstrip()
    if tags is None or not (inside or begun.startswith(tags.opening)):
        return "", text
    thought, _, said = begun.removeprefix(tags.opening).partition(tags.closing)
    return thought.strip(), said.lstrip()


def until_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return a text up to the first of some strings, and which one that is; ``None``: it holds none."""
    found = min(((text.find(stop), stop) for stop in stops if stop in text), default=None)
    return (text, None) if found is None else (text[: found[0]], found[1])


class TextStream:
    """The text of one turn; ``bound`` reads its calls.

    With ``tags`` what the model thinks is told apart; ``inside``: the turn begins within its thought. It is shown up to
    the first of ``stops``.
    """

    def __init__(
        self, bound: BoundContext, tags: ThinkingTags | None = None, inside: bool = False, stops: Sequence[str] = ()
    ) -> None:
        self._chat, self._stop_ids = bound.chat, bound.stop_ids
        self._tags, self._inside = tags, inside
        opening = bound.tool_format.opening if isinstance(bound.tool_format, TextFormat) else None
        self._opening = regex.compile(opening.pattern, opening.flags & ~0x20) if opening is not None else None
        self._stop = regex.compile("|".join(map(regex.escape, stops))) if stops else None
        self._holds_all = bound.tool_format is not None and opening is None
        self._read = 0  # how many ids have become text
        self._from = 0  # where the ids begin that are decoded again, for what the first of the next ones depends on
        self._text = ""
        self.shown = self.thought = ""

    def new(self, pending: PendingRequest) -> bool:
        """Whether more can be shown now than before."""
        if self._holds_all:
            return False
        # 1. What the new ids say: the latest ones are decoded again with them.
        ids = pending.ids
        count = len(ids) - (len(ids) > 0 and ids[-1] in self._stop_ids)
        if count <= self._read:
            return False
        before = self._chat.decode(ids[self._from : self._read])
        now = self._chat.decode(ids[self._from : count])
        if now.endswith(REPLACEMENT) or not now.startswith(before):
            return False  # half a character
        self._text += now[len(before) :]
        self._from, self._read = self._read, count
        # 2. How far it can be shown; white space at the ends is no part of a text beside calls, or of a thought.
        text, shown, thought = self._text, self.shown, self.thought
        if self._opening is not None:
            found = self._opening.search(text, partial=True)
            text = text[: found.start() if found is not None else None].rstrip()
        if self._tags is not None:
            text = self._without_half(text)
            self.thought, text = split_thought(text, self._tags, self._inside)
        if self._stop is not None:
            found = self._stop.search(text, partial=True)
            text = text[: found.start() if found is not None else None]
        self.shown = text if self._opening is None else text.lstrip()
        return (self.shown, self.thought) != (shown, thought)

    def _without_half(self, text: str) -> str:
        """Return a text without what may have begun at its end, or is its beginning: a thought's tag."""
        assert self._tags is not None
        if not self._inside and self._tags.opening.startswith(text.strip()):
            return ""
        closing = self._tags.closing
        half = next((n for n in range(min(len(closing) - 1, len(text)), 0, -1) if text.endswith(closing[:n])), 0)
        return text[: len(text) - half]
