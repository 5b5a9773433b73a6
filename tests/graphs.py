"""Agents that pass verification, by construction.

Invariant: nothing is filtered, so agents shrink well: towards one state, no limits, and no transitions but those that a
handler needs. ``verify(graph)`` finds nothing wrong with any of them.
"""

from collections.abc import Iterable

from hypothesis import strategies as st

from fsm_rollout.agent.graph import BUILT_IN_STATES, TERMINATED, AgentGraph
from fsm_rollout.agent.handlers import checked_handler
from fsm_rollout.agent.rules.paths import nothing_new
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.agent.rules.transitions import never_fires
from fsm_rollout.testing.strategies.calls import plain_data
from fsm_rollout.trajectory.enums import Trigger
from fsm_rollout.trajectory.events import PlainData as Data
from fsm_rollout.trajectory.settings import FrozenMap

Strategy = st.SearchStrategy[Data]
Leads = dict[tuple[str, str], list[str]]  # where the transitions of a state and trigger lead, in order

# Some know their handler; some are words that YAML takes for something else.
NAMES = ("GENERATING", "PROCESSING_TOOLS", "INTERACTING", "A", "B", "on", "y", "null", "_1e3", "PENDING")
FINALS = (TERMINATED, "DONE")
HANDLERS = ("prompt", "generate", "call_tools", "interact", "write")
CALCULATOR = "fsm_rollout.tools.calculator:calculate"
SCRIPTED_USER = "fsm_rollout.interactions:ScriptedUser"

