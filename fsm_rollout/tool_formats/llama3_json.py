"""Llama 3.1 and 3.2: a bare JSON object ``{"name": …, "parameters": {…}}``, perhaps after ``<|python_tag|>``.

Source: https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md. An object without
parameters is an answer in JSON, not a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fsm_rollout.tool_formats.base import BadCallError, Call, Collector, Parsed, answer_starts, arguments_of, read_json

_START = re.compile(r'(?:<\|python_tag\|>\s*)?\{\s*"(?:name|type|function|parameters|arguments)"\s*:')
_TAG = "<|python_tag|>"
_STOPS = re.compile(r"(?:\s|<\|eot_id\|>|<\|eom_id\|>)*\Z")
_BETWEEN = re.compile(r"\s*;\s*\Z")


class Llama3Json:
    """Objects anywhere in the text, separated by ``;`` if there are several."""

    name = "llama3_json"

    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        """Parse one assistant turn; see :class:`~fsm_rollout.tool_formats.base.ToolFormat`."""
        collector = Collector(text)
        stop = _STOPS.search(text)
        length = stop.start() if stop else len(text)
        at = answer_starts(text)
        previous = -1
        while found := _START.search(text, at):
            start = found.start()
            brace = text.index("{", start)
            try:
                value, at = read_json(text, brace)
                call = self._call(value, (start, at), tagged=text.startswith(_TAG, start))
            except BadCallError as error:
                if error.at is not None and error.at >= length:
                    error = BadCallError("unclosed", "the JSON of the call is never closed", error.name)
                if error.kind == "unclosed" or error.at is not None:
                    # Nothing tells where broken JSON ends: up to the next line that opens an object.
                    following = _START.search(text, brace + 1)
                    at = length if error.kind == "unclosed" or not following else following.start()
                collector.problem(error, (start, at))
            else:
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
