"""Mistral: ``[TOOL_CALLS]`` and a JSON list of calls, or since v11 ``[TOOL_CALLS]name[ARGS]{…}`` for each.

Source: https://docs.mistral.ai/ and the templates of Mistral-Nemo, Mistral-Small and Devstral.
"""

from __future__ import annotations

import re

from fsm_rollout.chat.formats.base import Call, Collector, JsonFormat, arguments_of, read_json, skip_space
from fsm_rollout.chat.render import Tools

_NAMED = re.compile(r"\s*([\w.:-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(?:\[ARGS\]\s*)?(?=\{)")


class Mistral(JsonFormat):
    """A list of objects after one marker, or one call after each."""

    name = "mistral"
    opening = re.compile(r"\[TOOL_CALLS\]")
    following = re.compile(r"(?=\[TOOL_CALLS\])")
    stops = ("</s>",)

    def read(self, collector: Collector, opening: re.Match[str], tools: Tools | None) -> int:
        """Read the named call, or the list."""
        text, start = collector.text, opening.start()
        named = _NAMED.match(text, opening.end())
        if named is not None:
            value, end = read_json(text, named.end())
            name = named.group(1)
            collector.call(Call(name, arguments_of(value, name), (start, end), named.group(2)))
            return end
        value, end = read_json(text, skip_space(text, opening.end()))
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            id_ = item.get("id") if isinstance(item, dict) else None
            # The items of one list share its place; later ones stand at its end, so that order is kept.
            span = (start, end) if index == 0 else (end, end)
            collector.attempt(item, span, id_ if isinstance(id_, str) else None)
        return end
