"""Two ways to find the longest run: a search over all situations, and a ranking that needs no search.

Invariant: neither result is ever too small. The search is exact for the contract written down in
:mod:`fsm_rollout.agent.proof`; the ranking counts how often each state can be entered at all.

A situation is (state, counts, routed): counts of visits and spendings are kept only where some row or limit asks for
them, and only as far as it can tell them apart; ``routed`` is a bit set of the limits that rows have taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import NamedTuple

from fsm_rollout.agent.limits import LIMITS, reachable_while_running
from fsm_rollout.agent.predicates import PREDICATES, visits_argument
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.reasons import LimitName, Trigger
from fsm_rollout.trajectory.trajectory import routing_key

Situation = tuple[str, tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Counts:
    """What was found: maxima over all runs, and which handlers can run at all."""

    transitions: int
    generations: int
    """Visits of ``generate`` states whose handler runs."""
    user_turns: int
    ran: frozenset[str]
    exempt: frozenset[tuple[str, str]]
    """(limit, state): the state's handler can run after the limit was routed, bounded by ``max_visits`` alone."""
    exact: bool
    rows: frozenset[int] | None = None
    """The places of the rows that some run takes; ``None`` where not every situation was looked at."""


class _Way(NamedTuple):
    """A row as the search sees it."""

    place: int | None
    dest: str | None
    """``None``: a final state."""
    tests: list[tuple[int, int, bool]]
    """(slot, number, wanted): whether the count in this slot must be over the number, or must not."""
    free: bool
    """Whether it may also not fire although all its tests hold."""


class _Raised(NamedTuple):
    """Something that may be raised: the ways it can go, and the bit of the limit that they route (0: none)."""

    ways: list[_Way]
    routes: int = 0


