"""Llama 3.1 and 3.2: a bare JSON object ``{"name": …, "parameters": {…}}``, perhaps after ``<|python_tag|>``.

Source: https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md. An object without
parameters is an answer in JSON, not a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fsm_rollout.chat.formats.base import BadCallError, Call, Collector, Parsed, answer_starts, arguments_of, read_json

_START = re.compile(r'(?:<\|python_tag\|>\s*)?\{\s*"(?:name|type|function|parameters|arguments)"\s*:')
_TAG = "<|python_tag|>"
_NEXT = re.compile(rf"[;\n]\s*(?={_START.pattern})")
_STOPS = ("<|eot_id|>", "<|eom_id|>")
_BETWEEN = re.compile(r"\s*;\s*\Z")


class Llama3Json:
    """Objects anywhere in the text, separated by ``;`` if there are several."""

    name = "llama3_json"

    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        """Parse one assistant turn; see :class:`~fsm_rollout.chat.formats.base.ToolFormat`."""
        collector = Collector(text)
        length = _length(text)
        at = answer_starts(text)
        previous = -1
        while found := _START.search(text, at):
            start = found.start()
            brace = text.index("{", start)
            try:
                value, at = read_json(text, brace)
            except BadCallError as error:
                # Nothing tells where broken JSON ends: at the next object on a line of its own or after ";".
                following = _NEXT.search(text, brace)
                at = following.end() if following else length
                if error.at is not None and error.at >= length:
                    error = BadCallError("unclosed", "the JSON of the call is never closed", error.name)
                collector.problem(error, (start, at))
                continue
            try:
                call = self._call(value, (start, at), tagged=text.startswith(_TAG, start))
            except BadCallError as error:
                collector.problem(error, (start, at))
                continue
            if call is not None:
                if previous >= 0 and _BETWEEN.match(text[previous:start]):
                    collector.skip((previous, start))
                collector.call(call)
                previous = at
        return collector.done()

    @staticmethod
    def _call(value: Any, span: tuple[int, int], tagged: bool) -> Call | None:
        name = value.get("name", value.get("function"))
        key = "parameters" if "parameters" in value else "arguments"
        if isinstance(name, dict) and key not in value:  # {"type": "function", "function": {…}}
            return Llama3Json._call(name, span, tagged)
        if key not in value or not isinstance(name, str):
            if tagged or key in value:
                raise BadCallError("no_name" if key in value else "malformed", "a call needs a name and parameters")
            return None
        return Call(name, arguments_of(value[key], name), span)


def _length(text: str) -> int:
    """Return the length of ``text`` without the stop token and white space at its end."""
    text = text.rstrip()
    for stop in _STOPS:
        text = text.removesuffix(stop).rstrip()
    return len(text)
