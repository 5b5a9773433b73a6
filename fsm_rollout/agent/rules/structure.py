"""The graph as a graph: what each state may raise, where its transitions lead, what can be reached, and its cycles.

Invariant: everything here is conservative. A predicate may hold or not, so every transition whose trigger its source
may raise is an edge; names that are not defined lead nowhere. A rule is a function of a :class:`Structure` that yields
its breaches (:class:`Finding`); it raises nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from fsm_rollout.agent.graph import BUILT_IN_STATES, TERMINATED, AgentGraph, TransitionSpec
from fsm_rollout.agent.handlers import Handler, checked_handler
from fsm_rollout.agent.limits import COUNTED_LIMITS, LIMITS
from fsm_rollout.agent.words import is_custom
from fsm_rollout.errors import ConfigError, did_you_mean
from fsm_rollout.trajectory.config_errors import ConfigPath, describe_path
from fsm_rollout.trajectory.enums import IMPLICIT_TRIGGERS, LimitName, Trigger


@dataclass(frozen=True, slots=True)
class Finding:
    """One breach of a rule, at a config path. ``text_line`` counts lines of a text from 1."""

    rule: int
    path: ConfigPath
    message: str
    text_line: int | None = None


def finding(rule: int, path: ConfigPath, what: str, text_line: int | None = None) -> Finding:
    """Return the finding that says ``what`` of the entry (a state, a transition, …) in which ``path`` lies."""
    return Finding(rule, path, describe_path(path[:2]) + what, text_line)


class Structure:
    """Reads a graph; tolerates unknown names."""

    def __init__(self, graph: AgentGraph) -> None:
        self.graph = graph
        self.handlers: dict[str, type[Handler]] = {}  # of the working states whose handler is known
        self.without_handler: dict[str, str] = {}  # the other working states, with what is wrong
        for state in graph.working_states:
            name = graph.states[state].handler or BUILT_IN_STATES.get(state)
            try:
                if name is not None:
                    self.handlers[state] = checked_handler(name)
                else:
                    hint = did_you_mean(state, BUILT_IN_STATES)
                    hint = hint if "mean" in hint else "; give it one, or `final: true`"
                    self.without_handler[state] = f"state '{state}' names no handler{hint}"
            except ConfigError as error:
                self.without_handler[state] = f"state '{state}': {error}"
        # Every transition (`on_error` too) that may fire in a working state and leads somewhere, with its place.
        self.edges: dict[str, list[tuple[int | None, TransitionSpec]]] = {state: [] for state in graph.working_states}
        for state, trigger, place, row in graph.table():
            if row is not None and self.may_raise(state, trigger) and row.dest in (*graph.states, TERMINATED):
                self.edges[state].append((place, row))

    def is_custom(self, state: str) -> bool:
        """Whether a state runs code of the user's, a class or a foreign agent: it may generate, call tools and wait."""
        return state in self.handlers and is_custom(self.graph.handler_of(state))

    def spends(self, state: str) -> str | None:
        """Return the counted limit that each visit is charged for, if any."""
        spends = self.handlers[state].spends if state in self.handlers else None
        return spends if spends in COUNTED_LIMITS else None

    def may_raise(self, state: str, trigger: str) -> bool:
        """Whether ``trigger`` can be raised in a working state, by its handler or by the scheduler."""
        if state not in self.handlers or trigger in self.handlers[state].triggers:
            return True
        return trigger in IMPLICIT_TRIGGERS and (trigger != Trigger.TRUNCATED or self.is_custom(state))

    def outcomes(self, state: str) -> Iterator[tuple[str, str | None]]:
        """Yield the triggers that may be raised while a handler runs, each limit with ``limit_reached``.

        A custom handler may spend any limit. ``cancelled`` is left out: no transition can take it.
        """
        custom, bounded = self.is_custom(state), self.graph.limits.model_dump(exclude_none=True)
        scheduler = (Trigger.FAILED, Trigger.TIMED_OUT, *((Trigger.TRUNCATED,) if custom else ()))
        for trigger in dict.fromkeys((*self.handlers[state].triggers, *scheduler)):
            yield trigger, None
        for name, limit in LIMITS.items():
            if (name in bounded or name == LimitName.CONTEXT_TOKENS) and (custom or not limit.counted):
                yield Trigger.LIMIT_REACHED, name

    def sources(self, row: TransitionSpec) -> tuple[str, ...]:
        """Return the working states that a transition leaves; ``*`` stands for all that may raise its trigger."""
        working = self.graph.working_states
        sources = [state for state in row.source if state in working]
        if "*" in row.source:
            sources += [state for state in working if self.may_raise(state, row.trigger)]
        return tuple(dict.fromkeys(sources))

    def reachable(self) -> Collection[str]:
        """Return the states that transitions lead to from the initial state, itself included."""
        return _paths(self.graph.initial, self._dests).keys()

    def can_end(self) -> Collection[str]:
        """Return the states from which transitions lead to a final state."""
        ends = {state for state in (*self.graph.states, TERMINATED) if self.graph.is_final(state)}
        while further := {state for state in self.edges.keys() - ends if not ends.isdisjoint(self._dests(state))}:
            ends |= further
        return ends

    def _dests(self, state: str) -> list[str]:
        return [row.dest for _, row in self.edges.get(state, ())]

    def onward_within(self, states: Collection[str]) -> dict[str, list[str]]:
        """Return which of ``states`` transitions lead to from each of them.

        ``limit_reached`` transitions do not count: each limit is routed once, so they cannot go round for ever.
        """
        return {
            state: [r.dest for _, r in self.edges[state] if r.trigger != Trigger.LIMIT_REACHED and r.dest in states]
            for state in states
        }

    def cycle_within(self, states: Collection[str]) -> tuple[str, ...] | None:
        """Return a shortest cycle through ``states`` alone, its first state repeated at the end, or ``None``."""
        onward, cycles = self.onward_within(states), []
        for state in states:
            predecessors = _paths(state, onward.__getitem__)
            last = next((other for other in predecessors if state in onward[other]), None)
            if last is not None:
                cycle = [state, last]
                while cycle[-1] != state:
                    cycle.append(predecessors[cycle[-1]])
                cycles.append(tuple(reversed(cycle)))
        return min(cycles, key=len, default=None)


def _paths(start: str, onward: Callable[[str], Iterable[str]]) -> dict[str, str]:
    """Return every state on a path from ``start``, nearest first, with the one before it on a shortest path."""
    predecessors = {start: start}
    queue = [start]
    for state in queue:  # which grows meanwhile
        for dest in onward(state):
            if dest not in predecessors:
                predecessors[dest] = state
                queue.append(dest)
    return predecessors
