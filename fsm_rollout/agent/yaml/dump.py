"""From an :class:`~fsm_rollout.agent.graph.AgentGraph` back to YAML.

Invariant: ``loads(dump(graph)) == graph`` for every graph that passes verification. Only what differs from the defaults
is written, in the short spellings a person would use; texts and sub-agents stand in the YAML itself.
"""

from __future__ import annotations

import yaml

from fsm_rollout.agent.graph import AgentGraph, Predicate
from fsm_rollout.agent.yaml.overrides import escape_interpolation, in_texts
from fsm_rollout.agent.yaml.source import STRICTER, TEXT_FILE
from fsm_rollout.trajectory.config_errors import ConfigData


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
    data = in_texts(escape_interpolation, _agent(graph))
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


def _agent(graph: AgentGraph) -> ConfigData:
    data = graph.model_dump(exclude_defaults=True)
    for name, context in graph.contexts.items():
        for key in ("system", "chat_template"):
            if (text := getattr(context, key)) is not None:
                data["contexts"][name][key] = _literal(text)
    for name, tool in graph.tools.items():
        if tool.agent is not None:
            data["tools"][name]["agent"] = _agent(tool.agent)
    for name, state in graph.states.items():
        entry = data["states"][name]
        if state.prompt is not None:
            entry["prompt"] = _literal(state.prompt)
        entry.update(entry.pop("options", {}))
    for row, spec in zip(data["transitions"], graph.transitions, strict=True):
        conditions, unless = ([_predicate(p) for p in predicates] for predicates in (spec.conditions, spec.unless))
        lists = {"source": spec.source, "conditions": conditions, "unless": unless}
        row |= {key: items[0] if len(items) == 1 else items for key, items in lists.items() if items}
    return data


def _predicate(predicate: Predicate) -> object:
    return predicate.name if predicate.argument is None else {predicate.name: predicate.argument}


def _literal(text: str) -> object:
    return {"text": text} if TEXT_FILE.fullmatch(text) else text
