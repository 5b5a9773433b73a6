"""The conditions that transitions may ask for, by name.

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
from fsm_rollout.agent.limits import LIMITS
from fsm_rollout.errors import ConfigError, did_you_mean
from fsm_rollout.names.objects import load_object
from fsm_rollout.names.registry import Registry
from fsm_rollout.trajectory.events import ToolCall
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory

Condition = Callable[[Trajectory, Outcome], bool]  # a compiled predicate
# Compiles a predicate with its argument; returns `None` if the argument is wrong.
Build = Callable[[object, AgentGraph], Condition | None]


@dataclass(frozen=True, slots=True)
class PredicateSpec:
    """The declaration of one predicate.

    ``argument`` says what it takes, in words; empty when it takes nothing. ``counter``: it depends on counts and limits
    alone, so the termination proof evaluates it; all others may hold or not, whenever they are asked.
    """

    name: str
    doc: str
    argument: str
    build: Build
    counter: bool


PREDICATES: dict[str, PredicateSpec] = {}  # the built-in predicates, by name
PREDICATE_NAMES = Registry("predicate", "fsm_rollout.predicates", PREDICATES, "module:function")


def _predicate(doc: str, argument: str = "", *, counter: bool = False) -> Callable[[Build], Build]:
    def declare(build: Build) -> Build:
        name = build.__name__.removeprefix("_")
        PREDICATES[name] = PredicateSpec(name, doc, argument, build, counter)
        return build

    return declare


def compile_predicate(predicate: Predicate, graph: AgentGraph) -> Condition:
    """Return the predicate as a function, or raise ConfigError; ``graph`` tells what its argument may name."""
    name, argument = predicate.name, predicate.argument
    if name not in PREDICATES:
        return _own_function(PREDICATE_NAMES.path(name), argument)
    spec = PREDICATES[name]
    condition = spec.build(argument, graph) if spec.argument or argument is None else None
    if condition is None:
        raise _wrong_argument(name, argument)
    return condition


def _wrong_argument(name: str, argument: object) -> ConfigError:
    shown_argument = "nothing" if argument is None else repr(argument)
    return ConfigError(f"predicate '{name}' takes {PREDICATES[name].argument or 'no argument'}, got {shown_argument}")


def score_function(path: str) -> Callable[[Trajectory], object]:
    """Return the function that scores a state; ConfigError if there is none, or none of a trajectory alone."""
    return _plain_function("score", path, None)


def _own_function(path: str, argument: object) -> Condition:
    function = _plain_function("predicate", path, argument)
    arguments = () if argument is None else (argument,)
    return lambda trajectory, outcome: bool(function(trajectory, *arguments))


def _plain_function(what: str, path: str, argument: object) -> Callable[..., object]:
    function = load_object(path)
    if not callable(function):
        raise ConfigError(f"{what} '{path}' is a {type(function).__name__}; it must be a function")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        always = ", so it would always hold" if what == "predicate" else ""
        raise ConfigError(f"{what} '{path}' is async{always}; make it a plain `def`")
    arguments = () if argument is None else (argument,)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None  # a C extension's cannot be read
    try:
        if signature is not None:
            signature.bind(None, *arguments)
    except TypeError as error:
        got = "the trajectory alone" if argument is None else f"the trajectory and {argument!r}"
        written = f"; an argument is written as `{{{path}: …}}`" if what == "predicate" else ""
        raise ConfigError(
            f"{what} '{path}' is called with {got}, which does not fit its signature {signature}: {error}{written}"
        ) from None
    return function


@_predicate("the latest turn tried to call a tool")
def _has_tool_calls(argument: object, graph: AgentGraph) -> Condition:
    return lambda t, outcome: bool(t.attempts)


@_predicate("all calls of the latest turn failed through the model's fault (unreadable, no such tool, wrong arguments)")
def _all_calls_bad(argument: object, graph: AgentGraph) -> Condition:
    return lambda t, outcome: bool(t.called) and all(call.bad for call in t.called)


@_predicate("the last call of the latest turn failed")
def _last_tool_failed(argument: object, graph: AgentGraph) -> Condition:
    return lambda t, outcome: bool(t.called) and t.called[-1].failure is not None


@_predicate("the latest turn calls this tool", "a tool's name")
def _tool_called(name: object, graph: AgentGraph) -> Condition | None:
    if not isinstance(name, str):
        return None
    servers = [tool for tool in graph.tools.values() if tool.is_source]
    known = [
        *(n for n, tool in graph.tools.items() if not tool.is_source),
        *(n for s in servers for n in s.allow or ()),
    ]
    if name not in known and all(server.allow is not None for server in servers):  # what others have shows in the run
        raise ConfigError(f"predicate 'tool_called': tool '{name}' is not defined{did_you_mean(name, known)}")
    return lambda t, outcome: any(isinstance(call, ToolCall) and call.name == name for call in t.attempts)


@_predicate("the latest turn's text holds this", "a text")
def _text_contains(text: object, graph: AgentGraph) -> Condition | None:
    return (lambda t, outcome: text in t.text) if isinstance(text, str) and text else None


@_predicate(r"the latest turn's text matches somewhere (RE2: \d, \w and \b are of ASCII)", "a regular expression")
def _text_matches(argument: object, graph: AgentGraph) -> Condition | None:
    if not isinstance(argument, str) or not argument:
        return None
    import re2  # few agents need it

    options = re2.Options()
    options.log_errors = False
    try:
        # Python's own engine may take exponential time, on the event loop: "^(a+)+$" on thirty letters takes a minute.
        pattern = re2.compile(argument, options)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else error
        raise ConfigError(f"predicate 'text_matches': {argument!r} {_no_pattern(argument, str(reason))}") from None
    return lambda t, outcome: pattern.search(t.text) is not None


def _no_pattern(pattern: str, reason: str) -> str:
    """Say why RE2 does not take a pattern, apart from whether Python would."""
    try:
        re.compile(pattern)
    except re.error as error:
        return f"is no regular expression: {error}"
    return (
        f"is not taken by RE2 ({reason}), which needs linear time for any text; it has no look-around, no "
        r"back-references, and `\z` for `\Z`; write several predicates, or a `module:function`"
    )


def _threshold(name: str, limit: str, argument: object, graph: AgentGraph) -> Callable[[Trajectory], float]:
    """Return how many tokens ``argument`` stands for: a count, or a fraction of what ``limit`` allows."""
    if isinstance(argument, int) and _is_count(argument):
        return lambda trajectory: argument
    if not isinstance(argument, float) or not 0 <= argument <= 1:
        raise _wrong_argument(name, argument)
    allowed: int | None = getattr(graph.limits, limit)
    if allowed is None:
        raise ConfigError(f"predicate '{name}': {argument} is a fraction of limits.{limit}, which is not set")
    # a prompt may have lowered the limit for its own trajectories
    return lambda trajectory: argument * (trajectory.limits.get(limit) or allowed)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_TOKENS = "a count of tokens, or a fraction (0.8) of limits."


@_predicate("the stream of the present state's context is longer", f"{_TOKENS}context_tokens")
def _context_over(argument: object, graph: AgentGraph) -> Condition:
    threshold = _threshold("context_over", "context_tokens", argument, graph)

    def holds(t: Trajectory, outcome: Outcome) -> bool:
        stream = t.stream(graph.states[t.state].context)
        return stream is not None and stream.length > threshold(t)

    return holds


@_predicate("the trajectory has more response tokens", f"{_TOKENS}response_tokens")
def _response_over(argument: object, graph: AgentGraph) -> Condition:
    threshold = _threshold("response_over", "response_tokens", argument, graph)
    return lambda t, outcome: t.response_tokens > threshold(t)


def visits_argument(argument: object, graph: AgentGraph) -> tuple[str | None, int]:
    """Return the state (``None``: the one that the transition leaves) and the count of a ``visits_over``.

    Raises:
        ConfigError: the argument is neither a count nor ``{STATE: count}``.
    """
    state, count = None, argument
    if isinstance(argument, dict) and len(argument) == 1:
        ((state, count),) = argument.items()
        if state not in graph.states:
            hint = did_you_mean(state, graph.states)
            raise ConfigError(f"predicate 'visits_over': state '{state}' is not defined{hint}")
    if not isinstance(count, int) or not _is_count(count):
        raise _wrong_argument("visits_over", argument)
    return state, count


@_predicate(
    "the state (the present one, if none is named) has been entered more often",
    "a count, or {STATE: count}",
    counter=True,
)
def _visits_over(argument: object, graph: AgentGraph) -> Condition:
    state, count = visits_argument(argument, graph)
    return lambda t, outcome: t.entries.get(state or t.state, 0) > count


@_predicate("the latest turn's score, else the trajectory's", "a number")
def _score_at_least(least: object, graph: AgentGraph) -> Condition | None:
    if not isinstance(least, int | float) or isinstance(least, bool) or least != least:
        return None

    def holds(t: Trajectory, outcome: Outcome) -> bool:
        score = t.turn_scores[-1][1] if t.turn_scores else t.score
        return score is not None and score >= least

    return holds


@_predicate("this is the limit that was reached", "a limit's name", counter=True)
def _limit(name: object, graph: AgentGraph) -> Condition | None:
    if isinstance(name, str) and name not in LIMITS:
        raise ConfigError(f"predicate 'limit': there is no limit '{name}'{did_you_mean(name, LIMITS)}")
    return (lambda t, outcome: outcome.limit == name) if isinstance(name, str) else None
