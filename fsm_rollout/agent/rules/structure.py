"""The graph as a graph: what each state may raise, where its rows lead, what can be reached, and its cycles.

Invariant: everything here is conservative. A predicate may hold or not, so every row whose trigger its source may
raise is an edge; names that are not defined lead nowhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from fsm_rollout.agent.graph import BUILT_IN_STATES, TERMINATED, AgentGraph, TransitionRow
from fsm_rollout.agent.handlers import HandlerSpec, handler_spec
from fsm_rollout.agent.limits import COUNTED_LIMITS
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.reasons import IMPLICIT_TRIGGERS, Trigger

WAITING = frozenset({"generate", "call_tools", "interact"})
"""Handlers that wait for something outside; custom ones may."""


class Structure:
    """Reads a graph; tolerates unknown names."""

    def __init__(self, graph: AgentGraph) -> None:
        self.graph = graph
        self.specs: dict[str, HandlerSpec] = {}
        """Declarations of the working states whose handler is known."""
        for state in graph.working_states:
            name = graph.states[state].handler or BUILT_IN_STATES.get(state)
            if name is not None:
                try:
                    self.specs[state] = handler_spec(name)
                except ConfigError:
                    continue

    def is_custom(self, state: str) -> bool:
        """Whether a state's handler is the user's class; it may generate, call tools and wait."""
        return state in self.specs and ":" in self.specs[state].name

    def spends(self, state: str) -> str | None:
        """Return the counted limit that each visit is charged for, if any."""
        spends = self.specs[state].spends if state in self.specs else None
        return spends if spends in COUNTED_LIMITS else None

    def may_raise(self, state: str, trigger: str) -> bool:
        """Whether ``trigger`` can be raised in a working state, by its handler or by the scheduler."""
        if state not in self.specs:
            return True
        if trigger in self.specs[state].triggers:
            return True
        return trigger in IMPLICIT_TRIGGERS and (trigger != Trigger.TRUNCATED or self.is_custom(state))

    def sources(self, row: TransitionRow) -> tuple[str, ...]:
        """Return the working states that a row leaves; ``*`` stands for all of them that may raise its trigger."""
        named = [s for s in row.source if s in self.graph.states and not self.graph.is_final(s)]
        if "*" in row.source:
            named += [s for s in self.graph.working_states if self.may_raise(s, row.trigger)]
        return tuple(dict.fromkeys(named))

    def edges(self, state: str) -> Iterator[TransitionRow]:
        """Yield every row (``on_error`` too) that may fire in a working state and leads somewhere."""
        triggers = dict.fromkeys([row.trigger for row in self.graph.transitions] + ["failed"])
        for trigger in triggers:
            if trigger != Trigger.CANCELLED and self.may_raise(state, trigger):
                for row in self.graph.rows_of(state, trigger):
                    if row.dest in self.graph.states or row.dest == TERMINATED:
                        yield row

    def reachable(self) -> frozenset[str]:
        """Return the states that rows lead to from the initial state, itself included."""
        return _closure(self.graph.initial, self._dests)

    def can_end(self) -> frozenset[str]:
        """Return the states from which rows lead to a final state."""
        comes_from: dict[str, list[str]] = {}
        for state in self.graph.working_states:
            for dest in self._dests(state):
                comes_from.setdefault(dest, []).append(state)
        ends = {s for s in [*self.graph.states, TERMINATED] if self.graph.is_final(s)}
        return frozenset().union(*(_closure(end, lambda s: comes_from.get(s, ())) for end in ends))

    def _dests(self, state: str) -> Iterable[str]:
        if state not in self.graph.states or self.graph.is_final(state):
            return ()
        return dict.fromkeys(row.dest for row in self.edges(state))

    def cycle_within(self, states: Collection[str]) -> tuple[str, ...] | None:
        """Return a shortest cycle through ``states`` alone, its first state repeated at the end, or ``None``.

        ``limit_reached`` rows do not count: each limit is routed once, so they cannot go round for ever.
        """
        onward = {
            state: tuple(
                dict.fromkeys(
                    row.dest for row in self.edges(state) if row.trigger != Trigger.LIMIT_REACHED and row.dest in states
                )
            )
            for state in states
        }
        found = [cycle for state in states if (cycle := _cycle_from(state, onward))]
        return min(found, key=len, default=None)


def _closure(start: str, onward: Callable[[str], Iterable[str]]) -> frozenset[str]:
    seen, queue = {start}, deque([start])
    while queue:
        for dest in onward(queue.popleft()):
            if dest not in seen:
                seen.add(dest)
                queue.append(dest)
    return frozenset(seen)


def _cycle_from(start: str, onward: Mapping[str, Iterable[str]]) -> tuple[str, ...] | None:
    before: dict[str, str] = {}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for dest in onward[state]:
            if dest == start:
                path = [start, state]
                while path[-1] != start:
                    path.append(before[path[-1]])
                return tuple(reversed(path))
            if dest not in before:
                before[dest] = state
                queue.append(dest)
    return None
