"""The JSON Schema of an agent's YAML, for editors.

Invariant: it is made from the pydantic models, adjusted to what users type (see
:mod:`fsm_rollout.agent.yaml.normal_form`): it accepts every agent that loads. It knows no names, so it accepts more;
``fsm-rollout check`` is the judge.
"""

from __future__ import annotations

from typing import Any

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.predicates import PREDICATES
from fsm_rollout.agent.yaml.normal_form import STATE_KEYS

Schema = dict[str, Any]

_INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{", "description": "an OmegaConf interpolation"}
_OWN_FUNCTION: Schema = {"type": "string", "pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"}


def agent_schema() -> Schema:
    """Return the schema (draft 2020-12) as plain data."""
    schema = AgentGraph.model_json_schema(ref_template="#/$defs/{model}")
    definitions: dict[str, Schema] = schema["$defs"]
    for definition in definitions.values():
        _interpolated(definition)
    text: Schema = {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        ]
    }
    _adjust(definitions["Context"], system=text)
    _adjust(definitions["State"], prompt=text)
    _adjust(definitions["Tool"], agent={"anyOf": [{"type": "string"}, {"$ref": "#/$defs/AgentGraph"}]})
    names: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    _adjust(definitions["TransitionRow"], source=names, conditions=_conditions(), unless=_conditions())
    del definitions["Predicate"]
    state = definitions["State"]
    del state["properties"]["options"], state["additionalProperties"]
    state["type"] = ["object", "null"]
    state["if"] = {"properties": {"handler": {"type": "string", "pattern": ":"}}, "required": ["handler"]}
    state["else"] = {"propertyNames": {"enum": sorted(STATE_KEYS)}}  # a custom handler has keys of its own
    definitions["Context"]["type"] = ["object", "null"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An agent of fsm-rollout",
        "$ref": "#/$defs/AgentGraph",
        "$defs": definitions,
    }


def _adjust(definition: Schema, **properties: Schema) -> None:
    for name, schema in properties.items():
        kept = {k: v for k, v in definition["properties"][name].items() if k in ("description", "title")}
        definition["properties"][name] = {**schema, **kept}


def _conditions() -> Schema:
    arguments: dict[str, Schema] = {
        spec.name: {"description": f"{spec.doc}; takes {spec.argument}"}
        for spec in PREDICATES.values()
        if spec.argument
    }
    plain = [spec for spec in PREDICATES.values() if not spec.argument]
    forms: list[Schema] = [
        *({"const": spec.name, "description": spec.doc} for spec in plain),
        _OWN_FUNCTION,
        {
            "type": "object",
            "properties": arguments,
            "patternProperties": {_OWN_FUNCTION["pattern"]: {}},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        },
    ]
    return {"anyOf": [*forms, {"type": "array", "items": {"anyOf": forms}}]}


def _interpolated(schema: Any) -> None:
    """Let every number and boolean be an interpolation too."""
    if not isinstance(schema, dict):
        return
    for key in ("properties", "patternProperties"):
        for name, value in schema.get(key, {}).items():
            schema[key][name] = _or_interpolation(value)
            _interpolated(value)
    for key in ("additionalProperties", "items"):
        _interpolated(schema.get(key))


def _or_interpolation(schema: Schema) -> Schema:
    options = schema.get("anyOf", [schema])
    if not any(
        option.get("type") in ("integer", "number", "boolean") for option in options if isinstance(option, dict)
    ):
        return schema
    outer: Schema = {key: schema[key] for key in ("description", "default", "title") if key in schema}
    inner = [{k: v for k, v in option.items() if k not in outer} for option in options]
    return {**outer, "anyOf": [*inner, _INTERPOLATION]}
