"""Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of them in a turn.

Source: https://github.com/NousResearch/Hermes-Function-Calling and the templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsm_rollout.chat.formats.base import (
    BadCallError,
    Collector,
    Parsed,
    answer_starts,
    call_of,
    read_json,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """One JSON object per ``<tool_call>`` block."""

    name = "hermes"

    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        """Parse one assistant turn; see :class:`~fsm_rollout.chat.formats.base.ToolFormat`."""
        start = text.find(OPEN, answer_starts(text))
        collector = Collector(text)
        while start >= 0:
            inside = start + len(OPEN)
            end = inside
            try:
                value, after = self._object(text, inside)
                end = after
                span = (start, after)
                collector.call(call_of(value, span))
            except BadCallError as error:
                closed = text.find(CLOSE, inside)
                following = text.find(OPEN, inside)
                if closed >= 0 and (following < 0 or closed < following):
                    end = closed + len(CLOSE)
                else:
                    end = following if following >= 0 else len(text)
                    if error.kind == "invalid_json":
                        error = BadCallError("unclosed", f"{OPEN} is never closed", error.name)
                collector.problem(error, (start, end))
            start = text.find(OPEN, end)
        return collector.done()

    @staticmethod
    def _object(text: str, start: int) -> tuple[Any, int]:
        """Read the object between the tags: by its own syntax, so a tag inside a string ends nothing."""
        while start < len(text) and text[start].isspace():
            start += 1
        value, end = read_json(text, start)
        while end < len(text) and text[end].isspace():
            end += 1
        if not text.startswith(CLOSE, end):
            raise BadCallError("invalid_json", f"expected {CLOSE} after the object")
        return value, end + len(CLOSE)
