"""Rules about names and transitions: 1, 4 to 8, 12 and 13.

Invariant: what is said to be impossible (a limit that is reached nowhere, a condition that never holds) cannot happen
under any engine, tool, user, prompt or custom handler; whatever a custom handler could bring about is possible. A
prompt lowers limits that the agent sets, so a limit that the agent does not set is never reached.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fsm_rollout.agent.graph import MAIN, TERMINATED, Predicate, TransitionSpec
from fsm_rollout.agent.limits import COUNTED_LIMITS
from fsm_rollout.agent.predicates import PREDICATE_NAMES, PREDICATES, compile_predicate, visits_argument
from fsm_rollout.agent.rules.structure import Finding, Structure, finding
from fsm_rollout.errors import ConfigError, did_you_mean
from fsm_rollout.trajectory.config_errors import ConfigPath, describe_path
from fsm_rollout.trajectory.enums import IMPLICIT_TRIGGERS, LimitName, Trigger


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
    return {*IMPLICIT_TRIGGERS, *(trigger for spec in structure.handlers.values() for trigger in spec.triggers)}


def _defined(
    path: ConfigPath, kind: str, name: str, defined_names: Collection[str], is_special: bool = False
) -> Iterator[Finding]:
    if name not in defined_names and not is_special:
        words = ": ".join(part for part in (describe_path(path[:-1]), kind) if part)
        yield Finding(1, path, f"{words} '{name}' is not defined{did_you_mean(name, defined_names)}")


def _outcomes(structure: Structure) -> Iterator[Finding]:
    for state, spec in structure.handlers.items():
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
            if state in structure.handlers and (reason := never_raised(structure, state, row.trigger)) is not None:
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
    for state in structure.handlers:
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


# -- what can never happen -----------------------------------------------------------------------------------------


_FINISHED_TURN = (Trigger.GENERATED, Trigger.TRUNCATED)


def reached_limits(structure: Structure, state: str) -> Collection[str]:
    """Return the limits that may be reached in a working state, on entry or while its handler runs."""
    if state not in structure.handlers:
        return list(LimitName)  # rule 1 says that its handler is unknown
    graph, custom, handler = structure.graph, structure.is_custom(state), structure.graph.handler_of(state)
    bounded = graph.limits.model_dump(exclude_none=True)
    reached: set[str] = {name for name in (LimitName.WALL_SECONDS,) if name in bounded}
    if graph.states[state].max_visits is not None:
        reached.add(LimitName.MAX_VISITS)
    reached |= {name for name in COUNTED_LIMITS if name in bounded and (custom or structure.spends(state) == name)}
    if custom or handler == "generate":
        reached |= {LimitName.CONTEXT_TOKENS, *({LimitName.RESPONSE_TOKENS} & bounded.keys())}
    if custom or handler == "call_tools":
        reached.update({LimitName.BAD_CALLS} & bounded.keys())
    return reached


def never_raised(structure: Structure, state: str, trigger: str) -> str | None:
    """Return why a trigger is never raised in a state, or ``None`` if it may be."""
    if not structure.may_raise(state, trigger):
        return f"its handler raises {', '.join(structure.handlers[state].triggers)}"
    if trigger == Trigger.TIMED_OUT and structure.graph.states[state].timeout is None:
        return "it has no timeout; give it one"
    if trigger == Trigger.LIMIT_REACHED and not reached_limits(structure, state):
        return "no limit holds there; give it max_visits, or set limits.wall_seconds"
    return None


def never_fires(structure: Structure, row: TransitionSpec, sources: Collection[str]) -> str | None:
    """Return why no case passes a transition's tests in any of the states that it leaves, or ``None`` if one may."""
    if not sources:
        return None  # other rules say so
    for predicate in row.conditions:
        reasons = [_never_holds(structure, predicate, row, state) for state in sources]
        if all(reasons):
            return reasons[0]
    for predicate in row.unless:
        if all(_always_holds(structure, predicate, row, state) for state in sources):
            return f"'{predicate.name}' always holds there"
    return None


