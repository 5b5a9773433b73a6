"""From an :class:`~fsm_rollout.agent.graph.AgentGraph` back to YAML.

Invariant: ``loads(dump(graph)) == graph`` for every graph that passes verification. Only what differs from the defaults
is written, in the short spellings a person would use; texts and sub-agents stand in the YAML itself.
"""

from __future__ import annotations

import yaml

from fsm_rollout.agent.graph import AgentGraph, Predicate, State, TransitionRow
from fsm_rollout.agent.yaml.normal_form import TEXT_FILE
from fsm_rollout.agent.yaml.overrides import escape_interpolation
from fsm_rollout.agent.yaml.source import STRICTER
from fsm_rollout.trajectory.model_errors import ConfigData


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style: str | None = "|" if "\n" in value else None
    if any(char in value for char in "\x85\u2028\u2029"):  # line breaks that PyYAML reads back as \n
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
for _kind, _pattern, _first in STRICTER:
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, _first)


def dump(graph: AgentGraph) -> str:
    """Return the graph as YAML that :func:`fsm_rollout.agent.loader.loads` turns into an equal graph."""
    return yaml.dump(
        _escaped(_agent(graph)),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=120,
    )


def _agent(graph: AgentGraph) -> ConfigData:
    data = graph.model_dump(exclude_defaults=True)
    for name, context in data.get("contexts", {}).items():
        if "system" in context:
            context["system"] = _literal(graph.contexts[name].system)
    for name, tool in graph.tools.items():
        if tool.agent is not None:
            data["tools"][name]["agent"] = _agent(tool.agent)
    data["states"] = {name: _state(state, data["states"][name]) for name, state in graph.states.items()}
    data["transitions"] = [_row(row) for row in graph.transitions]
    return data


def _state(state: State, data: ConfigData) -> ConfigData:
    options = data.pop("options", {})
    if "prompt" in data:
        data["prompt"] = _literal(state.prompt)
    return {**data, **options}


def _row(row: TransitionRow) -> ConfigData:
    data: ConfigData = {
        "trigger": row.trigger,
        "source": row.source[0] if len(row.source) == 1 else list(row.source),
        "dest": row.dest,
    }
    for key, predicates in (("conditions", row.conditions), ("unless", row.unless)):
        if predicates:
            data[key] = _predicate(predicates[0]) if len(predicates) == 1 else [_predicate(p) for p in predicates]
    if row.stop_reason is not None:
        data["stop_reason"] = row.stop_reason
    return data


def _predicate(predicate: Predicate) -> object:
    return predicate.name if predicate.argument is None else {predicate.name: predicate.argument}


def _literal(text: str | None) -> object:
    return {"text": text} if text is not None and TEXT_FILE.fullmatch(text) else text


def _escaped(value: object) -> object:
    """Return ``value`` as plain data whose every ``${`` will be read as text."""
    if isinstance(value, str):
        return escape_interpolation(value)
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return value
