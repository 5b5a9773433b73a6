"""The JSON Schema of an agent's YAML, for editors.

Invariant: it is made from the pydantic models, adjusted to what users type (see
:mod:`fsm_rollout.agent.loader`): it accepts every agent that loads. It knows no names, so it accepts more;
``fsm-rollout check`` is the judge.
"""

from __future__ import annotations

import re
from typing import Any

from fsm_rollout.agent.graph import STATE_KEYS, AgentGraph
from fsm_rollout.agent.predicates import PREDICATE_NAMES, PREDICATES
from fsm_rollout.agent.words import HANDLERS, INTERACTIONS
from fsm_rollout.names.registry import Registry

Schema = dict[str, Any]

_INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{", "description": "an OmegaConf interpolation"}
_OWN_FUNCTION: Schema = {"type": "string", "pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"}
_TEXT: Schema = {
    "anyOf": [{"type": "string"}, {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}]
}
_AGENT: Schema = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/AgentGraph"}]}
_STATES: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def agent_schema() -> Schema:
    """Return the schema (draft 2020-12) as plain data."""
    definitions: dict[str, Schema] = AgentGraph.model_json_schema(ref_template="#/$defs/{model}")["$defs"]
    for definition in definitions.values():
        allow_interpolations(definition)
        plain_words(definition)
    # 1. The short spellings.
    for model, spellings in {
        "Context": {"system": _TEXT},
        "StateSpec": {"prompt": _TEXT},
        "ToolSpec": {"agent": _AGENT},
        "TransitionSpec": {"source": _STATES, "conditions": _conditions(), "unless": _conditions()},
    }.items():
        properties = definitions[model]["properties"]
        for name, schema in spellings.items():
            annotations = {key: value for key, value in properties[name].items() if key in ("description", "title")}
            properties[name] = {**schema, **annotations}
    del definitions["Predicate"]
    # 2. Entries may be empty, and a custom handler has keys of its own.
    state = definitions["StateSpec"]
    del state["properties"]["options"], state["additionalProperties"]
    others = HANDLERS.built_in.keys() - {"external"}
    own = "|".join([":", *(f"^{word}$" for word in HANDLERS.words() if word not in others)])
    state["if"] = {"properties": {"handler": {"type": "string", "pattern": own}}, "required": ["handler"]}
    state["else"] = {"propertyNames": {"enum": sorted(STATE_KEYS)}}
    allow_one_word(definitions["InteractionSpec"], INTERACTIONS)
    state["type"] = definitions["Context"]["type"] = ["object", "null"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An agent of fsm-rollout",
        "$ref": "#/$defs/AgentGraph",
        "$defs": definitions,
    }


def allow_words(properties: Schema, key: str, registry: Registry) -> Schema:
    """Let a key of ``properties`` be a word of a registry, those of installed packages included; return the words."""
    words: Schema = {"type": "string", "enum": registry.words()}
    schema = properties[key]
    outer = {name: schema.pop(name) for name in ("description", "title", "default") if name in schema}
    properties[key] = {**outer, "anyOf": [words, *schema.get("anyOf", [schema])]}
    return words


def allow_one_word(definition: Schema, registry: Registry) -> None:
    """Let ``use`` be one of a registry's words, which have keys of their own beside it."""
    keys, words = sorted(definition["properties"]), allow_words(definition["properties"], "use", registry)
    del definition["additionalProperties"]
    definition["if"] = {"properties": {"use": words}}
    definition["else"] = {"propertyNames": {"enum": keys}}


def _conditions() -> Schema:
    specs = PREDICATES.values()
    brought = [word for word in PREDICATE_NAMES.words() if word not in PREDICATES]
    forms: list[Schema] = [
        *({"const": word} for word in brought),
        *({"const": spec.name, "description": spec.doc} for spec in specs if not spec.argument),
        _OWN_FUNCTION,
        {
            "type": "object",
            "properties": {s.name: {"description": f"{s.doc}; takes {s.argument}"} for s in specs if s.argument},
            "patternProperties": {key: {} for key in (_OWN_FUNCTION["pattern"], *(f"^{word}$" for word in brought))},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        },
    ]
    return {"anyOf": [*forms, {"type": "array", "items": {"anyOf": forms}}]}


def allow_interpolations(schema: object) -> None:
    """Let whatever cannot be any text below ``schema`` (numbers, booleans, words of a list) be an interpolation too."""
    if not isinstance(schema, dict):
        return
    for properties in (schema.get("properties", {}), schema.get("patternProperties", {})):
        for name, value in properties.items():
            options = value.get("anyOf", [value])
            if any(_is_narrow(option) for option in options):
                outer = {key: value[key] for key in ("description", "default", "title") if key in value}
                inner = [{key: item for key, item in option.items() if key not in outer} for option in options]
                properties[name] = {**outer, "anyOf": [*inner, _INTERPOLATION]}
            allow_interpolations(value)
    allow_interpolations(schema.get("additionalProperties"))
    allow_interpolations(schema.get("items"))


def _is_narrow(schema: Schema) -> bool:
    return schema.get("type") in ("integer", "number", "boolean") or "enum" in schema or "pattern" in schema


def plain_words(definition: Schema) -> None:
    """Write a model's docstring as editors show it: no roles, single backquotes."""
    if "description" in definition:
        words = re.sub(r":\w+:`~?([\w.]+\.)?(\w+)`", r"`\2`", definition["description"])
        definition["description"] = words.replace("``", "`")
