"""What the tables of the reference are made with: Markdown, schemas in words, and docstrings.

Invariant: nothing here knows of a page.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    text = re.sub(r"``(.+?)``", r"`\1`", re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text))
    return " ".join(text.split()).replace("|", r"\|")


def words_of(words: Iterable[object]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def models(titles: Mapping[str, str], definitions: Mapping[str, Any]) -> str:
    known = {name: titles[name] for name in titles if "properties" in definitions.get(name, {})}
    text = "\n\n".join(_model(title, definitions[name]) for name, title in known.items())
    for name, title in known.items():
        anchor = re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-")
        text = re.sub(rf"(?:, each entry as|: as|as) `{name}`", f" [{title}](#{anchor})", text)
    return text.replace("as `Engine`", "as an [engine kind](engines.md) takes it")


def _model(title: str, schema: Mapping[str, Any]) -> str:
    return f"## {title}\n\n{keys_table(schema['properties'], schema)}"


def keys_table(
    properties: Mapping[str, Any], schema: Mapping[str, Any], meanings: Mapping[str, str] | None = None
) -> str:
    rows = []
    for name, field in properties.items():
        meaning = field.get("description") or (meanings or {}).get(name, "")
        default = field.get("default", "")
        if name in schema.get("required", ()):
            default = "**required**"
        elif default is None:
            default = "–"
        elif isinstance(default, Mapping) and len(_set(default)) != 1:  # shown where its own keys are
            default = ""
        elif default != "":
            default = f"`{_yaml(default)}`"
        rows.append([f"`{name}`", shape(field, schema), str(default), _sentence(meaning)])
    return table(["key", "value", "default", "meaning"], rows)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] if text and not text.startswith("`") else text


def _yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(_set(value) if isinstance(value, Mapping) else value)


def _set(values: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in values.items() if value is not None}


def shape(field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return what a schema takes, in words."""
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field or "oneOf" in field:
        forms = [shape(option, schema) for option in field.get("anyOf", field.get("oneOf", ()))]
        return " or ".join(dict.fromkeys(form for form in forms if form != "nothing" and form))
    if "$ref" in field:
        return f"as `{field['$ref'].rpartition('/')[2]}`"
    if "allOf" in field:
        return shape(field["allOf"][0], schema)
    if "${" in field.get("pattern", "").replace("\\", ""):
        return ""  # any value may be an interpolation
    kind = field.get("type")
    match kind:
        case "null":
            return "nothing"
        case "string":
            return "`module:name`" if ":[A-Za-z_]" in field.get("pattern", "") else "text"
        case "integer" | "number":
            bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
            bounds_text = [
                f"{sign} {field[name]:g}" for name, sign in bounds.items() if name in field and field[name] < 2**53
            ]
            return f"{'count' if kind == 'integer' else 'number'} {', '.join(bounds_text)}".strip()
        case "boolean":
            return "`true` or `false`"
        case "array":
            items = field.get("items") or {}
            return f"list of: {shape(items, schema)}" if items else "list"
        case "object":
            inner = next(iter(field.get("patternProperties", {}).values()), field.get("additionalProperties"))
            shown = shape(inner, schema) if isinstance(inner, Mapping) else ""
            return f"mapping, each entry {shown}" if shown else "mapping"
    return "any"


def docstring(obj: object) -> str:
    """Return a docstring with its indentation taken off."""
    return inspect.getdoc(obj) or ""


def first_paragraph(obj: object) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join(docstring(obj).partition("\n\n")[0].split())


def paragraph(obj: object) -> str:
    """Return the docstring's first two paragraphs as one line."""
    return " ".join(" ".join(docstring(obj).split("\n\n")[:2]).split())


def engine_arguments(path: str) -> dict[str, str]:
    """Return what the docstring of an engine's class says of its arguments."""
    target = resolve_name(path)
    meanings: dict[str, str] = {}
    inside = False
    name = ""
    for line in docstring(target).split("\n"):
        if line == "Args:":
            inside = True
        elif inside and (found := re.match(r"^    (\w+): (.*)$", line)):
            name = found[1]
            meanings[name] = found[2]
        elif inside and line.startswith("        ") and name:
            meanings[name] += f" {line.strip()}"
        elif inside and line.strip():
            break
    return meanings
