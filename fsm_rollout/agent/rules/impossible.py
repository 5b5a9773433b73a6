"""What can never happen in an agent: limits that are reached nowhere, conditions that never hold.

Invariant: conservative. What is called impossible here cannot happen under any engine, tool, user, prompt or custom
handler; whatever a custom handler could bring about is possible. A prompt lowers limits that the agent sets, so a limit
that the agent does not set is never reached.
"""

from __future__ import annotations

from collections.abc import Collection

from fsm_rollout.agent.graph import MAIN, Predicate, TransitionSpec
from fsm_rollout.agent.limits import COUNTED_LIMITS
from fsm_rollout.agent.predicates import visits_argument
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.enums import LimitName, Trigger

_FINISHED_TURN = (Trigger.GENERATED, Trigger.TRUNCATED)


def reached_limits(structure: Structure, state: str) -> Collection[str]:
    """Return the limits that may be reached in a working state, on entry or while its handler runs."""
    if state not in structure.specs:
        return list(LimitName)  # rule 1 says that its handler is unknown
    graph, custom, handler = structure.graph, structure.is_custom(state), structure.specs[state].name
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
        return f"its handler raises {', '.join(structure.specs[state].triggers)}"
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
    custom = any(structure.is_custom(name) for name in structure.specs)
    handlers = {spec.name for spec in structure.specs.values()}
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
    others = [name for name in structure.specs if limit in reached_limits(structure, name)]
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
