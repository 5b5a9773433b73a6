"""Qwen3-Coder, Qwen3.5 and Nemotron-3: ``<tool_call><function=name><parameter=key>value</parameter>…``.

Source: the chat template of https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct. Values stand on lines of
their own and are not quoted; their types come from the tools' schemas.
"""

from __future__ import annotations

import re
from typing import ClassVar

from fsm_rollout.chat.formats.base import BadCallError, Call, Collector, TagFormat
from fsm_rollout.chat.formats.typed_text import read_arguments
from fsm_rollout.chat.render import Tools

_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?")
# A closing tag inside a value ends nothing: the real one is followed by the next tag.
_VALUE_ENDS = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")
_FUNCTION_ENDS = re.compile(r"\s*</function>")
_CALL_ENDS = re.compile(r"\s*</tool_call>")


class Qwen3Coder(TagFormat):
    """One ``<function=…>`` element per ``<tool_call>`` block; the outer tag may be missing."""

    name = "qwen3_coder"
    opening = re.compile("<tool_call>|<function=")
    closings: ClassVar = {**TagFormat.closings, "<function=": "</function>"}

    def read(self, collector: Collector, opening: re.Match[str], tools: Tools | None) -> int:
        """Read the function element, and the outer tag's end where there is one."""
        text, wrapped = collector.text, opening.group() == "<tool_call>"
        function = _FUNCTION.match(text, opening.end() if wrapped else opening.start())
        if function is None:
            raise BadCallError("malformed", "expected <function=name> after <tool_call>")
        name = function.group(1).strip()
        if not name:
            raise BadCallError("no_name", "<function=> has no name")
        arguments, at = read_arguments(text, function.end(), name, _PARAMETER, _VALUE_ENDS, tools)
        end = _FUNCTION_ENDS.match(text, at)
        if end is None:
            raise BadCallError("malformed", f"expected <parameter= or </function> in the call of {name}", name)
        if wrapped:
            end = _CALL_ENDS.match(text, end.end())
            if end is None:
                raise BadCallError("malformed", "expected </tool_call> after </function>", name)
        collector.call(Call(name, arguments, (opening.start(), end.end())))
        return end.end()
