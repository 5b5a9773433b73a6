"""Hypothesis strategies from the JSON schemas that tools show to models.

Invariant: what :func:`arguments` draws follows the schema; what :func:`spoiled` draws breaks it in one way that it
names. Only the keywords that this package's own schemas use are understood; a ``pattern`` and
formats are drawn as Hypothesis can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from fsm_rollout.trajectory.settings import MOST

Schema = Mapping[str, Any]

# Texts that tool formats have trouble with, simplest first.
WORDS = ("", "a", "4", "yes", "(37 + 58) * 4", "two words", "é 漢字 🙂", "line\nbreak", '"quoted"', "<b>")
_CHARACTERS = st.characters(codec="utf-8", exclude_categories=["Cc"])
plain_texts = st.sampled_from(WORDS) | st.text(_CHARACTERS, max_size=12)


def plain_data(
    texts: st.SearchStrategy[str], numbers: st.SearchStrategy[float], max_leaves: int
) -> st.SearchStrategy[Any]:
    """Return a strategy for plain data: what JSON and YAML can hold."""
    return st.recursive(
        st.none() | st.booleans() | numbers | texts,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
        max_leaves=max_leaves,
    )


_ANYTHING = plain_data(plain_texts, st.integers(-99, 99), max_leaves=3)
# A value that is not of the type, however leniently it is read.
_WRONG: Mapping[str, object] = {
    "string": [5],
    "integer": "no number",
    "number": "no number",
    "boolean": "neither",
    "array": {"not": "a list"},
    "object": "no object",
    "null": "something",
}
_FORMATS: Mapping[str, st.SearchStrategy[str]] = {
    "date": st.dates().map(str),
    "date-time": st.datetimes().map(lambda moment: moment.isoformat()),
    "time": st.times().map(str),
    "uuid": st.uuids().map(str),
}


def arguments(parameters: Schema) -> st.SearchStrategy[dict[str, object]]:
    """Draw the arguments of a call from the ``parameters`` of a tool's schema."""
    return _object(parameters, parameters.get("$defs", {}))


def spoiled(parameters: Schema) -> st.SearchStrategy[tuple[str, dict[str, object]]]:
    """Draw arguments that break the schema, each with what is wrong: a name too many, one missing, a wrong type."""
    good = arguments(parameters)

    def without(name: str) -> st.SearchStrategy[tuple[str, dict[str, object]]]:
        return good.map(lambda args: (f"'{name}' is missing", {k: v for k, v in args.items() if k != name}))

    def with_value(name: str, value: object, what: str) -> st.SearchStrategy[tuple[str, dict[str, object]]]:
        return good.map(lambda args: (f"'{name}' {what}", args | {name: value}))

    ways = [with_value("no_such_parameter", 1, "is no parameter"), *map(without, parameters.get("required", ()))]
    for name, schema in parameters.get("properties", {}).items():
        wrong = _WRONG.get(schema.get("type", ""))
        if wrong is not None:
            ways.append(with_value(name, wrong, "is of another type"))
    return st.one_of(ways)


def _value(schema: Schema | bool, defs: Schema) -> st.SearchStrategy[object]:
    if isinstance(schema, bool) or not schema:
        return _ANYTHING
    if "$ref" in schema:
        target = defs[schema["$ref"].rpartition("/")[2]]
        return st.deferred(lambda: _value(target, defs))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(list(schema["enum"]))
    if branches := schema.get("anyOf", schema.get("oneOf")):
        # The first branch that is no reference ends a type that holds itself.
        return st.one_of([_value(branch, defs) for branch in sorted(branches, key=lambda branch: "$ref" in branch)])
    match schema.get("type"):
        case [*kinds]:
            return st.one_of([_value({**schema, "type": kind}, defs) for kind in kinds])
        case "string":
            return _text(schema)
        case "integer" | "number":
            return _number(schema)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array" if "prefixItems" in schema:
            return st.tuples(*(_value(item, defs) for item in schema["prefixItems"])).map(list)
        case "array":
            least = schema.get("minItems", 0)
            return st.lists(
                _value(schema.get("items", True), defs),
                min_size=least,
                max_size=schema.get("maxItems", least + 3),
                unique_by=repr if schema.get("uniqueItems") else None,
            )
        case "object":
            return _object(schema, defs)
        case _:
            return _ANYTHING


def _object(schema: Schema, defs: Schema) -> st.SearchStrategy[dict[str, object]]:
    properties: Schema = schema.get("properties", {})
    if not properties and schema.get("additionalProperties", False) is not False:
        return st.dictionaries(plain_texts, _value(schema["additionalProperties"], defs), max_size=2)
    drawn = {name: _value(value, defs) for name, value in properties.items()}
    required = {name: drawn.pop(name) for name in schema.get("required", ()) if name in drawn}
    return st.fixed_dictionaries(required, optional=drawn)


def _text(schema: Schema) -> st.SearchStrategy[str]:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if "pattern" in schema:
        # A `$` is the end in JSON schemas; in Python it may stand before a last line break as well.
        ends = "$" in schema["pattern"]
        texts: st.SearchStrategy[str] = st.from_regex(str(schema["pattern"]))
        longest = math.inf if most is None else most
        return texts.filter(lambda text: least <= len(text) <= longest and not (ends and text.endswith("\n")))
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]]
    if not least and most is None:
        return plain_texts
    return st.text(_CHARACTERS, min_size=least, max_size=max(12, least) if most is None else most)


def _number(schema: Schema) -> st.SearchStrategy[float]:
    """Draw numbers; integers stay within what a journal can hold (a turn reads no others)."""
    whole = schema["type"] == "integer"
    excluded = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    low = schema.get("exclusiveMinimum", schema.get("minimum"))
    high = schema.get("exclusiveMaximum", schema.get("maximum"))
    if whole or "multipleOf" in schema or low is high is None:
        most = MOST if whole else 1e6
        low, high = -most if low is None else low, most if high is None else high
    if "multipleOf" in schema:
        step = schema["multipleOf"]
        counts = st.integers(math.ceil(low / step), math.floor(high / step))
        return counts.map(lambda count: count * step).filter(lambda n: low <= n <= high and n not in excluded)
    if whole:
        return st.integers(math.ceil(low), math.floor(high)).filter(lambda n: n not in excluded)
    return st.floats(low, high, allow_nan=False, allow_infinity=False).filter(lambda n: n not in excluded)
