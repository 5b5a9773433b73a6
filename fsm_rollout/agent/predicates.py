"""The conditions that rows may ask for, by name.

Invariant: a predicate is a function of the trajectory and of the outcome at hand, of nothing else, and changes neither.
Its argument is checked when it is compiled, so at run time only a user's own function can fail.

``module:function`` names a function of the user's, called with the trajectory, and with the argument if there is one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from fsm_rollout.agent.graph import AgentGraph, Predicate
from fsm_rollout.agent.handlers import load_object
from fsm_rollout.agent.limits import LIMITS
from fsm_rollout.errors import ConfigError, did_you_mean
from fsm_rollout.trajectory.events import ToolCall
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory

Condition = Callable[[Trajectory, Outcome], bool]
"""A compiled predicate."""


@dataclass(frozen=True, slots=True)
class PredicateSpec:
    """The declaration of one predicate.

    ``counter``: the predicate depends on counts and limits alone, so the termination proof evaluates it; all others
    may hold or not, whenever they are asked.
    """

    name: str
    argument: str
    """What it takes, in words; empty when it takes nothing."""
    doc: str
    build: Callable[[object, AgentGraph], Condition]
    counter: bool = False


def compile_predicate(predicate: Predicate, graph: AgentGraph) -> Condition:
    """Return the predicate as a function; ``graph`` tells what its argument may name.

    Raises:
        ConfigError: unknown name, wrong argument, or a function that cannot be imported.
    """
    if ":" in predicate.name:
        return _own(predicate.name, predicate.argument)
    spec = PREDICATES.get(predicate.name)
    if spec is None:
        raise ConfigError(f"predicate '{predicate.name}' is not defined{did_you_mean(predicate.name, PREDICATES)}")
    if not spec.argument and predicate.argument is not None:
        raise ConfigError(f"predicate '{spec.name}' takes no argument, got {predicate.argument!r}")
    return spec.build(predicate.argument, graph)


def _own(path: str, argument: object) -> Condition:
    function = load_object(path)
    if not callable(function):
        raise ConfigError(f"predicate '{path}' is a {type(function).__name__}; it must be a function")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(f"predicate '{path}' is async, so it would always hold; make it a plain `def`")
    arguments = () if argument is None else (argument,)
    return lambda trajectory, outcome: bool(function(trajectory, *arguments))


def _wrong(name: str, argument: object) -> ConfigError:
    got = "nothing" if argument is None else repr(argument)
    return ConfigError(f"predicate '{name}' takes {PREDICATES[name].argument}, got {got}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _has_tool_calls(argument: object, graph: AgentGraph) -> Condition:
    return lambda trajectory, outcome: bool(trajectory.attempts)


def _all_calls_bad(argument: object, graph: AgentGraph) -> Condition:
    return lambda trajectory, outcome: bool(trajectory.called) and all(call.bad for call in trajectory.called)


def _last_tool_failed(argument: object, graph: AgentGraph) -> Condition:
    return lambda trajectory, outcome: bool(trajectory.called) and trajectory.called[-1].failure is not None


def _tool_called(argument: object, graph: AgentGraph) -> Condition:
    if not isinstance(argument, str):
        raise _wrong("tool_called", argument)
    if argument not in graph.tools:
        raise ConfigError(
            f"predicate 'tool_called': tool '{argument}' is not defined{did_you_mean(argument, graph.tools)}"
        )
    return lambda trajectory, outcome: any(
        isinstance(call, ToolCall) and call.name == argument for call in trajectory.attempts
    )


def _text_contains(argument: object, graph: AgentGraph) -> Condition:
    if not isinstance(argument, str) or not argument:
        raise _wrong("text_contains", argument)
    return lambda trajectory, outcome: argument in trajectory.text


def _text_matches(argument: object, graph: AgentGraph) -> Condition:
    if not isinstance(argument, str) or not argument:
        raise _wrong("text_matches", argument)
    try:
        pattern = re.compile(argument)
    except re.error as error:
        raise ConfigError(f"predicate 'text_matches': {argument!r} is no regular expression: {error}") from None
    return lambda trajectory, outcome: pattern.search(trajectory.text) is not None


def _threshold(name: str, limit: str, argument: object, graph: AgentGraph) -> Callable[[Trajectory], float]:
    """Return how many tokens ``argument`` stands for: a count, or a fraction of what ``limit`` allows."""
    if isinstance(argument, int) and _is_count(argument):
        return lambda trajectory: argument
    if not isinstance(argument, float) or not 0 <= argument <= 1:
        raise _wrong(name, argument)
    allowed: int | None = getattr(graph.limits, limit)
    if allowed is None:
        raise ConfigError(f"predicate '{name}': {argument} is a fraction of limits.{limit}, which is not set")
    # a prompt may have lowered the limit for its own trajectories
    return lambda trajectory: argument * (trajectory.limits.get(limit) or allowed)


def _context_over(argument: object, graph: AgentGraph) -> Condition:
    threshold = _threshold("context_over", "context_tokens", argument, graph)
    contexts = {name: state.context for name, state in graph.states.items()}

    def holds(trajectory: Trajectory, outcome: Outcome) -> bool:
        stream = trajectory.stream(contexts[trajectory.state])
        return stream is not None and len(stream.tokens) > threshold(trajectory)

    return holds


def _response_over(argument: object, graph: AgentGraph) -> Condition:
    threshold = _threshold("response_over", "response_tokens", argument, graph)
    return lambda trajectory, outcome: trajectory.response_tokens > threshold(trajectory)


def visits_argument(argument: object, graph: AgentGraph) -> tuple[str | None, int]:
    """Return the state (``None``: the one that the row leaves) and the count of a ``visits_over``.

    Raises:
        ConfigError: the argument is neither a count nor ``{STATE: count}``.
    """
    state: str | None = None
    count = argument
    if isinstance(argument, dict) and len(argument) == 1:
        ((state, count),) = argument.items()
        if state not in graph.states:
            raise ConfigError(
                f"predicate 'visits_over': state '{state}' is not defined{did_you_mean(state, graph.states)}"
            )
    if not isinstance(count, int) or not _is_count(count):
        raise _wrong("visits_over", argument)
    return state, count


def _visits_over(argument: object, graph: AgentGraph) -> Condition:
    state, count = visits_argument(argument, graph)
    return lambda trajectory, outcome: trajectory.visits.get(state or trajectory.state, 0) > count


def _score_at_least(argument: object, graph: AgentGraph) -> Condition:
    if not isinstance(argument, int | float) or isinstance(argument, bool) or argument != argument:
        raise _wrong("score_at_least", argument)

    def holds(trajectory: Trajectory, outcome: Outcome) -> bool:
        score = trajectory.turn_scores[-1][1] if trajectory.turn_scores else trajectory.score
        return score is not None and score >= argument

    return holds


def _limit(argument: object, graph: AgentGraph) -> Condition:
    if not isinstance(argument, str):
        raise _wrong("limit", argument)
    if argument not in LIMITS:
        raise ConfigError(f"predicate 'limit': there is no limit '{argument}'{did_you_mean(argument, LIMITS)}")
    return lambda trajectory, outcome: outcome.limit == argument


PREDICATES = {
    spec.name: spec
    for spec in (
        PredicateSpec("has_tool_calls", "", "the latest turn tried to call a tool", _has_tool_calls),
        PredicateSpec("all_calls_bad", "", "the model is to blame for all calls of the latest turn", _all_calls_bad),
        PredicateSpec("tool_called", "a tool's name", "the latest turn calls this tool", _tool_called),
        PredicateSpec("last_tool_failed", "", "the last call of the latest turn failed", _last_tool_failed),
        PredicateSpec("text_contains", "a text", "the latest turn's text holds this", _text_contains),
        PredicateSpec(
            "text_matches", "a regular expression", "the latest turn's text matches somewhere", _text_matches
        ),
        PredicateSpec(
            "context_over",
            "a count of tokens, or a fraction (0.8) of limits.context_tokens",
            "the stream of the present state's context is longer",
            _context_over,
        ),
        PredicateSpec(
            "response_over",
            "a count of tokens, or a fraction (0.8) of limits.response_tokens",
            "the trajectory has more response tokens",
            _response_over,
        ),
        PredicateSpec(
            "visits_over",
            "a count, or {STATE: count}",
            "the state (the present one, if none is named) has been visited more often",
            _visits_over,
            counter=True,
        ),
        PredicateSpec("score_at_least", "a number", "the latest turn's score, else the trajectory's", _score_at_least),
        PredicateSpec("limit", "a limit's name", "this is the limit that was reached", _limit, counter=True),
    )
}
"""The predicates that ship, by name."""
