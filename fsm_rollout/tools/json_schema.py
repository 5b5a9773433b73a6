"""From pydantic's JSON schemas to those that models are shown.

Invariant: the meaning stays. References are inlined (a type that holds itself keeps its ``$ref`` and ``$defs``), the
``title`` that pydantic makes of every name goes, and keys stand in one order: what a value is, then what it is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_FIRST = ("$ref", "type", "enum", "items", "properties", "required")
_LAST = ("description", "default", "$defs")
_RANK = {key: rank for rank, key in enumerate((*_FIRST, None, *_LAST))}

# Where schemas stand in schemas. Everything under other keys (default, enum, const, examples) is data.
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_DROPPED = (
    "title",
    "$defs",
    "discriminator",  # OpenAPI's, with references that inlining leaves dangling; oneOf says it too
)


def tidy(schema: Schema) -> Schema:
    """Return pydantic's ``schema`` as a model should see it; see the module. The input is not changed."""
    definitions: dict[str, Schema] = schema.get("$defs", {})
    uses = {name: set(_references(definition)) for name, definition in definitions.items()}
    recursive = {name for name in uses if name in _reachable(uses, uses[name])}
    kept: dict[str, Schema] = {}

    def clean(node: Any) -> Any:
        if not isinstance(node, dict):  # true and false are schemas too
            return node
        name = _reference(node)
        if name is not None and name not in recursive:
            siblings = {key: value for key, value in node.items() if key != "$ref"}
            return clean(definitions[name] | siblings)
        if name is not None and name not in kept:
            kept[name] = {}  # before going in: it comes by itself again
            kept[name] = clean(definitions[name])
        cleaned: Schema = {}
        for key in sorted(node, key=lambda key: _RANK.get(key, _RANK[None])):
            value = node[key]
            if key in _DROPPED or (key == "additionalProperties" and value is True):  # true is what it is anyway
                continue
            if key in _MAPS:
                value = {name: clean(item) for name, item in value.items()}
            elif key in _LISTS:
                value = [clean(item) for item in value]
            elif key in _SINGLE:
                value = clean(value)
            cleaned[key] = value
        return cleaned

    result: Schema = clean(schema)
    return result | {"$defs": kept} if kept else result


def _reference(node: Schema) -> str | None:
    reference = node.get("$ref")
    return reference.removeprefix("#/$defs/") if isinstance(reference, str) else None


def _references(node: Any) -> Iterator[str]:
    """Yield the names of the definitions that a schema refers to, at any depth."""
    if not isinstance(node, dict):
        return
    name = _reference(node)
    if name is not None:
        yield name
    for key in _MAPS:
        for item in node.get(key, {}).values():
            yield from _references(item)
    for key in _LISTS:
        for item in node.get(key, ()):
            yield from _references(item)
    for key in _SINGLE:
        yield from _references(node.get(key))


def _reachable(uses: dict[str, set[str]], start: set[str]) -> set[str]:
    found: set[str] = set()
    todo = list(start)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += uses[name]
    return found