class _Search:
    """The graph, prepared for the search, and what the search has seen of it."""

    def __init__(self, structure: Structure) -> None:
        self.structure, self.graph = structure, structure.graph
        reachable = structure.reachable()
        self.states = [state for state in structure.specs if state in reachable]
        self.visits: dict[str, int] = {}
        """Slots in which visits are counted, by state."""
        self.spent: dict[str, int] = {}
        """Slots in which spendings are counted, by limit."""
        self.caps: list[int] = []
        """How far each slot counts."""
        self.bits: dict[str, int] = {}
        """The bit of each limit that a row may route."""
        self._check_known(self.graph.initial)
        self._find_slots()
        self.bounds: dict[str, tuple[int | None, str | None]] = {}
        """By state, its ``max_visits`` and the limit that it spends, where that is set."""
        self.charged: dict[str, list[int]] = {}
        """The slots that count one more when a state is entered."""
        self.at_max_visits: dict[str, _Raised] = {}
        self.at_limit: dict[str, _Raised] = {}
        self.raises: dict[str, list[_Raised]] = {}
        for state in self.states:
            max_visits, limit = self.graph.states[state].max_visits, structure.spends(state)
            self.bounds[state] = max_visits, limit if limit in self.spent else None
            self.charged[state] = [self.visits[state]] if state in self.visits else []
            self.raises[state] = self._raises(state)
            if limit in self.spent:
                self.charged[state].append(self.spent[limit])
                self.at_limit[state] = self._raised(state, Trigger.LIMIT_REACHED, limit)
            if max_visits is not None:
                self.at_max_visits[state] = self._raised(state, Trigger.LIMIT_REACHED, LimitName.MAX_VISITS)
        self.rows: set[int] = set()
        self.ran: set[str] = set()
        self.exempt: set[tuple[str, str]] = set()

    def _check_known(self, state: str) -> None:
        if state not in self.states and not (self.graph.is_final(state) and state != self.graph.initial):
            raise ConfigError(f"agent '{self.graph.agent}' does not pass verification; there is nothing to prove")

    def _find_slots(self) -> None:
        """Make room for all counts that visits of states, or rows that leave them, ask for."""

        def count_to(slots: dict[str, int], key: str, most: int) -> None:
            if key not in slots:
                slots[key] = len(self.caps)
                self.caps.append(0)
            self.caps[slots[key]] = max(self.caps[slots[key]], most + 1)

        for state in self.states:
            max_visits, limit = self.graph.states[state].max_visits, self.structure.spends(state)
            if max_visits is not None:
                count_to(self.visits, state, max_visits)
            if limit is not None and (allowed := getattr(self.graph.limits, limit)) is not None:
                count_to(self.spent, limit, allowed)
            for _, row in self.structure.edges[state]:
                for predicate, _ in row.tests:
                    if predicate.name == "visits_over":
                        named, number = visits_argument(predicate.argument, self.graph)
                        if (named or state) in self.states:
                            count_to(self.visits, named or state, number)

    def _raises(self, state: str) -> list[_Raised]:
        """Return what a handler that runs may come to, as far as a row takes it."""
        custom = self.structure.is_custom(state)
        triggers = (*self.structure.specs[state].triggers, Trigger.FAILED, Trigger.TIMED_OUT)
        raised = [self._raised(state, t) for t in dict.fromkeys((*triggers, *([Trigger.TRUNCATED] if custom else [])))]
        limits = reachable_while_running(self.graph.limits, custom=custom)
        raised += [self._raised(state, Trigger.LIMIT_REACHED, limit) for limit in limits]
        return [each for each in raised if each.ways]

    def _raised(self, state: str, trigger: str, limit: str | None = None) -> _Raised:
        ways = []
        for place, row in self.graph.rows_of(state, trigger):
            self._check_known(row.dest)
            tests, free, possible = [], False, True
            for predicate, wanted in row.tests:
                if predicate.name not in PREDICATES or not PREDICATES[predicate.name].counter:
                    free = True
                elif predicate.name == "limit":
                    possible &= (predicate.argument == limit) is wanted
                else:
                    named, number = visits_argument(predicate.argument, self.graph)
                    if (named or state) in self.visits:
                        tests.append((self.visits[named or state], number, wanted))
                    else:  # a state that is never entered
                        possible &= not wanted
            if possible:
                ways.append(_Way(place, None if self.graph.is_final(row.dest) else row.dest, tests, free))
                if not free and not tests:
                    break
        if limit is None or not ways:
            return _Raised(ways)
        return _Raised(ways, self.bits.setdefault(routing_key(limit, state), 1 << len(self.bits)))

    def enter(self, state: str, counts: tuple[int, ...], routed: int) -> Situation:
        """Charge the entry of a working state."""
        after = list(counts)
        for slot in self.charged[state]:
            if after[slot] < self.caps[slot]:
                after[slot] += 1
        return state, tuple(after), routed

    def onward(self, situation: Situation) -> tuple[dict[Situation, bool], bool]:
        """Return each next situation with whether the handler may have run before it, and whether it may run at all."""
        state, counts, routed = situation
        max_visits, limit = self.bounds[state]
        after: dict[Situation, bool] = {}
        if max_visits is not None and counts[self.visits[state]] > max_visits:
            self._follow(self.at_max_visits[state], situation, False, after)
            return after, False
        was_routed = limit is not None and routed & self.bits.get(limit, 0)
        if limit is not None and not (was_routed and max_visits is not None):
            if was_routed:
                return after, False  # still reached, so the run ends
            self._follow(self.at_limit[state], situation, False, after)
            if counts[self.spent[limit]] > getattr(self.graph.limits, limit):
                return after, False
        self.ran.add(state)
        if routed and max_visits is not None:
            self.exempt.update((limit, state) for limit, bit in self.bits.items() if routed & bit)
        for raised in self.raises[state]:  # last, so that what follows a handler that runs is noted as such
            self._follow(raised, situation, True, after)
        return after, True

    def _follow(self, raised: _Raised, situation: Situation, ran: bool, after: dict[Situation, bool]) -> None:
        _, counts, routed = situation
        if raised.routes & routed:
            return  # each limit once: the run ends
        for way in raised.ways:
            if all((counts[slot] > number) is wanted for slot, number, wanted in way.tests):
                if way.place is not None:
                    self.rows.add(way.place)
                if way.dest is not None:
                    after[self.enter(way.dest, counts, routed | raised.routes)] = ran
                if not way.free:
                    return