def _never_holds(structure: Structure, predicate: Predicate, row: TransitionSpec, state: str) -> str | None:
    graph, argument = structure.graph, predicate.argument
    custom = any(structure.is_custom(name) for name in structure.handlers)
    handlers = {structure.graph.handler_of(name) for name in structure.handlers}
    match predicate.name:
        case "limit" if argument in list(LimitName) and row.trigger == Trigger.LIMIT_REACHED:
            return _never_reached(structure, str(argument), state)
        case "has_tool_calls" | "tool_called" if graph.tools:  # an agent without any may be given some in Python
            # A turn that has just ended is of the state's own context; others may be of any.
            of_state = row.trigger in _FINISHED_TURN and not structure.is_custom(state)
            contexts = {graph.states[state].context} if of_state else {MAIN, *graph.contexts}
            if not any(graph.tools_of(context) for context in contexts):
                where = f"context '{graph.states[state].context}'" if of_state else "the agent"
                return f"{where} has no tools to call"
            shown = {tool for context in contexts for tool in graph.tools_of(context)}
            if argument in graph.tools and argument not in shown:
                return f"tool '{argument}' is not shown in context '{graph.states[state].context}'"
        case "all_calls_bad" | "last_tool_failed":
            if row.trigger in _FINISHED_TURN and not structure.is_custom(state):
                return "a turn that has just ended has no results yet; ask when its calls are done"
            if "call_tools" not in handlers and not custom:
                return "no state calls tools"
        case "score_at_least" if "interact" not in handlers and not custom:
            return "nothing gives scores while the trajectory runs: no state interacts, and rewards come after its end"
        case "context_over" | "response_over":
            limit = "context_tokens" if predicate.name == "context_over" else "response_tokens"
            return None if custom else _never_over(structure, limit, argument)
        case "visits_over":
            return _never_visited(structure, predicate, row, state)
    return None


def _never_reached(structure: Structure, limit: str, state: str) -> str | None:
    if limit in reached_limits(structure, state):
        return None
    if limit == LimitName.MAX_VISITS:
        return f"state '{state}' has no max_visits"
    if limit != LimitName.CONTEXT_TOKENS and getattr(structure.graph.limits, limit) is None:
        return f"limits.{limit} is not set"
    others = [name for name in structure.handlers if limit in reached_limits(structure, name)]
    return f"{limit} is not reached in '{state}'" + (f", only in {', '.join(others)}" if others else "")


def _never_over(structure: Structure, limit: str, argument: object) -> str | None:
    """Return why no stream gets longer than ``argument``: its limit ends the trajectory before that."""
    allowed: int | None = getattr(structure.graph.limits, limit)
    if allowed is None or not isinstance(argument, int | float) or isinstance(argument, bool):
        return None
    if any(row.trigger == Trigger.LIMIT_REACHED for row in structure.graph.transitions):
        return None  # a limit that was routed holds no longer where max_visits does
    over = argument >= (1.0 if isinstance(argument, float) else allowed)
    return f"limits.{limit} ({allowed}) is reached before that" if over else None


def _never_visited(structure: Structure, predicate: Predicate, row: TransitionSpec, state: str) -> str | None:
    graph = structure.graph
    try:
        named, count = visits_argument(predicate.argument, graph)
    except ConfigError:
        return None  # rule 12 says so
    if named is not None and graph.is_final(named):
        return f"'{named}' is final, so it ends with its first visit"
    most = graph.states[state].max_visits
    if most is not None and named in (None, state) and count >= most and row.trigger != Trigger.LIMIT_REACHED:
        return f"state '{state}' has max_visits: {most}, which is reached before that"
    return None


def _always_holds(structure: Structure, predicate: Predicate, row: TransitionSpec, state: str) -> bool:
    match predicate.name:
        case "visits_over":
            return predicate.argument in (0, {state: 0})
        case "limit" if row.trigger == Trigger.LIMIT_REACHED:
            return set(reached_limits(structure, state)) == {predicate.argument}
    return False


RULES = (_outcomes, _never_raised, _shadowed, _single_rows)
