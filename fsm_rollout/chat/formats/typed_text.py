"""Argument values written without quotes: what ``5`` means depends on the type the tool declares.

Invariant: a value is never lost; what cannot be read as its declared type stays text, for the tool's own
validation to judge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fsm_rollout.chat.formats.base import BadCallError, read_whole_json
from fsm_rollout.chat.render import Tools

_RUN_ON = re.compile(r"</tool_call>\s*<tool_call>")
"""In a value this means that the value was never closed, and that another call follows."""


def read_arguments(
    text: str,
    at: int,
    name: str,
    key_pattern: re.Pattern[str],
    value_ends: re.Pattern[str],
    tools: Tools | None,
) -> tuple[dict[str, object], int]:
    """Read keys and values in turn from ``at`` on; return them and where they end.

    Raises:
        BadCallError: ``malformed``, for a value that is never closed or a key that is given twice.

    """
    declared = _declared(tools, name) if tools else {}
    arguments: dict[str, object] = {}
    while begin := key_pattern.match(text, at):
        key = begin.group(1).strip()
        end = value_ends.search(text, begin.end())
        if end is None or _RUN_ON.search(text, begin.end(), end.start()):
            raise BadCallError("malformed", f"the value of {key!r} in the call of {name} is never closed", name)
        if key in arguments:
            raise BadCallError("malformed", f"argument {key!r} of {name} is given twice", name)
        arguments[key] = read_value(text[begin.end() : end.start()], _types(declared.get(key)))
        at = end.end()
    return arguments, at


def _declared(tools: Tools, name: str) -> Mapping[str, object]:
    """Return the schemas of a tool's parameters; the last tool of that name counts."""
    for tool in reversed(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping) and str(function.get("name")) == name:
            return {str(key): schema for key, schema in properties.items()}
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


def read_value(text: str, types: frozenset[str]) -> object:
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