def search(structure: Structure, budget: int) -> Counts | None:
    """Return the exact maxima over all runs, or ``None`` when there are more than ``budget`` situations.

    Raises:
        ConfigError: a run can come back to the very same situation, so it may never end.
    """
    prepared = _Search(structure)
    start = prepared.enter(structure.graph.initial, (0,) * len(prepared.caps), 0)
    onward: dict[Situation, tuple[dict[Situation, bool], bool]] = {}
    """The situations on the way to the present one, and what may come right after each."""
    best: dict[Situation, tuple[int, int, int]] = {}
    stack = [start]
    while stack:
        situation = stack[-1]
        # 1. What may come right after it, which has to be known first.
        if situation not in onward and situation not in best:
            if len(onward) + len(best) >= budget:
                return None
            after, runs = onward[situation] = prepared.onward(situation)
            for following in after:
                if following in onward:
                    cycle = [state for state, *_ in [*onward][[*onward].index(following) :]]
                    raise _endless(structure, [*cycle, cycle[0]])
                if following not in best:
                    stack.append(following)
            continue
        # 2. The longest run from it.
        stack.pop()
        if situation in best:
            continue
        after, runs = onward.pop(situation)
        handler = structure.specs[situation[0]].name
        generates, interacts = int(runs and handler == "generate"), int(runs and handler == "interact")
        transitions, generations, turns = 1, generates, interacts
        for following, handler_ran in after.items():
            further = best[following]
            transitions = max(transitions, 1 + further[0])
            generations = max(generations, generates * handler_ran + further[1])
            turns = max(turns, interacts * handler_ran + further[2])
        best[situation] = (transitions, generations, turns)
    ran, exempt = frozenset(prepared.ran), frozenset(prepared.exempt)
    return Counts(*best[start], ran, exempt, exact=True, rows=frozenset(prepared.rows))


def _endless(structure: Structure, cycle: list[str] | tuple[str, ...]) -> ConfigError:
    return ConfigError(f"agent '{structure.graph.agent}' may run for ever: {' -> '.join(cycle)}")


def ranking(structure: Structure) -> Counts:
    """Return an upper bound by counting entries: what limits and ``max_visits`` allow, and the free paths between.

    A state with ``max_visits`` m is entered at most m + 2 times (two more: its limit reached and routed, reached again
    and ended). The other states that spend a limit N are entered at most N + 2 times together. Between two such
    entries, or a routed limit, a run can only follow a path of the other, free states, in which there is no cycle.
    """
    graph = structure.graph
    prepared = _Search(structure)
    # 1. Entries that something counts, and the states that nothing counts.
    bounded: dict[str, int] = {}
    free = []
    for state in prepared.states:
        max_visits, limit = graph.states[state].max_visits, structure.spends(state)
        if max_visits is not None:
            bounded[state] = max_visits + 2
        elif limit in prepared.spent:
            bounded[limit] = getattr(graph.limits, limit) + 2
        else:
            free.append(state)
    # 2. The longest path through those.
    if cycle := structure.cycle_within(free):
        raise _endless(structure, cycle)
    onward = {
        state: [r.dest for _, r in structure.edges[state] if r.dest in free and r.trigger != Trigger.LIMIT_REACHED]
        for state in free
    }
    longest: dict[str, int] = {}
    for state in TopologicalSorter(onward).static_order():
        longest[state] = 1 + max((longest[dest] for dest in onward[state]), default=0)
    entries = sum(bounded.values())
    transitions = entries + (entries + len(prepared.bits) + 1) * max(longest.values(), default=0)

    def visits(handler: str, limit: str) -> int:
        """Return how often a kind of handler can run: what its limit allows, and each ``max_visits`` there is."""
        those = [graph.states[s].max_visits for s in prepared.states if structure.specs[s].name == handler]
        allowed: int | None = getattr(graph.limits, limit)
        shared = 0 if None not in those else transitions if allowed is None else allowed
        return min(transitions, shared + sum(most for most in those if most is not None))

    routable = LIMITS.keys() & prepared.bits.keys()
    return Counts(
        transitions,
        visits("generate", LimitName.ASSISTANT_TURNS),
        visits("interact", LimitName.USER_TURNS),
        frozenset(prepared.states),
        frozenset((limit, s) for s in prepared.states if graph.states[s].max_visits is not None for limit in routable),
        exact=False,
    )
