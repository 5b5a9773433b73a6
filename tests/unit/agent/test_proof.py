"""The bound against two oracles that know only the semantics: a brute-force enumeration and a random walk."""

import random
from collections import Counter
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.agent import loader
from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.proof import Bound, prove
from fsm_rollout.errors import ConfigError
from tests.cases import table
from tests.graphs import graphs
from tests.kit import ROOT

TRIGGERS = {
    "prompt": ["prompted"],
    "generate": ["generated", "truncated"],
    "call_tools": ["tools_done"],
    "interact": ["replied", "interaction_done"],
    "write": ["written"],
}
SPENDS = {"generate": "assistant_turns", "call_tools": "tool_calls", "interact": "user_turns"}
BUILT_IN = {"PENDING": "prompt", "GENERATING": "generate", "PROCESSING_TOOLS": "call_tools", "INTERACTING": "interact"}
ANY_TIME = ("response_tokens", "wall_seconds", "bad_calls")

Event = tuple[str, str | None]


class Rules:
    """The semantics, read off the graph without any of the package's analyses."""

    def __init__(self, graph: AgentGraph) -> None:
        self.graph = graph
        self.handler = {n: s.handler or BUILT_IN.get(n, "") for n, s in graph.states.items()}
        self.final = {n for n, s in graph.states.items() if s.final} | {"TERMINATED"}

    def reached(
        self, state: str, visits: dict[str, int], spent: dict[str, int], routed: frozenset[str], limits: Any
    ) -> str | None:
        """Return the limit that keeps the handler from running."""
        own = self.graph.states[state].max_visits
        if own is not None and visits[state] > own:
            return "max_visits"
        name = SPENDS.get(self.handler[state])
        if name is None or limits[name] is None or (name in routed and own is not None):
            return None
        return name if spent.get(name, 0) > limits[name] else None

    def outcomes(self, state: str) -> list[Event]:
        """Return what a handler that runs may come to."""
        events: list[Event] = [(t, None) for t in [*TRIGGERS[self.handler[state]], "failed", "timed_out", "cancelled"]]
        events += [("limit_reached", n) for n in ANY_TIME if getattr(self.graph.limits, n) is not None]
        return [*events, ("limit_reached", "context_tokens")]

    def key(self, event: Event, state: str) -> str | None:
        return f"max_visits@{state}" if event[1] == "max_visits" else event[1]

    def ways(self, state: str, event: Event, visits: dict[str, int], routed: frozenset[str]) -> list[str]:
        """Return every state that the event may lead to."""
        if event[0] == "cancelled" or self.key(event, state) in routed:
            return ["TERMINATED"]
        found = []
        for row in self.graph.transitions:
            if row.trigger != event[0] or not {state, "*"} & set(row.source):
                continue
            answers = [self.answers(p, state, event, visits) for p in row.conditions]
            answers += [[not a for a in self.answers(p, state, event, visits)] for p in row.unless]
            if all(True in a for a in answers):
                found.append(row.dest)
                if not any(False in a for a in answers):
                    return found
        on_error = self.graph.states[state].on_error
        return [*found, on_error if on_error and event[0] == "failed" else "TERMINATED"]

    def answers(self, predicate: Any, state: str, event: Event, visits: dict[str, int]) -> list[bool]:
        if predicate.name == "limit":
            return [event[1] == predicate.argument]
        if predicate.name == "visits_over":
            argument = predicate.argument
            ((name, count),) = argument.items() if isinstance(argument, dict) else [(state, argument)]
            return [visits.get(name, 0) > count]
        return [True, False]


def enumerate_runs(graph: AgentGraph) -> tuple[int, int, int]:
    """Return the most transitions, generations and user turns over all runs, under all lowered limits."""
    rules = Rules(graph)
    counted = sorted(set(SPENDS.values()))
    ranges = [range(n + 1) if (n := getattr(graph.limits, name)) is not None else [None] for name in counted]
    most = (0, 0, 0)
    for values in product(*ranges):
        limits = dict(zip(counted, values, strict=True))

        @cache
        def visit(
            state: str, seen: frozenset[Any], paid: frozenset[Any], routed: frozenset[str]
        ) -> tuple[int, int, int]:
            visits, spent = dict(seen), dict(paid)
            limit = rules.reached(state, visits, spent, routed, limits)  # noqa: B023
            runs = limit is None
            events: list[Event] = rules.outcomes(state) if runs else [("limit_reached", limit)]
            own = (runs and rules.handler[state] == "generate", runs and rules.handler[state] == "interact")
            best = (1, int(own[0]), int(own[1]))
            for event in events:
                now_routed = routed | {rules.key(event, state)} if event[0] == "limit_reached" else routed
                for dest in rules.ways(state, event, visits, routed):
                    if dest not in rules.final:
                        rest = visit(dest, *enter(dest, visits, spent), now_routed)
                        best = (
                            max(best[0], 1 + rest[0]),
                            max(best[1], own[0] + rest[1]),
                            max(best[2], own[1] + rest[2]),
                        )
            return best

        def enter(state: str, visits: dict[str, int], spent: dict[str, int]) -> tuple[frozenset[Any], frozenset[Any]]:
            after, paid = Counter(visits), Counter(spent)
            after[state] += 1
            if rules.handler[state] in SPENDS:
                paid[SPENDS[rules.handler[state]]] += 1
            return frozenset(after.items()), frozenset(paid.items())

        run = visit(graph.initial, *enter(graph.initial, {}, {}), frozenset())
        most = (max(most[0], run[0]), max(most[1], run[1]), max(most[2], run[2]))
    return most


