"""Hypothesis strategies from the JSON schemas that tools show to models.

Invariant: what :func:`json_values` and :func:`arguments` draw follows the schema; what :func:`spoiled` draws breaks it
in one way that it names. Only the keywords that this package's own schemas use are understood; a ``pattern`` and
formats are drawn as Hypothesis can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from fsm_rollout.trajectory.settings import MOST

Schema = Mapping[str, Any]

WORDS = ("", "a", "4", "yes", "(37 + 58) * 4", "two words", "é 漢字 🙂", "line\nbreak", '"quoted"', "<b>")
"""Texts that tool formats have trouble with, simplest first."""

plain_texts = st.sampled_from(WORDS) | st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=12)
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | plain_texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(plain_texts, inner, max_size=2),
    max_leaves=3,
)
_WRONG: Mapping[str, Any] = {
    "string": [5],
    "integer": "no number",
    "number": "no number",
    "boolean": "neither",
    "array": {"not": "a list"},
    "object": "no object",
    "null": "something",
}
"""A value that is not of the type, however leniently it is read."""


def json_values(schema: Schema) -> st.SearchStrategy[Any]:
    """Return a strategy for values that a JSON schema takes; an empty schema takes anything."""
    return _value(schema, schema.get("$defs", {}))


def arguments(parameters: Schema) -> st.SearchStrategy[dict[str, Any]]:
    """Draw the arguments of a call from the ``parameters`` of a tool's schema."""
    return _object(parameters, parameters.get("$defs", {}))


def spoiled(parameters: Schema) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """Draw arguments that break the schema, each with what is wrong: a name too many, one missing, a wrong type."""
    properties: Schema = parameters.get("properties", {})
    good = arguments(parameters)

    def without(name: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
        return good.map(lambda args: (f"'{name}' is missing", {k: v for k, v in args.items() if k != name}))

    def with_value(name: str, value: Any, what: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
        return good.map(lambda args: (f"'{name}' {what}", args | {name: value}))

    ways = [with_value("no_such_parameter", 1, "is no parameter"), *map(without, parameters.get("required", ()))]
    for name, schema in properties.items():
        wrong = _WRONG.get(schema.get("type", ""))
        if wrong is not None:
            ways.append(with_value(name, wrong, "is of another type"))
    return st.one_of(ways)


def _value(schema: Schema | bool, defs: Schema, depth: int = 0) -> st.SearchStrategy[Any]:
    if isinstance(schema, bool) or not schema:
        return _ANYTHING
    if "$ref" in schema:
        target = defs[schema["$ref"].rpartition("/")[2]]
        return st.deferred(lambda: _value(target, defs, depth + 1))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(list(schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            # The first branch that is no reference ends a type that holds itself.
            branches = sorted(schema[key], key=lambda branch: "$ref" in branch)
            return st.one_of([_value(branch, defs, depth + 1) for branch in branches])
    kind = schema.get("type")
    if isinstance(kind, list):
        return st.one_of([_value({**schema, "type": one}, defs, depth) for one in kind])
    match kind:
        case "string":
            if "pattern" in schema:
                return _matching(schema)
            if not {"minLength", "maxLength"} & schema.keys():
                return _FORMATS.get(schema.get("format", ""), plain_texts)
            texts = st.text(
                st.characters(codec="utf-8", exclude_categories=["Cc"]),
                min_size=schema.get("minLength", 0),
                max_size=schema.get("maxLength", max(12, schema.get("minLength", 0))),
            )
            return _FORMATS.get(schema.get("format", ""), texts)
        case "integer" | "number" if "multipleOf" in schema:
            return _multiples(schema, schema["multipleOf"])
        case "integer":
            low, high = _bounds(schema, 1)
            return st.integers(-MOST if low is None else low, MOST if high is None else high)
        case "number":
            low, high = _bounds(schema, 0)
            return st.floats(
                -1e6 if low is None and high is None else low,
                1e6 if low is None and high is None else high,
                allow_nan=False,
                allow_infinity=False,
                exclude_min="exclusiveMinimum" in schema,
                exclude_max="exclusiveMaximum" in schema,
            )
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            least = schema.get("minItems", 0)
            if "prefixItems" in schema:
                return st.tuples(*(_value(item, defs, depth + 1) for item in schema["prefixItems"])).map(list)
            items = _value(schema.get("items", True), defs, depth + 1)
            most = schema.get("maxItems", least + 3)
            return st.lists(items, min_size=least, max_size=most, unique_by=repr if schema.get("uniqueItems") else None)
        case "object":
            return _object(schema, defs, depth)
        case _:
            return _ANYTHING


def _object(schema: Schema, defs: Schema, depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    properties: Schema = schema.get("properties", {})
    if not properties and schema.get("additionalProperties", False) is not False:
        return st.dictionaries(plain_texts, _value(schema["additionalProperties"], defs, depth + 1), max_size=2)
    required = set(schema.get("required", ()))
    drawn = {name: _value(one, defs, depth + 1) for name, one in properties.items()}
    return st.fixed_dictionaries(
        {name: one for name, one in drawn.items() if name in required},
        optional={name: one for name, one in drawn.items() if name not in required},
    )


def _matching(schema: Schema) -> st.SearchStrategy[str]:
    """Draw texts of a pattern; a ``$`` is the end there, in Python it may stand before a last line break as well."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    ends = "$" in schema["pattern"]
    texts: st.SearchStrategy[str] = st.from_regex(str(schema["pattern"]))
    return texts.filter(lambda text: least <= len(text) <= most and not (ends and text.endswith("\n")))


def _multiples(schema: Schema, step: Any) -> st.SearchStrategy[Any]:
    """Draw multiples of a number, within the bounds."""
    low, high = _bounds(schema, 0)
    most = MOST if schema["type"] == "integer" else 1e6
    low, high = -most if low is None else low, most if high is None else high
    excluded = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    drawn = st.integers(math.ceil(low / step), math.floor(high / step)).map(lambda count: count * step)
    return drawn.filter(lambda value: low <= value <= high and value not in excluded)


def _bounds(schema: Schema, step: int) -> tuple[Any, Any]:
    """Return the smallest and the largest; integers stay within what a journal can hold (a turn reads no others)."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + step
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - step
    return low, high


_FORMATS: Mapping[str, st.SearchStrategy[str]] = {
    "date": st.dates().map(lambda date: date.isoformat()),
    "date-time": st.datetimes().map(lambda moment: moment.isoformat()),
    "time": st.times().map(lambda time: time.isoformat()),
    "uuid": st.uuids().map(str),
}
