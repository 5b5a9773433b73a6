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

There are two ways to find the longest run, and neither result is ever too small. The search looks at all situations,
and is exact for this contract; the ranking counts how often each state can be entered at all, and needs no search. A
situation is (state, counts, routed): counts of visits and spendings are kept only where some transition or limit asks
for them, and only as far as it can tell them apart; ``routed`` is a bit set of the limits that transitions have taken.

Agents used as tools are included in every figure but the seconds (they run within their parent's): a call may be any
of them, and each call is counted at the largest bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.limits import LIMITS
from fsm_rollout.agent.predicates import PREDICATES, visits_argument
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.agent.rules.transitions import names
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.enums import LimitName, Trigger, routing_key


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
    callers = custom | {state for state in counts.ran if graph.handler_of(state) == "call_tools"}
    takers = {state for state in custom if structure.spends(state) == LimitName.USER_TURNS}
    routed = {limit for limit, _ in counts.exempt}

    def at_most(limit: LimitName, users: set[str], further: str = "") -> int | None:
        """Return what a limit allows to ``users``, who may spend any number in one visit, and ``further`` handlers."""
        allowed: int | None = getattr(limits, limit)
        if not users:
            return 0
        if allowed is None or any((limit, state) in counts.exempt for state in users):
            return None
        alone = [s for s in counts.ran if graph.handler_of(s) == further and (limit, s) in counts.exempt]
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


Situation = tuple[str, tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Counts:
    """What was found: maxima over all runs, and which handlers can run at all."""

    transitions: int
    generations: int  # visits of `generate` states whose handler runs
    user_turns: int
    ran: frozenset[str]
    # (limit, state): the state's handler can run after the limit was routed, bounded by `max_visits` alone.
    exempt: frozenset[tuple[str, str]]
    exact: bool
    # The places of the transitions that some run takes; `None` where not every situation was looked at.
    rows: frozenset[int] | None = None


class _Way(NamedTuple):
    """A transition as the search sees it."""

    place: int | None
    dest: str | None  # `None`: a final state
    # (slot, number, wanted): whether the count in this slot must be over the number, or must not.
    tests: list[tuple[int, int, bool]]
    free: bool  # whether it may also not fire although all its tests hold


class _Raised(NamedTuple):
    """Something that may be raised: the ways it can go, and the bit of the limit that they route (0: none)."""

    ways: list[_Way]
    routes: int = 0


class _Search:
    """The graph, prepared for the search, and what the search has seen of it."""

    def __init__(self, structure: Structure) -> None:
        self.structure, self.graph = structure, structure.graph
        reachable = structure.reachable()
        self.states = [state for state in structure.handlers if state in reachable]
        if self.graph.initial not in self.states or any(names(structure)):
            raise ConfigError(f"agent '{self.graph.agent}' does not pass verification; there is nothing to prove")
        # 1. What is counted, and how far: visits by the state's name, spendings by the limit's.
        caps: dict[str, int] = {}
        for state in self.states:
            for key, most in self._counted(state):
                caps[key] = max(caps.get(key, 0), most + 1)
        self.slots = {key: slot for slot, key in enumerate(caps)}
        self.caps = [*caps.values()]
        # 2. What each state may come to; a limit that a transition may route has a bit.
        self.bits: dict[str, int] = {}
        self.limit: dict[str, str | None] = {}  # the limit that each state spends, where it is set
        self.charged: dict[str, list[int]] = {}  # the slots that count one more when a state is entered
        self.raises: dict[str, list[_Raised]] = {}
        # What is raised in a state instead of running its handler, by state and limit.
        self.reached: dict[tuple[str, str], _Raised] = {}
        for state in self.states:
            limit = structure.spends(state)
            self.limit[state] = limit if limit and _spent(limit) in self.slots else None
            self.charged[state] = [self.slots[key] for key in (state, _spent(limit)) if key in self.slots]
            outcomes = [self._raised(state, *outcome) for outcome in structure.outcomes(state)]
            self.raises[state] = [raised for raised in outcomes if raised.ways]
            for name in (self.limit[state], self.graph.states[state].max_visits and LimitName.MAX_VISITS):
                if name:
                    self.reached[state, name] = self._raised(state, Trigger.LIMIT_REACHED, name)
        # 3. What is seen on the way.
        self.rows: set[int] = set()
        self.ran: set[str] = set()
        self.exempt: set[tuple[str, str]] = set()

    def _counted(self, state: str) -> Iterator[tuple[str, int]]:
        """Yield what visits of a state, and the transitions that leave it, ask to be counted, and how far."""
        max_visits, limit = self.graph.states[state].max_visits, self.structure.spends(state)
        if max_visits is not None:
            yield state, max_visits
        if limit is not None and (allowed := getattr(self.graph.limits, limit)) is not None:
            yield _spent(limit), allowed
        for _, row in self.structure.edges[state]:
            for predicate, _ in row.tests:
                if predicate.name == "visits_over":
                    state_named, number = visits_argument(predicate.argument, self.graph)
                    if (state_named or state) in self.states:
                        yield state_named or state, number

    def _raised(self, state: str, trigger: str, limit: str | None = None) -> _Raised:
        ways = []
        for place, row in self.graph.rows_of(state, trigger):
            tests, free, possible = [], False, True
            for predicate, answer in row.tests:
                if predicate.name not in PREDICATES or not PREDICATES[predicate.name].counter:
                    free = True
                elif predicate.name == "limit":
                    possible &= (predicate.argument == limit) is answer
                else:
                    state_named, number = visits_argument(predicate.argument, self.graph)
                    if (state_named or state) in self.slots:
                        tests.append((self.slots[state_named or state], number, answer))
                    else:  # a state that is never entered
                        possible &= not answer
            if possible:
                ways.append(_Way(place, None if self.graph.is_final(row.dest) else row.dest, tests, free))
                if not free and not tests:
                    break
        if limit is None or not ways:
            return _Raised(ways)
        return _Raised(ways, self.bits.setdefault(routing_key(limit, state), 1 << len(self.bits)))

    def enter(self, state: str, counts: tuple[int, ...], routed: int) -> Situation:
        """Charge the entry of a working state."""
        new_counts = list(counts)
        for slot in self.charged[state]:
            if new_counts[slot] < self.caps[slot]:
                new_counts[slot] += 1
        return state, tuple(new_counts), routed

    def onward(self, situation: Situation) -> tuple[dict[Situation, bool], bool]:
        """Return each next situation with whether the handler may have run before it, and whether it may run at all."""
        state, counts, routed = situation
        max_visits, limit = self.graph.states[state].max_visits, self.limit[state]
        next_situations: dict[Situation, bool] = {}
        if max_visits is not None and counts[self.slots[state]] > max_visits:
            self._follow(self.reached[state, LimitName.MAX_VISITS], situation, False, next_situations)
            return next_situations, False
        was_routed = limit is not None and routed & self.bits.get(limit, 0)
        if limit is not None and not (was_routed and max_visits is not None):
            if was_routed:
                return next_situations, False  # still reached, so the run ends
            self._follow(self.reached[state, limit], situation, False, next_situations)
            if counts[self.slots[_spent(limit)]] > getattr(self.graph.limits, limit):
                return next_situations, False
        self.ran.add(state)
        if routed and max_visits is not None:
            self.exempt.update((limit, state) for limit, bit in self.bits.items() if routed & bit)
        for raised in self.raises[state]:  # last, so that what follows a handler that runs is noted as such
            self._follow(raised, situation, True, next_situations)
        return next_situations, True

    def _follow(self, raised: _Raised, situation: Situation, ran: bool, next_situations: dict[Situation, bool]) -> None:
        _, counts, routed = situation
        if raised.routes & routed:
            return  # each limit once: the run ends
        for way in raised.ways:
            if all((counts[slot] > number) is wanted for slot, number, wanted in way.tests):
                if way.place is not None:
                    self.rows.add(way.place)
                if way.dest is not None:
                    next_situations[self.enter(way.dest, counts, routed | raised.routes)] = ran
                if not way.free:
                    return


def _spent(limit: str | None) -> str:
    return f"spent {limit}"  # no state has such a name


def search(structure: Structure, budget: int) -> Counts | None:
    """Return the exact maxima over all runs, or ``None`` when there are more than ``budget`` situations.

    Raises:
        ConfigError: a run can come back to the very same situation, so it may never end.
    """
    prepared = _Search(structure)
    start = prepared.enter(structure.graph.initial, (0,) * len(prepared.caps), 0)
    # The situations on the way to the present one, and what may come right after each.
    onward: dict[Situation, tuple[dict[Situation, bool], bool]] = {}
    best: dict[Situation, tuple[int, int, int]] = {}
    stack = [start]
    while stack:
        situation = stack[-1]
        # 1. What may come right after it, which has to be known first.
        if situation not in onward and situation not in best:
            if len(onward) + len(best) >= budget:
                return None
            next_situations, runs = onward[situation] = prepared.onward(situation)
            for following in next_situations:
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
        next_situations, runs = onward.pop(situation)
        handler = structure.graph.handler_of(situation[0])
        generates, interacts = int(runs and handler == "generate"), int(runs and handler == "interact")
        transitions, generations, turns = 1, generates, interacts
        for following, handler_ran in next_situations.items():
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
        max_visits, limit = graph.states[state].max_visits, prepared.limit[state]
        if max_visits is not None:
            bounded[state] = max_visits + 2
        elif limit is not None:
            bounded[_spent(limit)] = getattr(graph.limits, limit) + 2
        else:
            free.append(state)
    # 2. The longest path through those.
    if cycle := structure.cycle_within(free):
        raise _endless(structure, cycle)
    onward = structure.onward_within(free)
    longest: dict[str, int] = {}
    for state in TopologicalSorter(onward).static_order():
        longest[state] = 1 + max((longest[dest] for dest in onward[state]), default=0)
    entries = sum(bounded.values())
    transitions = entries + (entries + len(prepared.bits) + 1) * max(longest.values(), default=0)

    def visits(handler: str, limit: str) -> int:
        """Return how often a kind of handler can run: what its limit allows, and each ``max_visits`` there is."""
        those = [graph.states[s].max_visits for s in prepared.states if graph.handler_of(s) == handler]
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
