"""A turn's text as it comes, up to where a tool call may begin.

Invariant: what is shown is a beginning of the turn's final text, in whole characters, whatever follows: it is held back
where a call, or half a character, may have begun.
"""

from __future__ import annotations

import regex

from fsm_rollout.chat.formats.base import TextFormat
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.states.bound_agent import BoundContext

REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one turn; ``bound`` reads its calls."""

    def __init__(self, bound: BoundContext) -> None:
        self._chat, self._stop_ids = bound.chat, bound.stop_ids
        opening = bound.tool_format.opening if isinstance(bound.tool_format, TextFormat) else None
        self._opening = regex.compile(opening.pattern, opening.flags & ~0x20) if opening is not None else None
        self._holds_all = bound.tool_format is not None and opening is None
        self._read = 0  # how many ids have become text
        self._from = 0  # where the ids begin that are decoded again, for what the first of the next ones depends on
        self._text = ""
        self.shown = ""

    def new(self, pending: PendingRequest) -> str:
        """Return what can be shown now and was not before."""
        if self._holds_all:
            return ""
        # 1. What the new ids say: the latest ones are decoded again with them.
        ids = pending.ids
        count = len(ids) - (len(ids) > 0 and ids[-1] in self._stop_ids)
        if count <= self._read:
            return ""
        before = self._chat.decode(ids[self._from : self._read])
        now = self._chat.decode(ids[self._from : count])
        if now.endswith(REPLACEMENT) or not now.startswith(before):
            return ""  # half a character
        self._text += now[len(before) :]
        self._from, self._read = self._read, count
        # 2. How far it can be shown; white space at the ends is no part of a text beside calls.
        end = len(self._text)
        if self._opening is not None:
            found = self._opening.search(self._text, partial=True)
            end = found.start() if found is not None else end
            end = len(self._text[:end].rstrip())
        new = self._text[len(self.shown) if self._opening is None else 0 : end]
        if self._opening is not None:
            new = new.lstrip()[len(self.shown) :]
        self.shown += new
        return new
