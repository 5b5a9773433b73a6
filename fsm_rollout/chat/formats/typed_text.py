"""Argument values written without quotes: what ``5`` means depends on the type the tool declares.

Invariant: a value is never lost; what cannot be read as its declared type stays text, for the tool's own
validation to judge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fsm_rollout.chat.formats.base import BadCallError, read_whole_json

RUN_ON = re.compile(r"</tool_call>\s*<tool_call>")
"""In a value this means that the value was never closed, and that another call follows."""

ParameterTypes = dict[str, dict[str, frozenset[str]]]


def parameter_types(tools: Sequence[Any] | None) -> ParameterTypes:
    """Return the JSON types of every declared parameter: tool name → parameter → types."""
    index: ParameterTypes = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping):
            index[str(function.get("name"))] = {str(key): _types(schema) for key, schema in properties.items()}
    return index


def _types(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(given) if isinstance(given, (list, tuple)) else set()
    for key in ("anyOf", "oneOf"):
        for branch in schema.get(key) or ():
            types |= _types(branch)
    if not types and isinstance(schema.get("enum"), (list, tuple)):
        types = {"string" for item in schema["enum"] if isinstance(item, str)}
    return frozenset(map(str, types))


def read_value(text: str, types: frozenset[str]) -> Any:
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
