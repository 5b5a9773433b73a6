"""Rule 1: every name that is used is defined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fsm_rollout.agent.graph import BUILT_IN_STATES, MAIN, TERMINATED, AgentGraph, State
from fsm_rollout.agent.handlers import handler_spec
from fsm_rollout.agent.predicates import PREDICATES
from fsm_rollout.agent.rules.finding import Finding, in_tools, predicates_of
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.errors import ConfigError, did_you_mean
from fsm_rollout.trajectory.model_errors import ConfigPath, describe_path
from fsm_rollout.trajectory.reasons import IMPLICIT_TRIGGERS


def names(graph: AgentGraph, structure: Structure | None = None, *, nested: bool = True) -> Iterator[Finding]:
    """Yield rule 1: names that are not defined, in the agents used as tools too when ``nested``."""
    structure = structure or Structure(graph)
    states = {*graph.states, TERMINATED}
    if graph.initial not in states:
        yield _undefined(("initial",), "initial", graph.initial, states)
    for name, context in graph.contexts.items():
        for tool in context.tools or ():
            if tool not in graph.tools:
                yield _undefined(("contexts", name, "tools"), "tool", tool, graph.tools)
    for name, state in graph.states.items():
        at: ConfigPath = ("states", name)
        if state.context not in {*graph.contexts, MAIN}:
            yield _undefined((*at, "context"), "context", state.context, {*graph.contexts, MAIN})
        if state.on_error is not None and state.on_error not in states:
            yield _undefined((*at, "on_error"), "on_error", state.on_error, states)
        if not graph.is_final(name):
            yield from _handler(name, state)
    yield from _row_names(structure, states)
    if nested:
        yield from in_tools(graph, names)


def _undefined(path: ConfigPath, kind: str, name: str, known: Iterable[str]) -> Finding:
    words = ": ".join(part for part in (describe_path(path[:-1]), kind) if part)
    return Finding(1, path, f"{words} '{name}' is not defined{did_you_mean(name, known)}")


def _handler(name: str, state: State) -> Iterator[Finding]:
    path: ConfigPath = ("states", name, "handler")
    handler = state.handler or BUILT_IN_STATES.get(name)
    if handler is None:
        hint = did_you_mean(name, BUILT_IN_STATES)
        hint = hint if "mean" in hint else "; give it one, or `final: true`"
        yield Finding(1, path, f"state '{name}' names no handler{hint}")
        return
    try:
        handler_spec(handler)
    except ConfigError as error:
        yield Finding(1, path, f"state '{name}': {error}")


def _row_names(structure: Structure, states: set[str]) -> Iterator[Finding]:
    graph = structure.graph
    triggers = {*IMPLICIT_TRIGGERS, *(t for spec in structure.specs.values() for t in spec.triggers)}
    all_known = len(structure.specs) == len(graph.working_states)
    for index, row in enumerate(graph.transitions):
        at: ConfigPath = ("transitions", index)
        if row.trigger not in triggers and all_known:
            hint = did_you_mean(row.trigger, triggers)
            yield Finding(1, (*at, "trigger"), f"row {index + 1}: no state raises trigger '{row.trigger}'{hint}")
        for source in row.source:
            if source not in states and source != "*":
                yield _undefined((*at, "source"), "source", source, states)
        if row.dest not in states:
            yield _undefined((*at, "dest"), "dest", row.dest, states)
        for key, predicate in predicates_of(row):
            if predicate.name not in PREDICATES and ":" not in predicate.name:
                yield _undefined((*at, key), "predicate", predicate.name, PREDICATES)
