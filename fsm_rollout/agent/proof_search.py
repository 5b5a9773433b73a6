"""Two ways to find the longest run: a search over all situations, and a ranking that needs no search.

Invariant: neither result is ever too small. The search is exact for the contract written down in
:mod:`fsm_rollout.agent.proof`; the ranking counts how often each state can be entered at all.

A situation is (state, counts, routed): counts of visits and spendings are kept only where some row or limit asks for
them, and only as far as it can tell them apart; ``routed`` is a bit set of the limits that rows have taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fsm_rollout.agent.graph import Predicate, TransitionRow
from fsm_rollout.agent.limits import LIMITS, reachable_while_running
from fsm_rollout.agent.predicates import PREDICATES, visits_argument
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.reasons import LimitName, Trigger
from fsm_rollout.trajectory.trajectory import routing_key


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


Situation = tuple[int, tuple[int, ...], int]


@dataclass(slots=True)
class _Test:
    """A ``visits_over`` that a row asks about: slot of the count, the number, and the answer it wants."""

    slot: int
    over: int
    wanted: bool


@dataclass(slots=True)
class _Way:
    """A row as the search sees it; ``dest`` is an index, or -1 for a final state."""

    dest: int
    row: int
    """The row's place in ``transitions``."""
    tests: tuple[_Test, ...]
    free: bool
    """Whether it may also not fire although all its tests hold."""


@dataclass(slots=True)
class _Raise:
    """Something that may be raised: the ways it can go, and the bit of its limit (0 for none)."""

    ways: list[_Way]
    bit: int = 0


@dataclass(slots=True)
class _Node:
    """A working state as the search sees it."""

    name: str
    handler: str
    max_visits: int | None
    visits: int = -1
    """Slot of its visits, -1 when nothing asks for them."""
    spent: int = -1
    """Slot of what its handler spends, -1 when that is not limited."""
    allowed: int = 0
    routed_bit: int = 0
    """Bit that is set once that limit has been routed, here or elsewhere."""
    over_visits: _Raise = field(default_factory=lambda: _Raise([]))
    over_limit: _Raise = field(default_factory=lambda: _Raise([]))
    raises: list[_Raise] = field(default_factory=list)


