"""Calls in JSON without a tag at their end: Llama 3 and Mistral."""

from __future__ import annotations

import re
from typing import ClassVar

from fsm_rollout.chat.formats.base import (
    BadCallError,
    Call,
    Collector,
    Span,
    TextFormat,
    arguments_of,
    call_of,
    read_json,
)
from fsm_rollout.chat.render import Tools

_BETWEEN = re.compile(r"\s*;\s*\Z")
_NAMED = re.compile(r"\s*([\w.:-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(?:\[ARGS\]\s*)?(?=\{)")


class JsonFormat(TextFormat):
    """Calls in JSON without a tag at their end; ``following`` is where the next one begins."""

    following: ClassVar[re.Pattern[str]]
    stops: ClassVar[tuple[str, ...]]  # stop tokens that may stand behind the last call

    def broken(self, text: str, opening: re.Match[str], error: BadCallError) -> tuple[BadCallError, int]:
        """Nothing tells where broken JSON ends: it is given all up to the next call."""
        following = self.following.search(text, opening.end())
        end = following.end() if following else len(text)
        body = text[:end].rstrip()
        for stop in self.stops:
            body = body.removesuffix(stop).rstrip()
        if error.at is not None and error.at >= len(body):
            error = BadCallError("unclosed", "the JSON of the call is never closed", error.name)
        return error, end if following else len(body)


class Llama3Json(JsonFormat):
    """Llama 3.1 and 3.2: bare objects ``{"name": …, "parameters": {…}}``, separated by ``;`` if there are several.

    They stand anywhere in the text, perhaps after ``<|python_tag|>``. An object without parameters is an answer in
    JSON, not a call. Source: https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md.
    """

    name = "llama3_json"
    opening = re.compile(r'(?:<\|python_tag\|>\s*)?\{(?=\s*"(?:name|type|function|parameters|arguments)"\s*:)')
    following = re.compile(rf"[;\n]\s*(?={opening.pattern})")  # at the start of a line, or after ";"
    stops = ("<|eot_id|>", "<|eom_id|>")

    def read(self, collector: Collector, opening: re.Match[str], tools: Tools | None) -> int:
        """Read the object; what stands between two calls is no text of its own."""
        text, start = collector.text, opening.start()
        value, end = read_json(text, opening.end() - 1)
        try:
            call = self._call(value, (start, end), tagged=text.startswith("<|python_tag|>", start))
        except BadCallError as error:
            collector.problem(error, (start, end))
            return end
        if call is not None:
            previous = collector.calls[-1].span[1] if collector.calls else start
            if _BETWEEN.match(text[previous:start]):
                collector.skipped.append((previous, start))
            collector.call(call)
        return end

    def _call(self, value: object, span: Span, *, tagged: bool) -> Call | None:
        """Return the call in an object; None if it is an answer."""
        assert isinstance(value, dict)  # it opens with a brace
        name = value.get("name", value.get("function"))
        key = "parameters" if "parameters" in value else "arguments"
        if isinstance(name, dict) and key not in value:  # {"type": "function", "function": {…}}
            return self._call(name, span, tagged=tagged)
        if key not in value or not isinstance(name, str):
            if tagged or key in value:
                raise BadCallError("no_name" if key in value else "malformed", "a call needs a name and parameters")
            return None
        return Call(name, arguments_of(value[key], name), span)


class Mistral(JsonFormat):
    """``[TOOL_CALLS]`` and a JSON list of calls, or since v11 ``[TOOL_CALLS]name[ARGS]{…}`` for each.

    Source: https://docs.mistral.ai/ and the templates of Mistral-Nemo, Mistral-Small and Devstral.
    """

    name = "mistral"
    opening = re.compile(r"\[TOOL_CALLS\]")
    following = re.compile(r"(?=\[TOOL_CALLS\])")
    stops = ("</s>",)

    def read(self, collector: Collector, opening: re.Match[str], tools: Tools | None) -> int:
        """Read the named call, or the list."""
        text, start = collector.text, opening.start()
        if named := _NAMED.match(text, opening.end()):
            value, end = read_json(text, named.end())
            name, id_ = named.groups()
            collector.call(Call(name, arguments_of(value, name), (start, end), id_))
            return end
        value, end = read_json(text, opening.end())
        # The items of one list share its place; later ones stand at its end, so that order is kept.
        span = (start, end)
        for item in value if isinstance(value, list) else [value]:
            id_ = item.get("id") if isinstance(item, dict) else None
            try:
                collector.call(call_of(item, span, id_ if isinstance(id_, str) else None))
            except BadCallError as error:
                collector.problem(error, span)
            span = (end, end)
        return end
