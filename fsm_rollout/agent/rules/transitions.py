"""Rules about names and transitions: 1, 4 to 8, 12 and 13."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fsm_rollout.agent.graph import MAIN, TERMINATED
from fsm_rollout.agent.predicates import PREDICATE_NAMES, PREDICATES, compile_predicate
from fsm_rollout.agent.rules.impossible import never_fires, never_raised
from fsm_rollout.agent.rules.structure import Finding, Structure, finding
from fsm_rollout.errors import ConfigError, did_you_mean
from fsm_rollout.trajectory.config_errors import ConfigPath, describe_path
from fsm_rollout.trajectory.enums import IMPLICIT_TRIGGERS, Trigger


def names(structure: Structure) -> Iterator[Finding]:
    """Yield rule 1: every name that is used and not defined."""
    graph = structure.graph
    states, contexts = {*graph.states, TERMINATED}, {*graph.contexts, MAIN}
    yield from _defined(("initial",), "initial", graph.initial, states)
    for name, context in graph.contexts.items():
        for tool in context.tools or ():
            yield from _defined(("contexts", name, "tools"), "tool", tool, graph.tools)
    for name, state in graph.states.items():
        yield from _defined(("states", name, "context"), "context", state.context, contexts)
        yield from _defined(("states", name, "on_error"), "on_error", state.on_error or TERMINATED, states)
        if name in structure.without_handler:
            yield Finding(1, ("states", name, "handler"), structure.without_handler[name])
    triggers = _triggers(structure)
    for index, row in enumerate(graph.transitions):
        at: ConfigPath = ("transitions", index)
        if row.trigger not in triggers and not structure.without_handler:
            hint = did_you_mean(row.trigger, triggers)
            yield finding(1, (*at, "trigger"), f": no state raises trigger '{row.trigger}'{hint}")
        for source in row.source:
            yield from _defined((*at, "source"), "source", source, states, source == "*")
        yield from _defined((*at, "dest"), "dest", row.dest, states)
        for predicate, answer in row.tests:
            path = (*at, "conditions" if answer else "unless")
            is_named = predicate.name in PREDICATE_NAMES
            yield from _defined(path, "predicate", predicate.name, PREDICATES.keys(), is_named)


def _triggers(structure: Structure) -> set[str]:
    return {*IMPLICIT_TRIGGERS, *(trigger for spec in structure.specs.values() for trigger in spec.triggers)}


def _defined(
    path: ConfigPath, kind: str, name: str, defined_names: Collection[str], is_special: bool = False
) -> Iterator[Finding]:
    if name not in defined_names and not is_special:
        words = ": ".join(part for part in (describe_path(path[:-1]), kind) if part)
        yield Finding(1, path, f"{words} '{name}' is not defined{did_you_mean(name, defined_names)}")


def _outcomes(structure: Structure) -> Iterator[Finding]:
    for state, spec in structure.specs.items():
        for trigger in spec.triggers:
            if trigger in IMPLICIT_TRIGGERS:
                continue
            rows = list(structure.graph.rows_of(state, trigger))
            if not rows:
                what = f" may raise '{trigger}', which no transition takes; add one with source: {state}"
                yield finding(4, ("states", state), what)
            elif all(row.tests for _, row in rows):
                last = rows[-1][0] or 0
                what = f": the last transition for '{trigger}' from '{state}' is conditional; "
                yield finding(6, ("transitions", last), f"{what}add one without conditions after it")


def _never_raised(structure: Structure) -> Iterator[Finding]:
    raised_triggers = _triggers(structure)
    for index, row in enumerate(structure.graph.transitions):
        at: ConfigPath = ("transitions", index, "source")
        if row.trigger not in raised_triggers:
            continue  # rule 1 says so
        for state in row.source:
            if state in structure.specs and (reason := never_raised(structure, state, row.trigger)) is not None:
                yield finding(5, at, f": state '{state}' never raises '{row.trigger}': {reason}")
        if "*" in row.source and not structure.sources(row):
            yield finding(5, at, f": no state raises '{row.trigger}'")


def _shadowed(structure: Structure) -> Iterator[Finding]:
    graph = structure.graph
    for index, row in enumerate(graph.transitions):
        at: ConfigPath = ("transitions", index)
        contradictory = [predicate.name for predicate in row.conditions if predicate in row.unless]
        if contradictory:
            yield finding(7, at, f" never fires: it wants '{contradictory[0]}' both to hold and not to hold")
            continue
        sources = structure.sources(row)
        if (reason := never_fires(structure, row, sources)) is not None:
            yield finding(7, at, f" never fires: {reason}")
            continue
        # 1. Which earlier transition takes all cases of this one, by the state that it leaves.
        taken_by: dict[str, int] = {}
        for place, earlier in enumerate(graph.transitions[:index]):
            if earlier.trigger == row.trigger and all(test in row.tests for test in earlier.tests):
                for state in structure.sources(earlier):
                    taken_by.setdefault(state, place)
        # 2. A transition that fires nowhere is named once. A `*` may be taken in part by transitions before it.
        dead = [state for state in sources if state in taken_by]
        for state in dead[:1] if len(dead) == len(sources) else [state for state in dead if state in row.source]:
            taker = f"transition {taken_by[state] + 1} takes all its cases"
            yield finding(7, at, f" never fires from '{state}': {taker}; put it before, or remove it")
    for state in structure.specs:
        rows = graph.rows_of(state, Trigger.FAILED) if graph.states[state].on_error is not None else ()
        for place in [place for place, row in rows if place is not None and not row.tests][:1]:
            what = f": on_error never holds: transition {place + 1} takes every 'failed'; remove one of them"
            yield finding(7, ("states", state, "on_error"), what)


def _single_rows(structure: Structure) -> Iterator[Finding]:
    graph = structure.graph
    for index, row in enumerate(graph.transitions):
        at: ConfigPath = ("transitions", index)
        if row.trigger == Trigger.CANCELLED:
            yield finding(8, (*at, "trigger"), ": 'cancelled' cannot be routed; it always ends the trajectory")
        for predicate, answer in row.tests:
            path: ConfigPath = (*at, "conditions" if answer else "unless")
            if predicate.name not in PREDICATE_NAMES:
                continue  # rule 1 says so
            if predicate.name == "limit" and row.trigger != Trigger.LIMIT_REACHED:
                what = f": predicate 'limit' says nothing about '{row.trigger}', only 'limit_reached'"
                yield finding(12, path, what)
            try:
                compile_predicate(predicate, graph)
            except ConfigError as error:
                yield finding(12, path, f": {error}")
        if row.stop_reason is not None and row.dest in graph.states and not graph.is_final(row.dest):
            what = f": stop_reason '{row.stop_reason}' would be lost, as '{row.dest}' is not final"
            yield finding(13, (*at, "stop_reason"), what)


RULES = (_outcomes, _never_raised, _shadowed, _single_rows)
