"""Llama 3.1 and 3.2: a bare JSON object ``{"name": …, "parameters": {…}}``, perhaps after ``<|python_tag|>``.

Source: https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md. An object without
parameters is an answer in JSON, not a call.
"""

from __future__ import annotations

import re

from fsm_rollout.chat.formats.base import (
    BadCallError,
    Call,
    Collector,
    JsonFormat,
    Span,
    arguments_of,
    read_json,
)
from fsm_rollout.chat.render import Tools

_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"\s*;\s*\Z")


class Llama3Json(JsonFormat):
    """Objects anywhere in the text, separated by ``;`` if there are several."""

    name = "llama3_json"
    opening = re.compile(r'(?:<\|python_tag\|>\s*)?\{(?=\s*"(?:name|type|function|parameters|arguments)"\s*:)')
    following = re.compile(rf"[;\n]\s*(?={opening.pattern})")  # at the start of a line, or after ";"
    stops = ("<|eot_id|>", "<|eom_id|>")

    def read(self, collector: Collector, opening: re.Match[str], tools: Tools | None) -> int:
        """Read the object; what stands between two calls is no text of its own."""
        text = collector.text
        value, end = read_json(text, opening.end() - 1)
        span = (opening.start(), end)
        try:
            call = _call(value, span, tagged=text.startswith(_TAG, opening.start()))
        except BadCallError as error:
            collector.problem(error, span)
            return end
        if call is not None:
            previous = collector.calls[-1].span[1] if collector.calls else -1
            if previous >= 0 and _BETWEEN.match(text[previous : span[0]]):
                collector.skip((previous, span[0]))
            collector.call(call)
        return end


def _call(value: object, span: Span, *, tagged: bool) -> Call | None:
    """Return the call in an object; None if it is an answer."""
    assert isinstance(value, dict)  # it opens with a brace
    name = value.get("name", value.get("function"))
    key = "parameters" if "parameters" in value else "arguments"
    if isinstance(name, dict) and key not in value:  # {"type": "function", "function": {…}}
        return _call(name, span, tagged=tagged)
    if key not in value or not isinstance(name, str):
        if tagged or key in value:
            raise BadCallError("no_name" if key in value else "malformed", "a call needs a name and parameters")
        return None
    return Call(name, arguments_of(value[key], name), span)
