"""Rules about rows: 4 to 8, 12 and 13."""

from __future__ import annotations

from collections.abc import Iterator

from fsm_rollout.agent.graph import TransitionRow
from fsm_rollout.agent.predicates import PREDICATES, compile_predicate
from fsm_rollout.agent.rules.finding import Finding, predicates_of
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.model_errors import ConfigPath
from fsm_rollout.trajectory.reasons import IMPLICIT_TRIGGERS, Trigger


def outcomes(structure: Structure) -> Iterator[Finding]:
    """Yield rule 4 and 6: an outcome without a row, or without an unconditional last one."""
    graph = structure.graph
    for state, spec in structure.specs.items():
        for trigger in spec.triggers:
            if trigger in IMPLICIT_TRIGGERS:
                continue
            rows = [
                (i, row)
                for i, row in enumerate(graph.transitions)
                if row.trigger == trigger and {state, "*"} & set(row.source)
            ]
            if not rows:
                message = f"state '{state}' may raise '{trigger}', which no row takes; add one with source: {state}"
                yield Finding(4, ("states", state), message)
            elif all(row.conditions or row.unless for _, row in rows):
                message = (
                    f"row {rows[-1][0] + 1}: the last row for '{trigger}' from '{state}' is conditional; "
                    "add one without conditions after it"
                )
                yield Finding(6, ("transitions", rows[-1][0]), message)


def never_raised(structure: Structure) -> Iterator[Finding]:
    """Yield rule 5: a row whose source never raises its trigger."""
    known = {trigger for spec in structure.specs.values() for trigger in spec.triggers} | set(IMPLICIT_TRIGGERS)
    for index, row in enumerate(structure.graph.transitions):
        if row.trigger not in known:
            continue  # rule 1 says so
        named = [s for s in row.source if s in structure.specs]
        wrong = [s for s in named if not structure.may_raise(s, row.trigger)]
        for state in wrong:
            raised = ", ".join(structure.specs[state].triggers)
            message = f"row {index + 1}: state '{state}' never raises '{row.trigger}'; its handler raises {raised}"
            yield Finding(5, ("transitions", index, "source"), message)
        if "*" in row.source and not structure.sources(row):
            message = f"row {index + 1}: no state raises '{row.trigger}'"
            yield Finding(5, ("transitions", index, "source"), message)


def shadowed(structure: Structure) -> Iterator[Finding]:
    """Yield rule 7: a row that can never fire."""
    graph = structure.graph
    for index, row in enumerate(graph.transitions):
        at: ConfigPath = ("transitions", index)
        both = [p.name for p in row.conditions if p in row.unless]
        if both:
            yield Finding(7, at, f"row {index + 1} never fires: it wants '{both[0]}' both to hold and not to hold")
            continue
        covered = {}
        for state in structure.sources(row):
            for before, earlier in enumerate(graph.transitions[:index]):
                if earlier.trigger == row.trigger and state in structure.sources(earlier) and _covers(earlier, row):
                    covered[state] = before
                    break
        everywhere = len(covered) == len(structure.sources(row))
        for state, before in covered.items():
            if everywhere or state in row.source:  # a `*` may be taken in part by rows before it
                message = (
                    f"row {index + 1} never fires from '{state}': row {before + 1} takes all its cases; "
                    "put it before, or remove it"
                )
                yield Finding(7, at, message)
                if everywhere:
                    break
    for state in structure.specs:
        on_error = graph.states[state].on_error
        plain = [
            i for i, r in enumerate(graph.transitions) if r.trigger == Trigger.FAILED and state in structure.sources(r)
        ]
        plain = [i for i in plain if not graph.transitions[i].conditions and not graph.transitions[i].unless]
        if on_error is not None and plain:
            message = (
                f"state '{state}': on_error never holds: row {plain[0] + 1} takes every 'failed'; remove one of them"
            )
            yield Finding(7, ("states", state, "on_error"), message)


def _covers(earlier: TransitionRow, later: TransitionRow) -> bool:
    """Whether ``earlier`` holds whenever ``later`` does."""
    return all(p in later.conditions for p in earlier.conditions) and all(p in later.unless for p in earlier.unless)


def cancelled(structure: Structure) -> Iterator[Finding]:
    """Yield rule 8: a row for ``cancelled``."""
    for index, row in enumerate(structure.graph.transitions):
        if row.trigger == Trigger.CANCELLED:
            message = f"row {index + 1}: 'cancelled' cannot be routed; it always ends the trajectory"
            yield Finding(8, ("transitions", index, "trigger"), message)


def arguments(structure: Structure) -> Iterator[Finding]:
    """Yield rule 12: a predicate's argument."""
    for index, row in enumerate(structure.graph.transitions):
        for key, predicate in predicates_of(row):
            at: ConfigPath = ("transitions", index, key)
            if predicate.name not in PREDICATES and ":" not in predicate.name:
                continue  # rule 1 says so
            if predicate.name == "limit" and row.trigger != Trigger.LIMIT_REACHED:
                message = f"row {index + 1}: predicate 'limit' says nothing about '{row.trigger}', only 'limit_reached'"
                yield Finding(12, at, message)
            try:
                compile_predicate(predicate, structure.graph)
            except ConfigError as error:
                yield Finding(12, at, f"row {index + 1}: {error}")


def stop_reasons(structure: Structure) -> Iterator[Finding]:
    """Yield rule 13: a ``stop_reason`` on a row that does not end the trajectory."""
    graph = structure.graph
    for index, row in enumerate(graph.transitions):
        if row.stop_reason is not None and row.dest in graph.states and not graph.is_final(row.dest):
            message = f"row {index + 1}: stop_reason '{row.stop_reason}' would be lost, as '{row.dest}' is not final"
            yield Finding(13, ("transitions", index, "stop_reason"), message)


RULES = (outcomes, never_raised, shadowed, cancelled, arguments, stop_reasons)
