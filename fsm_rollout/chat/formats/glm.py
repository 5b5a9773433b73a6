"""GLM-4.5 and later: ``<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>…</tool_call>``.

Source: the chat template of https://huggingface.co/zai-org/GLM-4.5. Strings are not quoted, all else is JSON;
which is which comes from the tools' schemas.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fsm_rollout.chat.formats.base import BadCallError, Call, Collector, Parsed, answer_starts
from fsm_rollout.chat.formats.typed_text import RUN_ON, ParameterTypes, parameter_types, read_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"\s*([^<\s]*)\s*")
_KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
# A closing tag inside a value ends nothing: the real one is followed by the next key or the end of the call.
_VALUE_ENDS = re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>)")


class Glm:
    """Keys and values in turn after the name."""

    name = "glm"

    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        """Parse one assistant turn; see :class:`~fsm_rollout.chat.formats.base.ToolFormat`."""
        collector = Collector(text)
        types = parameter_types(tools)
        start = text.find(OPEN, answer_starts(text))
        while start >= 0:
            try:
                call = self._call(text, start, types)
                end = call.span[1]
                collector.call(call)
            except BadCallError as error:
                closed = text.find(CLOSE, start)
                following = text.find(OPEN, start + 1)
                if closed >= 0 and (following < 0 or closed < following):
                    end = closed + len(CLOSE)
                else:
                    end = following if following >= 0 else len(text)
                    error = BadCallError("unclosed", f"{OPEN} is never closed", error.name)
                collector.problem(error, (start, end))
            start = text.find(OPEN, end)
        return collector.done()

    @staticmethod
    def _call(text: str, start: int, types: ParameterTypes) -> Call:
        head = _NAME.match(text, start + len(OPEN))
        name = head.group(1) if head else ""
        if head is None or not name:
            raise BadCallError("no_name", "a call starts with the tool's name")
        at = head.end()
        arguments: dict[str, Any] = {}
        while key_match := _KEY.match(text, at):
            key = key_match.group(1).strip()
            value = _VALUE_ENDS.search(text, key_match.end())
            if value is None or RUN_ON.search(text, key_match.end(), value.start()):
                raise BadCallError("malformed", f"the value of {key!r} is never closed", name)
            if key in arguments:
                raise BadCallError("malformed", f"argument {key!r} of {name} is given twice", name)
            raw = text[key_match.end() : value.start()]
            arguments[key] = read_value(raw, types.get(name, {}).get(key, frozenset()))
            at = value.end()
        if not text.startswith(CLOSE, at):
            raise BadCallError("malformed", f"expected <arg_key> or {CLOSE} in the call of {name}", name)
        return Call(name, arguments, (start, at + len(CLOSE)))
