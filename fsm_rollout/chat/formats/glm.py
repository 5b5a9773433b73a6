"""GLM-4.5 and later: ``<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>…</tool_call>``.

Source: the chat template of https://huggingface.co/zai-org/GLM-4.5. Strings are not quoted, all else is JSON;
which is which comes from the tools' schemas.
"""

from __future__ import annotations

import re

from fsm_rollout.chat.formats.base import BadCallError, Call, Collector, TagFormat
from fsm_rollout.chat.formats.typed_text import read_arguments
from fsm_rollout.chat.render import Tools

_NAME = re.compile(r"\s*([^<\s]*)\s*")
_KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
# A closing tag inside a value ends nothing: the real one is followed by the next key or the end of the call.
_VALUE_ENDS = re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>)")


class Glm(TagFormat):
    """Keys and values in turn after the name."""

    name = "glm"

    def read(self, collector: Collector, opening: re.Match[str], tools: Tools | None) -> int:
        """Read the name, then the arguments."""
        text = collector.text
        head = _NAME.match(text, opening.end())
        if head is None or not head.group(1):
            raise BadCallError("no_name", "a call starts with the tool's name")
        name = head.group(1)
        arguments, end = read_arguments(text, head.end(), name, _KEY, _VALUE_ENDS, tools)
        if not text.startswith("</tool_call>", end):
            raise BadCallError("malformed", f"expected <arg_key> or </tool_call> in the call of {name}", name)
        end += len("</tool_call>")
        collector.call(Call(name, arguments, (opening.start(), end)))
        return end
