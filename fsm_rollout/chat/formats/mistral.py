"""Mistral: ``[TOOL_CALLS]`` and a JSON list of calls, or since v11 ``[TOOL_CALLS]name[ARGS]{…}`` for each.

Source: https://docs.mistral.ai/ and the templates of Mistral-Nemo, Mistral-Small and Devstral.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fsm_rollout.chat.formats.base import (
    BadCallError,
    Call,
    Collector,
    Parsed,
    answer_starts,
    arguments_of,
    call_of,
    read_json,
)

OPEN = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.:-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(?:\[ARGS\]\s*)?(?=\{)")


class Mistral:
    """A list of objects after one marker, or one call after each."""

    name = "mistral"

    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        """Parse one assistant turn; see :class:`~fsm_rollout.chat.formats.base.ToolFormat`."""
        collector = Collector(text)
        start = text.find(OPEN, answer_starts(text))
        while start >= 0:
            at = start + len(OPEN)
            following = text.find(OPEN, at)
            limit = following if following >= 0 else len(text)
            try:
                at = self._block(text, start, at, collector)
            except BadCallError as error:
                stop = len(text[:limit].rstrip().removesuffix("</s>").rstrip())
                if error.at is not None and error.at >= stop:
                    error = BadCallError("unclosed", "the JSON of the call is never closed", error.name)
                collector.problem(error, (start, limit))
            start = text.find(OPEN, at)
        return collector.done()

    @staticmethod
    def _block(text: str, start: int, at: int, collector: Collector) -> int:
        named = _NAMED.match(text, at)
        if named is not None:
            value, end = read_json(text, named.end())
            name = named.group(1)
            collector.call(Call(name, arguments_of(value, name), (start, end), named.group(2)))
            return end
        while at < len(text) and text[at].isspace():
            at += 1
        value, end = read_json(text, at)
        items = value if isinstance(value, list) else [value]
        for index, item in enumerate(items):
            # The items of one list share its place; later ones stand at its end, so that order is kept.
            span = (start, end) if index == 0 else (end, end)
            try:
                call = call_of(item, span)
            except BadCallError as error:
                collector.problem(error, span)
                continue
            id_ = item.get("id")
            collector.call(replace(call, id=id_ if isinstance(id_, str) else None))
        return end