@given(graphs(max_states=3, max_limit=2, plain=True))
def test_the_bound_is_what_brute_force_finds(graph: AgentGraph) -> None:
    bound = prove(graph)
    assert bound.exact
    assert (bound.transitions, bound.generations, bound.user_turns) == enumerate_runs(graph)


def walk(graph: AgentGraph, rng: random.Random) -> Counter[str]:
    """Run one trajectory by chance and return what it came to."""
    rules, total = Rules(graph), Counter[str]()
    limits = {
        n: v if v is None or rng.random() < 0.7 else rng.randint(0, v)
        for n, v in graph.limits.model_dump().items()
        if n in SPENDS.values()
    }
    visits, spent, routed, state = Counter[str](), Counter[str](), frozenset[str](), graph.initial
    while True:
        visits[state] += 1
        handler = rules.handler[state]
        calls = rng.choice([1, 1, 1, 2]) if handler == "call_tools" else 1
        if handler in SPENDS:
            spent[SPENDS[handler]] += calls
        limit = rules.reached(state, visits, spent, routed, limits)
        event: Event
        if limit is None:
            total["generations"] += handler == "generate"
            total["user_turns"] += handler == "interact"
            total["tool_calls"] += calls if handler == "call_tools" else 0
            usual = [(t, None) for t in TRIGGERS[handler]]
            event = rng.choice(usual if rng.random() < 0.8 else rules.outcomes(state))
        else:
            event = ("limit_reached", limit)
        dests = rules.ways(state, event, visits, routed)
        if event[0] == "limit_reached":
            routed |= {str(rules.key(event, state))}
        onward = [dest for dest in dests if dest not in rules.final]
        total["transitions"] += 1
        if not onward or rng.random() < 0.05:
            return total
        state = rng.choice(onward)


@given(graphs(plain=True), st.integers(0, 2**32))
def test_no_walk_exceeds_the_bound(graph: AgentGraph, seed: int) -> None:
    rng = random.Random(seed)
    bounds = [prove(graph), prove(graph, situations=1)]
    for _ in range(30):
        for name, value in walk(graph, rng).items():
            for bound in bounds:
                most = getattr(bound, name)
                assert most is None or value <= most, (name, bound.exact)


@given(graphs(plain=True))
def test_the_ranking_is_never_below_the_search(graph: AgentGraph) -> None:
    fine, coarse = prove(graph), prove(graph, situations=1)
    assert fine.transitions <= coarse.transitions
    for name in ("generations", "tool_calls", "user_turns"):
        low, high = getattr(fine, name), getattr(coarse, name)
        assert high is None or (low is not None and low <= high)


LIMITS = {"assistant_turns": 8, "tool_calls": 16, "response_tokens": 4096, "wall_seconds": 600}
TOOL_AGENT: dict[str, Any] = table("rules")["a solver with a tool"]["base"] | {"limits": LIMITS}


def agent(**changes: Any) -> AgentGraph:
    return AgentGraph.model_validate({**TOOL_AGENT, **changes})


def test_the_tool_agent_of_the_documentation() -> None:
    bound = prove(agent())
    assert str(bound) == "ends within 18 transitions, 8 generations, 4,096 response tokens, 600 s"
    assert bound == Bound(18, 8, 16, 0, 4096, 600.0, exact=True)


def test_a_search_that_is_too_large_gives_way_to_the_ranking() -> None:
    coarse = prove(agent(), situations=3)
    assert not coarse.exact
    assert str(coarse).startswith("ends within at most ")
    assert coarse.transitions >= 18
    assert (coarse.generations, coarse.tool_calls) == (8, 16)


def test_large_limits_are_searched_too() -> None:
    bound = prove(agent(limits={"assistant_turns": 3000, "tool_calls": 3000, "wall_seconds": 1}))
    assert (bound.exact, bound.transitions, bound.generations) == (True, 6002, 3000)


