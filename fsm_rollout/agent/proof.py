"""The termination proof: the longest run that an agent can have, found before it runs.

Invariant: whatever engines, tools, users and predicates do, no trajectory of a verified agent exceeds its
:class:`Bound`. Where ``exact`` is true, some choice of outcomes attains ``transitions``.

What a run may do (the contract with :mod:`fsm_rollout.agent.machine` and :mod:`fsm_rollout.agent.limits`):

1. It begins in ``initial``; entering a working state adds one to its visits and at least one to what its handler
   spends. A limit N is reached when more than N has been spent; ``max_visits`` likewise.
2. On a visit, ``max_visits`` is checked, then the limit that the handler spends. When one is reached the handler does
   not run, and ``limit_reached`` is raised. A limit may be reached early at any check, never late: prompts lower
   limits, a visit may spend more than one. ``max_visits`` is reached exactly.
3. A handler that runs comes to one of its triggers, or ``failed``, ``timed_out``, ``truncated`` (where it generates),
   or ``limit_reached`` for a limit that is not counted on entry; a custom handler also for one that it may spend.
   ``context_tokens`` is always one of them, as the engine has a window.
4. Transitions route each limit once (``max_visits`` once per state); the next time it ends the run. A routed limit
   stays reached: a state that spends it ends the run, unless it has ``max_visits`` and is thereby exempt.
5. The first transition whose conditions hold fires. Counter predicates are evaluated; the others are free each time
   they are asked. Without such a transition the run ends, which is a transition too.

Agents used as tools are included in every figure but the seconds (they run within their parent's): a call may be any
of them, and each call is counted at the largest bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.proof_search import Counts, ranking, search
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.enums import LimitName


@dataclass(frozen=True, slots=True)
class Bound:
    """The most of each thing that one trajectory can come to, each maximised for itself.

    ``None`` is "not bounded by counting": say the calls of one turn where no limit counts them.
    """

    transitions: int
    generations: int | None
    tool_calls: int | None
    user_turns: int | None
    response_tokens: int | None
    wall_seconds: float | None
    exact: bool

    def __str__(self) -> str:
        """Format as ``ends within 18 transitions, 8 generations, 4,096 response tokens, 600 s``."""
        parts = [
            _counted(self.transitions, "transition"),
            _counted(self.generations, "generation"),
            _counted(self.response_tokens, "response token"),
            "" if self.wall_seconds is None else f"{self.wall_seconds:,g} s",
        ]
        within = "within" if self.exact else "within at most"
        return f"ends {within} {', '.join(part for part in parts if part)}"


def _counted(number: int | None, noun: str) -> str:
    return "" if number is None else f"{number:,} {noun}{'' if number == 1 else 's'}"


def prove(graph: AgentGraph, *, situations: int = 40_000) -> Bound:
    """Return the bound of a verified agent.

    ``situations`` is how many combinations of state, counts and routed limits the search may look at before the
    coarser ranking bound takes its place.

    Raises:
        ConfigError: the agent may run for ever (:func:`fsm_rollout.agent.verify.verify` says why).
    """
    return _proven(graph, situations)


@lru_cache(maxsize=64)
def _proven(graph: AgentGraph, situations: int) -> Bound:
    structure = Structure(graph)
    bound = _own_bound(structure, search(structure, situations) or ranking(structure))
    tools = [tool for tool in graph.tools.values() if tool.agent is not None]
    if not tools or bound.tool_calls == 0:
        return bound
    if bound.tool_calls is None:
        raise ConfigError(f"agent '{graph.agent}' may run for ever: nothing bounds its calls of other agents")
    children = [prove(tool.agent, situations=situations) for tool in tools if tool.agent is not None]
    calls = bound.tool_calls * max(tool.retry.attempts for tool in tools)

    def with_children(figure: str) -> int | None:
        own, numbers = getattr(bound, figure), [getattr(child, figure) for child in children]
        return None if own is None or None in numbers else own + calls * max(numbers)

    figures = ("transitions", "generations", "tool_calls", "user_turns", "response_tokens")
    totals: dict[str, Any] = {figure: with_children(figure) for figure in figures}
    return replace(bound, exact=False, **totals)


def reachable_rows(graph: AgentGraph, *, situations: int = 40_000) -> frozenset[int] | None:
    """Return the places of the transitions that some run takes; ``None``: more than ``situations`` are to be seen."""
    counts = search(Structure(graph), situations)
    return None if counts is None else counts.rows


def _own_bound(structure: Structure, counts: Counts) -> Bound:
    """Return the bound without what agents used as tools add."""
    graph, limits = structure.graph, structure.graph.limits
    custom = {state for state in counts.ran if structure.is_custom(state)}
    callers = custom | {state for state in counts.ran if structure.specs[state].name == "call_tools"}
    takers = {state for state in custom if structure.spends(state) == LimitName.USER_TURNS}
    routed = {limit for limit, _ in counts.exempt}

    def at_most(limit: LimitName, users: set[str], further: str = "") -> int | None:
        """Return what a limit allows to ``users``, who may spend any number in one visit, and ``further`` handlers."""
        allowed: int | None = getattr(limits, limit)
        if not users:
            return 0
        if allowed is None or any((limit, state) in counts.exempt for state in users):
            return None
        alone = [s for s in counts.ran if structure.specs[s].name == further and (limit, s) in counts.exempt]
        return allowed + sum(graph.states[state].max_visits or 0 for state in alone)

    # After `wall_seconds` was routed, states may still make as many visits as their `max_visits` allows.
    seconds = limits.wall_seconds
    for state in [state for limit, state in counts.exempt if limit == LimitName.WALL_SECONDS]:
        timeout, visits = graph.states[state].timeout, graph.states[state].max_visits
        seconds = None if seconds is None or timeout is None or visits is None else seconds + timeout * visits
    return Bound(
        transitions=counts.transitions,
        generations=at_most(LimitName.ASSISTANT_TURNS, custom, "generate") if custom else counts.generations,
        tool_calls=at_most(LimitName.TOOL_CALLS, callers),
        user_turns=at_most(LimitName.USER_TURNS, takers, "interact") if takers else counts.user_turns,
        response_tokens=None if LimitName.RESPONSE_TOKENS in routed else limits.response_tokens,
        wall_seconds=seconds,
        exact=counts.exact,
    )
