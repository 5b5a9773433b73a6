"""Qwen3-Coder, Qwen3.5 and Nemotron-3: ``<tool_call><function=name><parameter=key>value</parameter>…``.

Source: the chat template of https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct. Values stand on lines of
their own and are not quoted; their types come from the tools' schemas.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fsm_rollout.chat.formats.base import BadCallError, Call, Collector, Parsed, answer_starts
from fsm_rollout.chat.formats.typed_text import RUN_ON, ParameterTypes, parameter_types, read_value

_START = re.compile(r"<tool_call>|<function=")
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?")
# A closing tag inside a value ends nothing: the real one is followed by the next tag.
_VALUE_ENDS = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")
_CLOSED = re.compile(r"\s*</function>")


class Qwen3Coder:
    """One ``<function=…>`` element per ``<tool_call>`` block; the outer tag may be missing."""

    name = "qwen3_coder"

    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        """Parse one assistant turn; see :class:`~fsm_rollout.chat.formats.base.ToolFormat`."""
        collector = Collector(text)
        types = parameter_types(tools)
        found = _START.search(text, answer_starts(text))
        while found:
            start, end = found.span()
            wrapped = found.group() == "<tool_call>"
            try:
                call, end = self._call(text, start, end if wrapped else start, wrapped, types)
                collector.call(call)
            except BadCallError as error:
                end, closed = self._broken_end(text, end, "</tool_call>" if wrapped else "</function>")
                if not closed:
                    error = BadCallError("unclosed", f"{found.group()} is never closed", error.name)
                collector.problem(error, (start, end))
            found = _START.search(text, end)
        return collector.done()

    @staticmethod
    def _call(text: str, start: int, at: int, wrapped: bool, types: ParameterTypes) -> tuple[Call, int]:
        function = _FUNCTION.match(text, at)
        if function is None:
            raise BadCallError("malformed", "expected <function=name> after <tool_call>")
        name = function.group(1).strip()
        if not name:
            raise BadCallError("no_name", "<function=> has no name")
        at = function.end()
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(text, at):
            key = parameter.group(1).strip()
            value = _VALUE_ENDS.search(text, parameter.end())
            if value is None or RUN_ON.search(text, parameter.end(), value.start()):
                raise BadCallError("malformed", f"<parameter={key}> of {name} is never closed", name)
            if key in arguments:
                raise BadCallError("malformed", f"parameter {key!r} of {name} is given twice", name)
            raw = text[parameter.end() : value.start()]
            arguments[key] = read_value(raw, types.get(name, {}).get(key, frozenset()))
            at = value.end()
        closed = _CLOSED.match(text, at)
        if closed is None:
            raise BadCallError("malformed", f"expected <parameter= or </function> in the call of {name}", name)
        at = closed.end()
        if wrapped:
            tail = re.compile(r"\s*</tool_call>").match(text, at)
            if tail is None:
                raise BadCallError("malformed", "expected </tool_call> after </function>", name)
            at = tail.end()
        return Call(name, arguments, (start, at)), at

    @staticmethod
    def _broken_end(text: str, at: int, closing: str) -> tuple[int, bool]:
        """Return where a broken call ends, at its closing tag or where the next call opens, and which it is."""
        closed = text.find(closing, at)
        following = text.find("<tool_call>", at)
        if closed >= 0 and (following < 0 or closed < following):
            return closed + len(closing), True
        return (following if following >= 0 else len(text)), False