def test_on_error_is_a_row_too() -> None:
    limits = {"assistant_turns": 3, "tool_calls": 2}
    plain = agent(limits=limits)
    rescued = agent(limits=limits, states={**TOOL_AGENT["states"], "GENERATING": {"on_error": "PENDING"}})
    assert prove(rescued).transitions > prove(plain).transitions
    assert prove(rescued).transitions == enumerate_runs(rescued)[0]


def test_words_for_one_and_for_nothing() -> None:
    one = agent(
        states={"GENERATING": {"max_visits": 1}},
        initial="GENERATING",
        limits={},
        transitions=[{"trigger": "generated", "source": "GENERATING", "dest": "TERMINATED"}],
    )
    assert str(prove(one)) == "ends within 1 transition, 1 generation"


def summarised(**limits: Any) -> AgentGraph:
    """Route assistant_turns to a last summary, which lives on max_visits alone."""
    return agent(
        limits={"assistant_turns": 2, "tool_calls": 9, **limits},
        states={**TOOL_AGENT["states"], "SUMMARY": {"handler": "generate", "max_visits": 2, "timeout": 7}},
        transitions=[
            *TOOL_AGENT["transitions"],
            {"trigger": "limit_reached", "source": "GENERATING", "dest": "SUMMARY"},
            {"trigger": "generated", "source": "SUMMARY", "dest": "TERMINATED"},
        ],
    )


def test_a_routed_limit_gives_one_more_generation() -> None:
    # PENDING, 2 × (GENERATING, PROCESSING_TOOLS), GENERATING (reached), SUMMARY
    bound = prove(summarised())
    assert (bound.transitions, bound.generations) == (7, 3)


def test_routed_seconds_and_tokens_are_outlived() -> None:
    bound = prove(summarised(wall_seconds=100, response_tokens=50))
    assert bound.wall_seconds == 100 + 2 * 7
    assert bound.response_tokens is None


def test_a_limit_routed_elsewhere_exempts_a_state_without_rows_of_its_own() -> None:
    limit = {"limit": "assistant_turns"}
    rows = [
        {"trigger": "generated", "source": "GENERATING", "dest": "AGAIN"},
        {"trigger": "limit_reached", "source": "GENERATING", "dest": "AGAIN", "conditions": limit},
        {"trigger": "generated", "source": "AGAIN", "dest": "AGAIN", "unless": {"visits_over": 4}},
        {"trigger": "generated", "source": "AGAIN", "dest": "TERMINATED"},
    ]
    graph = agent(
        initial="GENERATING",
        limits={"assistant_turns": 0},
        states={"GENERATING": {}, "AGAIN": {"handler": "generate", "max_visits": 5}},
        transitions=rows,
    )
    assert (prove(graph).transitions, prove(graph).generations) == (6, 5)
    assert enumerate_runs(graph) == (6, 5, 0)


def test_agents_as_tools_count_into_their_parent() -> None:
    child = prove(agent())
    graph = agent(
        limits={"assistant_turns": 2, "tool_calls": 3, "response_tokens": 10},
        tools={"solve": {"agent": TOOL_AGENT, "retry": {"attempts": 2}}},
    )
    bound = prove(graph)
    assert not bound.exact
    assert bound.transitions == 6 + 3 * 2 * child.transitions
    assert bound.generations == 2 + 3 * 2 * 8
    assert bound.tool_calls == 3 + 3 * 2 * 16
    assert bound.response_tokens == 10 + 3 * 2 * 4096
    assert bound.wall_seconds is None


def custom(handler: str, **limits: int) -> AgentGraph:
    trigger = {"Search": ("found", "lost"), "Free": ("done",)}[handler]
    return agent(
        limits=limits,
        tools={},
        initial="OWN",
        states={"OWN": {"handler": f"tests.custom_code:{handler}", "max_visits": 2}},
        transitions=[
            {"trigger": trigger[0], "source": "OWN", "dest": "OWN"},
            *({"trigger": name, "source": "OWN", "dest": "TERMINATED"} for name in trigger[1:]),
        ],
    )


def test_a_custom_handler_may_generate_as_often_as_the_limit_allows() -> None:
    bound = prove(custom("Free", assistant_turns=5, tool_calls=6))
    assert (bound.transitions, bound.generations, bound.tool_calls) == (3, 5, 6)
    assert prove(custom("Search", assistant_turns=5)).tool_calls is None
    assert prove(custom("Free")).generations is None


@pytest.mark.parametrize("situations", [1, 60_000])
def test_what_may_run_for_ever_has_no_bound(situations: int) -> None:
    endless = agent(limits={})
    with pytest.raises(ConfigError, match="may run for ever"):
        prove(endless, situations=situations)


def test_the_configurations_that_ship_are_proven() -> None:

    for path in sorted((ROOT / "configs" / "agents").glob("*.yaml")):
        assert prove(loader.load_agent(path)).transitions > 0
