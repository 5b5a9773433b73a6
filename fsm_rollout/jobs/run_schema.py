"""The JSON Schema of a run's YAML, for editors.

Invariant: it is made from the pydantic models of the run and of the engine kinds, adjusted to what users type: it
accepts every run that loads and whose engines have the keys of their kinds.
"""

from __future__ import annotations

from fsm_rollout.agent.json_schema import Schema, allow_interpolations, allow_one_word, allow_words, plain_words
from fsm_rollout.engines.specs import ENGINES, KINDS
from fsm_rollout.environment.rewards import GROUP_FILTERS, REWARDS
from fsm_rollout.jobs.run_config import RunConfig
from fsm_rollout.jobs.run_prompts import PROMPT_SOURCES
from fsm_rollout.names.attribute_docs import attribute_docs
from fsm_rollout.trajectory.enums import FailureClass

_REF = "#/$defs/{model}"
_TURNS: Schema = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Turn"}]}}
_NULL: Schema = {"type": "null"}


def run_schema() -> Schema:
    """Return the schema (draft 2020-12) as plain data."""
    # 1. The run, and each kind of engine.
    run: Schema = RunConfig.model_json_schema(ref_template=_REF)
    definitions: dict[str, Schema] = run.pop("$defs")
    for spec_model in KINDS.values():
        kind: Schema = spec_model.model_json_schema(ref_template=_REF)
        definitions |= kind.pop("$defs", {})
        definitions[spec_model.__name__] = kind
    turns = definitions["ScriptedSpec"]["properties"]["turns"]
    turns["anyOf"] = [_TURNS, {"type": "object", "additionalProperties": _TURNS}, _NULL]
    definitions["RunConfig"] = run
    allow_words(definitions["WeightedReward"]["properties"], "use", REWARDS)
    allow_words(run["properties"], "group_filter", GROUP_FILTERS)
    reward = definitions["WeightedReward"]["properties"]["use"]
    forms = [*reward["anyOf"], {"$ref": _REF.format(model="WeightedReward")}]
    texts = {key: run["properties"]["reward"][key] for key in ("description", "title")}
    run["properties"]["reward"] = {**texts, "anyOf": [*forms, {"type": "array", "items": {"anyOf": forms}}, _NULL]}
    classes = definitions["Failures"]["properties"]
    for failure in FailureClass:  # one word may stand for the settings of a class
        settings = {"$ref": classes[failure].pop("$ref")}
        do = definitions[settings["$ref"].rpartition("/")[2]]["properties"]["do"]
        classes[failure]["anyOf"] = [{"enum": do["enum"], "type": "string"}, settings]
    track = {"anyOf": [{"type": "string"}, {"$ref": _REF.format(model="Track")}, _NULL]}
    run["properties"]["track"] = {"description": run["properties"]["track"]["description"], **track}
    allow_one_word(definitions["PromptSource"], PROMPT_SOURCES)
    definitions["PromptFile"]["additionalProperties"] = {"type": "string"}  # columns, by fields of prompts
    for definition in definitions.values():
        allow_interpolations(definition)
        plain_words(definition)
    # 2. An engine has the keys of its kind; one that is null is one that is not there.
    for name in (*(spec_model.__name__ for spec_model in KINDS.values()), "PoolSpec", "RaySpec"):
        properties = definitions[name]["properties"]
        for key in properties.keys() - {"kind"}:
            outer = {word: properties[key].pop(word) for word in ("description", "title") if word in properties[key]}
            properties[key] = {**outer, "anyOf": [*properties[key].pop("anyOf", [properties[key]]), _NULL]}
    definitions["Engine"] = _engine()
    engine = {"$ref": _REF.format(model="Engine")}
    properties = run["properties"]
    properties["engine"] = {**engine, "description": properties["engine"]["description"]}
    properties["engines"]["patternProperties"] = dict.fromkeys(properties["engines"]["patternProperties"], engine)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run of fsm-rollout",
        "$ref": _REF.format(model="RunConfig"),
        "$defs": definitions,
    }


def _engine() -> Schema:
    words = {kind: attribute_docs(spec_model)["kind"] for kind, spec_model in KINDS.items()}
    kinds: list[Schema] = [{"const": kind, "description": description} for kind, description in words.items()]
    own = "|".join([":", *(f"^{kind}$" for kind in ENGINES.words() if kind not in KINDS)])
    own_kind = {"type": "string", "pattern": own, "description": "`module:Class`: an engine of your own"}
    interpolated = {"type": "string", "pattern": r"\$\{"}
    return {
        "type": "object",
        "description": "An engine: its kind, and the keys of that kind.",
        "properties": {"kind": {"anyOf": [*kinds, own_kind, interpolated], "description": "which engine"}},
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
                "then": {"$ref": _REF.format(model=spec_model.__name__)},
            }
            for kind, spec_model in KINDS.items()
        ],
    }
