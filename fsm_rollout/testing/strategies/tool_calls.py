"""Tool calls as texts, well-formed and broken, and values for JSON schemas.

Invariant: what :func:`json_values` draws for a schema satisfies it, for the keywords that tool schemas use; a broken
call is one that its format reports as a problem, or whose arguments no schema of the tools takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from fsm_rollout.testing.call_texts import call_text

Schema = Mapping[str, Any]

WORDS = ("", "a", "4", "yes", "(37 + 58) * 4", "two words", "é 漢字 🙂", "line\nbreak", '"quoted"', "<b>")
"""Argument texts that formats have trouble with, simplest first."""

plain_texts = st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | plain_texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=3,
)


def json_values(schema: Schema) -> st.SearchStrategy[Any]:
    """Return a strategy for values that a JSON schema takes; an empty schema takes anything."""
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(list(schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return st.one_of(*map(json_values, schema[key]))
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    return st.one_of(*(_of_type(kind, schema) for kind in kinds)) if kinds else anything


def _of_type(kind: str, schema: Schema) -> st.SearchStrategy[Any]:
    match kind:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            low, high = _bounds(schema, 1)
            return st.integers(*(None if b is None else int(b) for b in (_ceil(low), _floor(high))))
        case "number":
            low, high = _bounds(schema, 0.5)
            whole = st.integers(*(None if b is None else int(b) for b in (_ceil(low), _floor(high))))
            if low is not None and high is not None and math.ceil(low) > math.floor(high):
                return st.floats(low, high)
            return (
                whole | st.floats(low, high, allow_nan=False, allow_infinity=False, width=32)
                if low is None and (high is None)
                else whole
            )
        case "string":
            return _texts(schema)
        case "array":
            items = json_values(schema.get("items") or {})
            least = int(schema.get("minItems", 0))
            return st.lists(items, min_size=least, max_size=int(schema.get("maxItems", least + 2)))
        case "object":
            return _objects(schema)
        case _:
            return anything


def _bounds(schema: Schema, step: float) -> tuple[float | None, float | None]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + step
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - step
    return low, high


def _ceil(value: float | None) -> int | None:
    return None if value is None else math.ceil(value)


def _floor(value: float | None) -> int | None:
    return None if value is None else math.floor(value)


def _texts(schema: Schema) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        return st.from_regex(str(schema["pattern"]))
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    if not least and most is None:
        return plain_texts
    return st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=least, max_size=most or least + 8)


def _objects(schema: Schema) -> st.SearchStrategy[dict[str, Any]]:
    properties = {key: json_values(each) for key, each in schema.get("properties", {}).items()}
    required = [key for key in schema.get("required", ()) if key in properties]
    optional = {key: each for key, each in properties.items() if key not in required}
    return st.fixed_dictionaries({key: properties[key] for key in required}, optional=optional)


def _function(tool: Schema) -> tuple[str, Schema]:
    function = tool.get("function", tool)
    return str(function["name"]), function.get("parameters", {})


@st.composite
def tool_calls(
    draw: st.DrawFn, tools: Sequence[Schema], tool_format: str = "hermes", *, only: str | None = None
) -> str:
    """Draw a well-formed call of one of the tools, with arguments that its schema takes.

    Args:
        draw: given by Hypothesis.
        tools: OpenAI schemas, as ``tool_schema`` makes them.
        tool_format: a name of :data:`fsm_rollout.testing.call_texts.WRITERS`.
        only: call just this tool.
    """
    named = [_function(tool) for tool in tools]
    name, parameters = draw(st.sampled_from([pair for pair in named if only in (None, pair[0])]))
    return call_text(tool_format, name, draw(json_values({"type": "object", **parameters})))


@st.composite
def broken_calls(draw: st.DrawFn, tools: Sequence[Schema], tool_format: str = "hermes") -> str:
    """Draw a call that something is wrong with: an unknown tool, arguments that do not fit, or a text cut short."""
    name, parameters = _function(draw(st.sampled_from(list(tools))))
    arguments = draw(json_values({"type": "object", **parameters}))
    match draw(st.sampled_from(["unknown tool", "unknown argument", "missing arguments", "cut short"])):
        case "unknown tool":
            return call_text(tool_format, f"no_{name}", arguments)
        case "unknown argument":
            return call_text(tool_format, name, {**arguments, "no_such_argument": 1})
        case "missing arguments" if parameters.get("required"):
            return call_text(tool_format, name, {})
        case _:
            text = call_text(tool_format, name, arguments)
            marker = len(text) // 2
            return text[: draw(st.integers(marker, len(text) - 1))]
