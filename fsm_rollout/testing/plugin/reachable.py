"""Which rows can fire at all, whatever engines, tools, users and predicates do.

Invariant: the search follows the contract written down in :mod:`fsm_rollout.agent.proof`, over (state, counts, routed
limits); a row is in the result exactly if some run takes it. It shares nothing with the search for the bound but that
contract, so that each can show the other wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fsm_rollout.agent.graph import AgentGraph, TransitionRow
from fsm_rollout.agent.limits import COUNTED_LIMITS, reachable_while_running
from fsm_rollout.agent.predicates import visits_argument
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.trajectory.reasons import LimitName, Trigger

SITUATIONS = 60_000
"""Situations looked at before the search gives up."""


class _Situation(NamedTuple):
    state: str
    visits: tuple[int, ...]
    spent: tuple[int, ...]
    routed: frozenset[str]


class _Event(NamedTuple):
    """Something raised in a state; ``limit`` is what was reached."""

    trigger: str
    limit: str | None = None

    def key(self, state: str) -> str | None:
        return f"max_visits@{state}" if self.limit == LimitName.MAX_VISITS else self.limit


class _Rules:
    """One agent's, with caps beyond which counts need not be told apart."""

    def __init__(self, graph: AgentGraph) -> None:
        self.graph, self.structure = graph, Structure(graph)
        self.states = graph.working_states
        self.places = {id(row): number for number, row in enumerate(graph.transitions)}
        self.visit_caps = dict.fromkeys(self.states, 0)
        for state in self.states:
            self._cap(state, graph.states[state].max_visits)
            for row in graph.transitions:
                for predicate in (*row.conditions, *row.unless):
                    if predicate.name == "visits_over":
                        named, count = visits_argument(predicate.argument, graph)
                        self._cap(named or state, count)
        self.allowed = {name: getattr(graph.limits, name) for name in COUNTED_LIMITS}

    def _cap(self, state: str, count: int | None) -> None:
        if count is not None and state in self.visit_caps:
            self.visit_caps[state] = max(self.visit_caps[state], count + 1)

    def start(self) -> _Situation:
        nothing = _Situation("", (0,) * len(self.states), (0,) * len(COUNTED_LIMITS), frozenset())
        return self.enter(nothing, self.graph.initial, frozenset())

    def enter(self, before: _Situation, state: str, routed: frozenset[str]) -> _Situation:
        visits = list(before.visits)
        place = self.states.index(state)
        visits[place] = min(visits[place] + 1, self.visit_caps[state])
        spent = list(before.spent)
        limit = self.structure.spends(state)
        if limit is not None and self.allowed[limit] is not None:
            place = COUNTED_LIMITS.index(limit)
            spent[place] = min(spent[place] + 1, self.allowed[limit] + 1)
        return _Situation(state, tuple(visits), tuple(spent), routed)

    def events(self, now: _Situation) -> Iterator[_Event]:
        """Yield what can be raised, as the contract has it."""
        state, limits = now.state, self.graph.limits
        most = self.graph.states[state].max_visits
        if most is not None and now.visits[self.states.index(state)] > most:
            yield _Event(Trigger.LIMIT_REACHED, LimitName.MAX_VISITS)
            return
        limit = self.structure.spends(state)
        allowed = None if limit is None else self.allowed[limit]
        if limit is not None and allowed is not None and not (limit in now.routed and most is not None):
            yield _Event(Trigger.LIMIT_REACHED, limit)
            if limit in now.routed or now.spent[COUNTED_LIMITS.index(limit)] > allowed:
                return
        custom = self.structure.is_custom(state)
        for trigger in (*self.structure.specs[state].triggers, Trigger.FAILED, Trigger.TIMED_OUT):
            yield _Event(trigger)
        if custom:
            yield _Event(Trigger.TRUNCATED)
        for name in reachable_while_running(limits, custom=custom):
            yield _Event(Trigger.LIMIT_REACHED, name)

    def rows(self, now: _Situation, event: _Event) -> Iterator[TransitionRow]:
        """Yield the rows that may take an event."""
        if event.key(now.state) in now.routed:
            return
        for row in self.graph.rows_of(now.state, event.trigger):
            answers = [(self._answer(p.name, p.argument, now, event), True) for p in row.conditions]
            answers += [(self._answer(p.name, p.argument, now, event), False) for p in row.unless]
            if any(answer is not None and answer is not wanted for answer, wanted in answers):
                continue
            yield row
            if all(answer is not None for answer, _ in answers):
                return

    def _answer(self, name: str, argument: object, now: _Situation, event: _Event) -> bool | None:
        """Return what a predicate says; ``None``: it may say either."""
        if name == "limit":
            return event.limit == argument
        if name == "visits_over":
            named, count = visits_argument(argument, self.graph)
            state = named or now.state
            return state in self.states and now.visits[self.states.index(state)] > count
        return None


def reachable_rows(graph: AgentGraph, situations: int = SITUATIONS) -> set[int] | None:
    """Return the rows (by place in ``transitions``) that some run takes; ``None``: too many situations to tell."""
    rules = _Rules(graph)
    found: set[int] = set()
    seen = {rules.start()}
    todo = list(seen)
    while todo:
        now = todo.pop()
        for event in rules.events(now):
            key = event.key(now.state)
            routed = now.routed if key is None else now.routed | {key}
            for row in rules.rows(now, event):
                if id(row) in rules.places:
                    found.add(rules.places[id(row)])
                if not graph.is_final(row.dest):
                    there = rules.enter(now, row.dest, routed)
                    if there not in seen:
                        seen.add(there)
                        todo.append(there)
        if len(found) == len(graph.transitions):
            return found
        if len(seen) > situations:
            return None
    return found
