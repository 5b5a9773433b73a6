"""Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of them in a turn.

Source: https://github.com/NousResearch/Hermes-Function-Calling and the templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

import re

from fsm_rollout.chat.formats.base import BadCallError, Collector, TagFormat, read_json, skip_space
from fsm_rollout.chat.render import Tools


class Hermes(TagFormat):
    """One JSON object per ``<tool_call>`` block, read by its own syntax: a tag inside a string ends nothing."""

    name = "hermes"

    def read(self, collector: Collector, opening: re.Match[str], tools: Tools | None) -> int:
        """Read the object between the tags."""
        text = collector.text
        value, end = read_json(text, skip_space(text, opening.end()))
        end = skip_space(text, end)
        if not text.startswith("</tool_call>", end):
            raise BadCallError("invalid_json", "expected </tool_call> after the object")
        end += len("</tool_call>")
        collector.attempt(value, (opening.start(), end))
        return end
