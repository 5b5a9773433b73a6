"""One breach of a rule, and the pieces that rules share.

Invariant: a rule is a function of a :class:`~fsm_rollout.agent.rules.structure.Structure` that yields its breaches; it
raises nothing, and tolerates names that are not defined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fsm_rollout.agent.graph import AgentGraph, Predicate, TransitionRow
from fsm_rollout.trajectory.model_errors import ConfigPath


@dataclass(frozen=True, slots=True)
class Finding:
    """One breach of a rule, at a config path. ``text_line`` counts lines of a text from 1."""

    rule: int
    path: ConfigPath
    message: str
    text_line: int | None = None


def predicates_of(row: TransitionRow) -> Iterator[tuple[str, Predicate]]:
    """Yield the predicates of a row, each with the key it stands under."""
    for key, predicates in (("conditions", row.conditions), ("unless", row.unless)):
        for predicate in predicates:
            yield key, predicate


def in_tools(graph: AgentGraph, rules: Callable[[AgentGraph], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield what ``rules`` find in the agents used as tools."""
    for name, tool in graph.tools.items():
        if tool.agent is not None:
            for found in rules(tool.agent):
                path: ConfigPath = ("tools", name, "agent", *found.path)
                yield Finding(found.rule, path, f"tool '{name}': agent: {found.message}", found.text_line)
