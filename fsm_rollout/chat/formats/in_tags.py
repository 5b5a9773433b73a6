"""Calls between ``<tool_call>`` and ``</tool_call>``: Hermes and Qwen, Qwen3-Coder, GLM.

Invariant: a value is never lost; what cannot be read as its declared type stays text, for the tool's own validation
to judge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from fsm_rollout.chat.formats.base import BadCallError, Call, Collector, TextFormat, call_of, read_json, read_whole_json
from fsm_rollout.chat.render import Tools

_CALL_ENDS = re.compile(r"\s*</tool_call>")
# In a value this means that the value was never closed, and that another call follows.
_RUN_ON = re.compile(r"</tool_call>\s*<tool_call>")


class TagFormat(TextFormat):
    """Calls between ``<tool_call>`` and ``</tool_call>``."""

    opening = re.compile("<tool_call>")
    closings: ClassVar[dict[str, str]] = {"<tool_call>": "</tool_call>"}

    def broken(self, text: str, opening: re.Match[str], error: BadCallError) -> tuple[BadCallError, int]:
        """End a broken call at its closing tag, or where the next call opens."""
        closing = self.closings[opening.group()]
        closed, following = text.find(closing, opening.end()), text.find("<tool_call>", opening.end())
        if closed >= 0 and (following < 0 or closed < following):
            return error, closed + len(closing)
        unclosed = BadCallError("unclosed", f"{opening.group()} is never closed", error.name)
        return unclosed, following if following >= 0 else len(text)


class Hermes(TagFormat):
    """One JSON object per block, ``{"name": …, "arguments": {…}}``: a tag inside a string ends nothing.

    Source: https://github.com/NousResearch/Hermes-Function-Calling and the templates of Qwen2.5 and Qwen3.
    """

    name = "hermes"

    def tag(self, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call of a tool as an element of a structural tag, the grammar of SGLang and xgrammar."""
        begin = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": '
        arguments = {"type": "json_schema", "json_schema": {"type": "object", **parameters}}
        return {"type": "tag", "begin": begin, "content": arguments, "end": "}\n</tool_call>"}

    def read(self, collector: Collector, opening: re.Match[str], tools: Tools | None) -> int:
        """Read the object between the tags."""
        value, end = read_json(collector.text, opening.end())
        closing = _CALL_ENDS.match(collector.text, end)
        if closing is None:
            raise BadCallError("invalid_json", "expected </tool_call> after the object")
        span = (opening.start(), closing.end())
        try:
            collector.call(call_of(value, span))
        except BadCallError as error:
            collector.problem(error, span)
        return closing.end()


class ValueFormat(TagFormat):
    """Keys and values in turn after the tool's name, without quotes: what ``5`` means depends on the declared type."""

    key: ClassVar[re.Pattern[str]]  # a key, and all up to its value
    # A closing tag inside a value ends nothing: the real one is followed by the next key or the end of the call.
    value_ends: ClassVar[re.Pattern[str]]

    def arguments(self, text: str, at: int, name: str, tools: Tools | None) -> tuple[dict[str, object], int]:
        """Read keys and values from ``at`` on; return them and where they end.

        Raises:
            BadCallError: ``malformed``, for a value that is never closed or a key that is given twice.

        """
        declared = _declared(tools or (), name)
        arguments: dict[str, object] = {}
        while begin := self.key.match(text, at):
            key = begin.group(1).strip()
            end = self.value_ends.search(text, begin.end())
            if end is None or _RUN_ON.search(text, begin.end(), end.start()):
                raise BadCallError("malformed", f"the value of {key!r} in the call of {name} is never closed", name)
            if key in arguments:
                raise BadCallError("malformed", f"argument {key!r} of {name} is given twice", name)
            arguments[key] = _value(text[begin.end() : end.start()], _types(declared.get(key)))
            at = end.end()
        return arguments, at


class Qwen3Coder(ValueFormat):
    """One ``<function=name><parameter=key>value</parameter>…</function>`` per block; the outer tag may be missing.

    Also Qwen3.5 and Nemotron-3. Values stand on lines of their own. Source: the chat template of
    https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct.
    """

    name = "qwen3_coder"
    opening = re.compile("<tool_call>|<function=")
    closings: ClassVar = {**TagFormat.closings, "<function=": "</function>"}
    key = re.compile(r"<parameter=([^>\n]*)>\n?")
    value_ends = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")
    head = re.compile(r"\s*<function=([^>\n]*)>\s*")
    function_ends = re.compile(r"\s*</function>")

    def read(self, collector: Collector, opening: re.Match[str], tools: Tools | None) -> int:
        """Read the function element, and the outer tag's end where there is one."""
        text, wrapped = collector.text, opening.group() == "<tool_call>"
        head = self.head.match(text, opening.end() if wrapped else opening.start())
        if head is None:
            raise BadCallError("malformed", "expected <function=name> after <tool_call>")
        name = head.group(1).strip()
        if not name:
            raise BadCallError("no_name", "<function=> has no name")
        arguments, at = self.arguments(text, head.end(), name, tools)
        end = self.function_ends.match(text, at)
        if end is None:
            raise BadCallError("malformed", f"expected <parameter= or </function> in the call of {name}", name)
        if wrapped:
            end = _CALL_ENDS.match(text, end.end())
            if end is None:
                raise BadCallError("malformed", "expected </tool_call> after </function>", name)
        collector.call(Call(name, arguments, (opening.start(), end.end())))
        return end.end()


class Glm(ValueFormat):
    """GLM-4.5 and later: ``<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>…</tool_call>``.

    Source: the chat template of https://huggingface.co/zai-org/GLM-4.5.
    """

    name = "glm"
    key = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
    value_ends = re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>)")
    head = re.compile(r"\s*([^<\s]+)\s*")

    def read(self, collector: Collector, opening: re.Match[str], tools: Tools | None) -> int:
        """Read the name, then the arguments."""
        text = collector.text
        head = self.head.match(text, opening.end())
        if head is None:
            raise BadCallError("no_name", "a call starts with the tool's name")
        name = head.group(1)
        arguments, end = self.arguments(text, head.end(), name, tools)
        if not text.startswith("</tool_call>", end):
            raise BadCallError("malformed", f"expected <arg_key> or </tool_call> in the call of {name}", name)
        end += len("</tool_call>")
        collector.call(Call(name, arguments, (opening.start(), end)))
        return end


def _declared(tools: Tools, name: str) -> Mapping[object, object]:
    """Return the schemas of a tool's parameters; the last tool of that name counts."""
    for tool in reversed(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping) and str(function.get("name")) == name:
            return properties
    return {}


def _types(schema: object) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, (list, tuple)) else set()
    for key in ("anyOf", "oneOf"):
        for branch in schema.get(key) or ():
            types |= _types(branch)
    if not types and isinstance(schema.get("enum"), (list, tuple)):
        types = {"string" for item in schema["enum"] if isinstance(item, str)}
    return frozenset(map(str, types))


def _value(text: str, types: frozenset[str]) -> object:
    """Return the value of an argument; ``types`` is empty when nothing is declared."""
    if types == {"string"}:
        return text
    word = text.strip()
    if "boolean" in types and word in ("True", "False"):  # Jinja writes Python's names
        return word == "True"
    if "null" in types and word == "None":
        return None
    try:
        return read_whole_json(text)
    except BadCallError:
        return text