class _Search:
    """The compiled graph and the memory of the search."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.graph = structure.graph
        reachable = structure.reachable()
        self.states = [s for s in structure.specs if s in reachable]
        self.index = {state: i for i, state in enumerate(self.states)}
        self.caps: list[int] = []
        self.slots: dict[str, int] = {}
        self.bits: dict[str, int] = {}
        self.places = {id(row): place for place, row in enumerate(self.graph.transitions)}
        self._count_visits()
        self._count_spending()
        self.nodes = [self._node(state) for state in self.states]
        for node in self.nodes:  # now that all bits are given out
            node.routed_bit = self.bits.get(str(structure.spends(node.name)), 0)
        self.rows: set[int] = set()
        self.ran: set[str] = set()
        self.exempt: set[tuple[str, str]] = set()

    def _slot(self, key: str, cap: int) -> None:
        if key in self.slots:
            self.caps[self.slots[key]] = max(self.caps[self.slots[key]], cap)
        else:
            self.slots[key] = len(self.caps)
            self.caps.append(cap)

    def _count_visits(self) -> None:
        for state in self.states:
            max_visits = self.graph.states[state].max_visits
            if max_visits is not None:
                self._slot(f"visits:{state}", max_visits + 1)
            for row in self.structure.edges(state):
                for predicate in (*row.conditions, *row.unless):
                    if predicate.name == "visits_over":
                        named, count = visits_argument(predicate.argument, self.graph)
                        if (named or state) in self.index:
                            self._slot(f"visits:{named or state}", count + 1)

    def _count_spending(self) -> None:
        for state in self.states:
            limit = self.structure.spends(state)
            allowed = getattr(self.graph.limits, limit) if limit else None
            if allowed is not None:
                self._slot(f"spent:{limit}", allowed + 1)

    def _node(self, state: str) -> _Node:
        graph, structure = self.graph, self.structure
        spec, limits = structure.specs[state], graph.limits
        node = _Node(state, spec.name, graph.states[state].max_visits, self.slots.get(f"visits:{state}", -1))
        limit = structure.spends(state)
        if limit is not None and getattr(limits, limit) is not None:
            node.spent, node.allowed = self.slots[f"spent:{limit}"], getattr(limits, limit)
            node.over_limit = self._raise(state, Trigger.LIMIT_REACHED, limit)
        if node.max_visits is not None:
            node.over_visits = self._raise(state, Trigger.LIMIT_REACHED, LimitName.MAX_VISITS)
        custom = structure.is_custom(state)
        for trigger in dict.fromkeys(
            (*spec.triggers, Trigger.FAILED, Trigger.TIMED_OUT, *((Trigger.TRUNCATED,) if custom else ()))
        ):
            node.raises.append(self._raise(state, trigger, None))
        reachable = reachable_while_running(limits, custom=custom)
        node.raises += [self._raise(state, Trigger.LIMIT_REACHED, name) for name in reachable]
        node.raises = [raised for raised in node.raises if raised.ways]
        return node

    def _raise(self, state: str, trigger: str, limit: str | None) -> _Raise:
        ways = []
        for row in self.graph.rows_of(state, trigger):
            way = self._way(state, row, limit)
            if way is not None:
                ways.append(way)
                if not way.free and not way.tests:
                    break
        if limit is None or not ways:
            return _Raise(ways)
        return _Raise(ways, self.bits.setdefault(routing_key(limit, state), 1 << len(self.bits)))

    def _way(self, state: str, row: TransitionRow, limit: str | None) -> _Way | None:
        """Return the row as seen from ``state``, or ``None`` when it cannot fire for this limit."""
        tests, free = [], False
        asked: list[tuple[Predicate, bool]] = [(p, True) for p in row.conditions]
        asked += [(p, False) for p in row.unless]
        for predicate, wanted in asked:
            spec = PREDICATES.get(predicate.name)
            if spec is None or not spec.counter:
                free = True
            elif predicate.name == "limit":
                if (predicate.argument == limit) is not wanted:
                    return None
            else:
                named, count = visits_argument(predicate.argument, self.graph)
                slot = self.slots.get(f"visits:{named or state}")
                if slot is not None:
                    tests.append(_Test(slot, count, wanted))
                elif wanted:  # a state that is never entered
                    return None
        dest = -1 if self.graph.is_final(row.dest) else self.index[row.dest]
        return _Way(dest, self.places[id(row)], tuple(tests), free)

    def enter(self, index: int, counts: tuple[int, ...], routed: int) -> Situation:
        """Charge the entry of a working state."""
        node = self.nodes[index]
        after = list(counts)
        for slot in (node.visits, node.spent):
            if slot >= 0 and after[slot] < self.caps[slot]:
                after[slot] += 1
        return index, tuple(after), routed

    def onward(self, situation: Situation) -> tuple[dict[Situation, bool], bool]:
        """Return each next situation with whether the handler may have run before it, and whether it may run at all."""
        index, counts, routed = situation
        node = self.nodes[index]
        after: dict[Situation, bool] = {}
        if node.max_visits is not None and counts[node.visits] > node.max_visits:
            self._follow(node.over_visits, situation, False, after)
            return after, False
        was_routed = bool(routed & node.routed_bit)
        if node.spent >= 0 and not (was_routed and node.max_visits is not None):
            if was_routed:
                return after, False  # still reached, so the run ends
            self._follow(node.over_limit, situation, False, after)
            if counts[node.spent] > node.allowed:
                return after, False
        self.ran.add(node.name)
        if routed and node.max_visits is not None:
            self.exempt.update((limit, node.name) for limit, bit in self.bits.items() if routed & bit)
        for raised in node.raises:
            self._follow(raised, situation, True, after)
        return after, True

    def _follow(self, raised: _Raise, situation: Situation, ran: bool, after: dict[Situation, bool]) -> None:
        _, counts, routed = situation
        if routed & raised.bit:
            return  # each limit once: the run ends
        for way in raised.ways:
            if all((counts[test.slot] > test.over) is test.wanted for test in way.tests):
                self.rows.add(way.row)
                if way.dest >= 0:
                    following = self.enter(way.dest, counts, routed | raised.bit)
                    after[following] = ran  # the ways of a handler that runs are followed last
                if not way.free:
                    return


def search(structure: Structure, budget: int) -> Counts | None:
    """Return the exact maxima over all runs, or ``None`` when there are more than ``budget`` situations.

    Raises:
        ConfigError: a run can come back to the very same situation, so it may never end.
    """
    compiled = _Search(structure)
    if structure.graph.initial not in compiled.index:
        raise ConfigError(f"agent '{structure.graph.agent}' does not pass verification; there is nothing to prove")
    start = compiled.enter(compiled.index[structure.graph.initial], (0,) * len(compiled.caps), 0)
    best: dict[Situation, tuple[int, int, int] | None] = {}  # None while it is being looked at
    stack: list[tuple[Situation, dict[Situation, bool], bool, Iterator[Situation]]] = []

    def look_at(situation: Situation) -> None:
        best[situation] = None
        after, runs = compiled.onward(situation)
        stack.append((situation, after, runs, iter(after)))

    look_at(start)
    while stack:
        situation, after, runs, todo = stack[-1]
        for following in todo:
            if following not in best:
                if len(best) >= budget:
                    return None
                look_at(following)
                break
            if best[following] is None:
                around = [compiled.states[s[0]] for s, *_ in stack[[s for s, *_ in stack].index(following) :]]
                raise ConfigError(
                    f"agent '{structure.graph.agent}' may run for ever: {' -> '.join([*around, around[0]])}"
                )
        else:
            stack.pop()
            handler = compiled.nodes[situation[0]].handler
            own = (int(runs and handler == "generate"), int(runs and handler == "interact"))
            transitions, generations, turns = 1, *own
            for following, ran in after.items():
                further = best[following]
                assert further is not None
                transitions = max(transitions, 1 + further[0])
                generations = max(generations, own[0] * ran + further[1])
                turns = max(turns, own[1] * ran + further[2])
            best[situation] = (transitions, generations, turns)
    found = best[start]
    assert found is not None
    return Counts(*found, frozenset(compiled.ran), frozenset(compiled.exempt), True, frozenset(compiled.rows))


def ranking(structure: Structure) -> Counts:
    """Return an upper bound by counting entries: what limits and ``max_visits`` allow, and the free paths between.

    A state with ``max_visits`` m is entered at most m + 2 times (two more: its limit reached and routed, reached again
    and ended). The other states that spend a limit N are entered at most N + 2 times together. Between two such
    entries, or a routed limit, a run can only follow a path of the other, free states, in which there is no cycle.
    """
    graph = structure.graph
    compiled = _Search(structure)
    bounded: dict[str, int] = {}
    free = []
    for state in compiled.states:
        max_visits, limit = graph.states[state].max_visits, structure.spends(state)
        if max_visits is not None:
            bounded[state] = max_visits + 2
        elif limit is None or getattr(graph.limits, limit) is None:
            free.append(state)
        else:
            bounded[limit] = getattr(graph.limits, limit) + 2
    entries = sum(bounded.values())
    longest = _longest_path(structure, free)
    transitions = entries + (entries + len(compiled.bits) + 1) * longest
    routable = LIMITS.keys() & compiled.bits.keys()
    exempt = {(limit, s) for s in compiled.states if graph.states[s].max_visits is not None for limit in routable}
    return Counts(
        transitions,
        min(transitions, _visits_of(structure, compiled.states, "generate", "assistant_turns", transitions)),
        min(transitions, _visits_of(structure, compiled.states, "interact", "user_turns", transitions)),
        frozenset(compiled.states),
        frozenset(exempt),
        exact=False,
    )


def _visits_of(structure: Structure, states: list[str], handler: str, limit: str, otherwise: int) -> int:
    """Return how often one kind of handler can run.

    That is what its limit allows (``otherwise`` where it is not set), and each ``max_visits`` where there is one.
    """
    those = [structure.graph.states[s].max_visits for s in states if structure.specs[s].name == handler]
    allowed: int | None = getattr(structure.graph.limits, limit)
    shared = 0 if None not in those else otherwise if allowed is None else allowed
    return shared + sum(visits for visits in those if visits is not None)


def _longest_path(structure: Structure, free: list[str]) -> int:
    """Return the number of states on the longest path through free states."""
    cycle = structure.cycle_within(free)
    if cycle:
        raise ConfigError(f"agent '{structure.graph.agent}' may run for ever: {' -> '.join(cycle)}")
    longest: dict[str, int] = dict.fromkeys(free, 1)
    for _ in free:
        for state in free:
            for row in structure.edges(state):
                if row.dest in longest and row.trigger != Trigger.LIMIT_REACHED:
                    longest[state] = max(longest[state], 1 + longest[row.dest])
    return max(longest.values(), default=0)