# Texts, with those that YAML or OmegaConf could take for something else.
texts = st.one_of(
    st.sampled_from(["", "yes", "on", "1e3", "0x10", "1:30", "~", "${a}", r"\${b", "solver.md", "a: b", "x\ny\n", "{"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
# Plain data, as free-form settings hold.
values = plain_data(texts, st.integers(-(2**40), 2**40) | st.floats(allow_nan=False), max_leaves=4)
free_form = st.dictionaries(texts, values, max_size=2)
# Of SCRIPTED_USER: names that it takes, with whatever values.
_user_kwargs = st.dictionaries(st.sampled_from(["turns", "answers"]), values, max_size=2)
_temperatures = st.sampled_from([0.0, 0.7, 1.0])
_LIMITS = ("assistant_turns", "tool_calls", "user_turns", "max_visits", "response_tokens")


@st.composite
def graphs(draw: st.DrawFn, max_states: int = 5, max_limit: int = 4, plain: bool = False) -> AgentGraph:
    """Draw an agent that passes verification.

    Args:
        draw: given by Hypothesis.
        max_states: the most working states.
        max_limit: the most that a counted limit (``assistant_turns``, ``tool_calls``, ``user_turns``) allows.
        plain: leave out what does not matter to where a run goes: texts, tools and contexts with their settings.
    """
    # 1. States in an order, the first of them the initial one.
    states = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=max_states, unique=True))
    specs: dict[str, Data] = {name: draw(_state(name, plain)) for name in states}
    handlers = {name: spec.get("handler") or BUILT_IN_STATES[name] for name, spec in specs.items()}
    tools: Data = {} if plain else draw(st.dictionaries(st.sampled_from(["calc", "no"]), _tools, max_size=2))
    # 2. Where their transitions lead: each declared trigger has a last one without conditions, the others may have one.
    dests = st.sampled_from([*FINALS, *states])
    limits = draw(_limits(max_limit))
    leads: Leads = {}
    conditional: set[tuple[str, str]] = set()
    for state in states:
        for trigger in checked_handler(handlers[state]).triggers:
            if trigger != Trigger.TRUNCATED:
                leads[state, trigger] = draw(st.lists(dests, min_size=1, max_size=3))
        timed = ["timed_out"] if "timeout" in specs[state] else []
        raised = ["failed", *timed, *(["truncated"] if handlers[state] == "generate" else [])]
        more = draw(st.lists(st.sampled_from(raised), max_size=1))
        if _reaches_a_limit(handlers[state], specs[state], limits) and draw(st.integers(0, 3)) == 3:
            more.append("limit_reached")
        for trigger in more:
            leads[state, trigger] = draw(st.lists(dests, min_size=1, max_size=3))
            if draw(st.booleans()):
                conditional.add((state, trigger))
    # 3. What is out of reach is left out, what cannot end gets one to a final state, what could go round for ever
    #    gets `max_visits`.
    _repair(leads, states)
    specs = {name: spec for name, spec in specs.items() if any(name == state for state, _ in leads)}
    for state in _uncounted_loops(leads, list(specs), handlers, limits):
        if "max_visits" not in specs[state]:
            specs[state]["max_visits"] = draw(st.integers(1, 3))
    # 4. Conditions: none takes another's cases.
    rows: list[Data] = []
    predicates = _predicates(list(specs), list(tools))
    limited = predicates | _predicate("limit", st.sampled_from(_LIMITS))
    for (state, trigger), places in leads.items():
        count = len(places) - ((state, trigger) not in conditional)
        drawn = limited if trigger == Trigger.LIMIT_REACHED else predicates
        conditions = draw(st.lists(drawn, min_size=count, max_size=count, unique_by=repr))
        for number, dest in enumerate(places):
            row: Data = {"trigger": trigger, "source": [state], "dest": dest}
            if number < count:
                row[draw(st.sampled_from(["conditions", "unless"]))] = [conditions[number]]
            if dest in FINALS and draw(st.integers(0, 4)) == 4:
                row["stop_reason"] = "enough"
            rows.append(row)
    # 5. The rest of an agent.
    finals = {row["dest"] for row in rows} & set(FINALS)
    specs.update({name: {} if name == TERMINATED else {"final": True} for name in sorted(finals)})
    graph: Data = {"agent": "drawn", "initial": states[0], "limits": limits, "states": specs, "tools": tools}
    graph["transitions"] = rows
    graph["interaction"] = {"use": SCRIPTED_USER, "kwargs": {} if plain else draw(_user_kwargs)}
    if not plain:
        graph["description"] = draw(texts)
        graph["contexts"] = draw(_contexts(list(tools)))
        for spec in specs.values():
            if graph["contexts"] and (spec.get("prompt") or spec.get("reset")):
                spec["context"] = draw(st.sampled_from(["main", *graph["contexts"]]))
    return _answered(_turned(AgentGraph.model_validate(graph)))


def _reaches_a_limit(handler: str, spec: Data, limits: Data) -> bool:
    own = {str(checked_handler(handler).spends), "wall_seconds", *(["bad_calls"] if handler == "call_tools" else [])}
    return handler == "generate" or "max_visits" in spec or not own.isdisjoint(limits)


def _repair(leads: Leads, states: list[str]) -> None:
    while True:
        reachable = _closure([(a, b) for (a, _), dests in leads.items() for b in dests], {states[0]})
        for key in [key for key in leads if key[0] not in reachable]:
            del leads[key]
        ending = _closure([(b, a) for (a, _), dests in leads.items() for b in dests], set(FINALS))
        endless = [key for key in leads if key[0] not in ending]
        if not endless:
            return
        leads[endless[0]][-1] = TERMINATED


def _closure(pairs: list[tuple[str, str]], start: set[str]) -> set[str]:
    """Return what can be reached from ``start``."""
    seen = set(start)
    while new := {b for a, b in pairs if a in seen} - seen:
        seen |= new
    return seen


def _uncounted_loops(leads: Leads, order: list[str], handlers: dict[str, str], limits: Data) -> Iterable[str]:
    """Yield the states that may go back and whose visits no limit counts."""
    for state in order:
        counted = limits.get(str(checked_handler(handlers[state]).spends)) is not None
        back = order[: order.index(state) + 1]
        if not counted and any(dest in back for (name, _), dests in leads.items() if name == state for dest in dests):
            yield state


def _turned(graph: AgentGraph) -> AgentGraph:
    """Turn round the conditions that never hold, and those that always hold and must not."""
    structure = Structure(graph)
    rows = []
    for row in graph.transitions:
        if never_fires(structure, row, row.source) is not None:
            row = row.model_copy(update={"conditions": row.unless, "unless": row.conditions})
        rows.append(row)
    return graph.model_copy(update={"transitions": tuple(rows)})


def _answered(graph: AgentGraph) -> AgentGraph:
    """Give the states that would let a model speak twice in a row something to answer."""
    dests = {graph.transitions[int(finding.path[1])].dest for finding in nothing_new(Structure(graph))}
    if not dests:
        return graph
    states = {
        name: state.model_copy(update={"prompt": "and now?"}) if name in dests else state
        for name, state in graph.states.items()
    }
    return graph.model_copy(update={"states": FrozenMap(states)})


# -- settings -------------------------------------------------------------------------------------------------------


@st.composite
def _state(draw: st.DrawFn, name: str, plain: bool) -> Data:
    spec: Data = {}
    if name not in BUILT_IN_STATES or draw(st.booleans()):
        spec["handler"] = draw(st.sampled_from(HANDLERS))
    handler = spec.get("handler") or BUILT_IN_STATES[name]
    if handler not in ("prompt", "write"):
        spec["timeout"] = draw(st.sampled_from([1, 2.5]))
    if draw(st.integers(0, 2)) == 2:
        spec["max_visits"] = draw(st.integers(1, 3))
    if handler == "write":
        spec["prompt"] = "go on"
    if not plain:
        if draw(st.booleans()):
            spec["prompt"] = draw(texts.filter(lambda text: "{" not in text))
        spec["reset"] = draw(st.booleans())
        if handler == "generate":
            spec["sampling"] = draw(_settings(temperature=_temperatures, max_tokens=st.integers(1, 64)))
        if handler == "call_tools" and draw(st.booleans()):
            spec["parallel"] = draw(st.integers(1, 3))
        if handler == "interact" and draw(st.booleans()):
            spec["interaction"] = {"use": SCRIPTED_USER, "kwargs": draw(_user_kwargs)}
    return spec


def _settings(**optional: st.SearchStrategy[object]) -> Strategy:
    """Return a strategy for settings, each of which may be left out."""
    return st.fixed_dictionaries({}, optional=optional)


def _tool(**optional: st.SearchStrategy[object]) -> Strategy:
    return st.fixed_dictionaries(
        {"use": st.just(CALCULATOR), "timeout": st.just(5)},
        optional={
            "description": st.just("Calculates."),
            "truncate": st.sampled_from(["left", "right", "middle"]),
            **optional,
        },
    )


_retry = st.fixed_dictionaries({"attempts": st.integers(1, 3), "errors": st.just(["OSError"])})
_tools = _tool(retry=_retry, repeatable=st.just(True)) | _tool(repeatable=st.just(False))


def _contexts(tools: list[str]) -> Strategy:
    context = _settings(
        system=texts,
        tools=st.lists(st.sampled_from(tools), unique=True, max_size=2) if tools else st.just([]),
        template_kwargs=free_form,
        history=st.sampled_from(["keep", "split"]),
        engine=st.sampled_from(["policy", "judge"]),
        trainable=st.just(False),
    )
    return st.dictionaries(st.sampled_from(["main", "critic", "no"]), context, max_size=2)


def _limits(most: int) -> Strategy:
    return _settings(
        **{name: st.integers(0, most) for name in ("assistant_turns", "tool_calls", "user_turns")},
        bad_calls=st.integers(0, 3),
        response_tokens=st.integers(1, 5000),
        wall_seconds=st.sampled_from([10, 0.5]),
    )


def _predicate(name: str, argument: st.SearchStrategy[object]) -> Strategy:
    return argument.map(lambda value: {"name": name, "argument": value})


def _predicates(states: list[str], tools: list[str]) -> Strategy:
    """Return a strategy for conditions."""
    count = st.integers(0, 3)
    arguments: dict[str, st.SearchStrategy[object]] = {
        "text_contains": texts.filter(bool),
        "text_matches": st.sampled_from(["^A", "a|b", r"\d+$"]),
        "score_at_least": st.sampled_from([0, 0.5]),
        "context_over": st.integers(0, 100),
        "response_over": st.integers(0, 100),
        "visits_over": count | st.dictionaries(st.sampled_from(states), count, min_size=1, max_size=1),
    }
    if tools:
        arguments["tool_called"] = st.sampled_from(tools)
    plain = st.sampled_from(["has_tool_calls", "all_calls_bad", "last_tool_failed"]).map(lambda name: {"name": name})
    return st.one_of(plain, *(_predicate(name, argument) for name, argument in arguments.items()))
