"""Agents that pass verification, by construction.

Invariant: nothing is filtered, so agents shrink well: towards one state, no limits, and no rows but those that a
handler needs. ``verify(graph)`` finds nothing wrong with any of them.

How a valid graph is made: states are drawn in an order, and each declared trigger gets rows to drawn states, the last
one unconditional. Then what is out of reach is left out, what cannot end gets its last row turned to a final state,
and whatever could go back without being counted gets ``max_visits``; who would be asked again with nothing new to
answer gets a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from fsm_rollout.agent.graph import BUILT_IN_STATES, TERMINATED, AgentGraph
from fsm_rollout.agent.handlers import handler_spec
from fsm_rollout.agent.rules.paths import nothing_new
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.trajectory.reasons import Trigger
from fsm_rollout.trajectory.settings import FrozenMap

Data = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]

NAMES = ("GENERATING", "PROCESSING_TOOLS", "INTERACTING", "A", "B", "on", "y", "null", "_1e3", "PENDING")
"""Some know their handler; some are words that YAML takes for something else."""
FINALS = (TERMINATED, "DONE")
HANDLERS = ("prompt", "generate", "call_tools", "interact", "write")
CALCULATOR = "fsm_rollout.tools.calculator:calculate"
SCRIPTED_USER = "fsm_rollout.interactions:ScriptedUser"

texts = st.one_of(
    st.sampled_from(["", "yes", "on", "1e3", "0x10", "1:30", "~", "${a}", r"\${b", "solver.md", "a: b", "x\ny\n", "{"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
"""Texts, with those that YAML or OmegaConf could take for something else."""

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
"""Plain data, as free-form settings hold."""

free_form = st.dictionaries(texts, values, max_size=2)


def sampling() -> st.SearchStrategy[Data]:
    """Return settings of a generating state."""
    return st.fixed_dictionaries(
        {}, optional={"temperature": st.sampled_from([0.0, 0.7, 1.0]), "max_tokens": st.integers(1, 64)}
    )


def _predicates(states: list[str], tools: list[str]) -> st.SearchStrategy[Data]:
    free: list[st.SearchStrategy[Data]] = [
        st.sampled_from(["has_tool_calls", "all_calls_bad", "last_tool_failed"]).map(lambda name: {"name": name}),
        _predicate("text_contains", texts.filter(bool)),
        _predicate("text_matches", st.sampled_from(["^A", "a|b", r"\d+$"])),
        _predicate("score_at_least", st.sampled_from([0, 0.5])),
        _predicate("context_over", st.integers(0, 100)),
        _predicate("response_over", st.integers(0, 100)),
    ]
    if tools:
        free.append(_predicate("tool_called", st.sampled_from(tools)))
    return st.one_of(*free, _counters(states))


def _counters(states: list[str]) -> st.SearchStrategy[Data]:
    count = st.integers(0, 3)
    named = st.dictionaries(st.sampled_from(states), count, min_size=1, max_size=1)
    return _predicate("visits_over", count | named)


def _predicate(name: str, argument: st.SearchStrategy[Any]) -> st.SearchStrategy[Data]:
    return argument.map(lambda value: {"name": name, "argument": value})


def _key(condition: Data) -> str:
    return repr(sorted(condition.items()))


class _Rows:
    """The rows of a graph while it is being made, by (state, trigger), in order."""

    def __init__(self, draw: Draw, states: list[str], tools: list[str]) -> None:
        self.draw, self.states = draw, states
        self.predicates = _predicates(states, tools)
        self.by: dict[tuple[str, str], list[Data]] = {}

    def add(self, state: str, trigger: str, *, last: bool, extra: st.SearchStrategy[Data] | None = None) -> None:
        """Draw up to two conditional rows, none of which takes another's cases, and the unconditional one."""
        predicates = self.predicates if extra is None else self.predicates | extra
        asked = self.draw(st.lists(predicates, max_size=2, unique_by=_key))
        rows = [
            {self.draw(st.sampled_from(["conditions", "unless"])): [predicate], "dest": self._dest()}
            for predicate in asked
        ]
        if last:
            rows.append({"dest": self._dest()})
        self.by[state, trigger] = [{"trigger": trigger, "source": [state], **row} for row in rows]

    def _dest(self) -> str:
        return str(self.draw(st.sampled_from([*FINALS, *self.states])))

    def closure(self, start: set[str], *, backwards: bool = False) -> set[str]:
        """Return the states connected to ``start`` along the rows."""
        seen = set(start)
        while True:
            pairs = [(state, row["dest"]) for (state, _), rows in self.by.items() for row in rows]
            new = {a if backwards else b for a, b in pairs if (b if backwards else a) in seen} - seen
            if not new:
                return seen
            seen |= new


@st.composite
def graphs(draw: Draw, max_states: int = 5, max_limit: int = 4, plain: bool = False) -> AgentGraph:
    """Draw an agent that passes verification.

    Args:
        draw: given by Hypothesis.
        max_states: the most working states.
        max_limit: the most that a counted limit (``assistant_turns``, ``tool_calls``, ``user_turns``) allows.
        plain: leave out what does not matter to where a run goes: texts, tools and contexts with their settings.
    """
    states = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=max_states, unique=True))
    specs: dict[str, Data] = {name: draw(_state(name, plain)) for name in states}
    handlers = {name: spec.get("handler") or BUILT_IN_STATES[name] for name, spec in specs.items()}
    tools: Data = {} if plain else draw(st.dictionaries(st.sampled_from(["calc", "no"]), _tool(), max_size=2))
    rows = _Rows(draw, states, list(tools))
    for state in states:
        for trigger in handler_spec(handlers[state]).triggers:
            if trigger != Trigger.TRUNCATED:
                rows.add(state, trigger, last=True)
        raised = ["failed", "timed_out", *(["truncated"] if handlers[state] == "generate" else [])]
        for trigger in draw(st.lists(st.sampled_from(raised), max_size=1)):
            rows.add(state, trigger, last=draw(st.booleans()))
        if draw(st.integers(0, 3)) == 3:
            limits = st.sampled_from(["assistant_turns", "tool_calls", "user_turns", "max_visits", "response_tokens"])
            rows.add(state, "limit_reached", last=draw(st.booleans()), extra=_predicate("limit", limits))
    _repair(rows, states, specs)
    limits = draw(_limits(max_limit))
    _bound(rows, specs, handlers, limits, draw)
    graph: Data = {"agent": "drawn", "initial": states[0], "limits": limits, "states": specs, "tools": tools}
    graph["transitions"] = [row for group in rows.by.values() for row in group]
    graph["interaction"] = {"use": SCRIPTED_USER, "kwargs": {} if plain else draw(free_form)}
    finals = {row["dest"] for row in graph["transitions"]} & set(FINALS)
    specs.update({name: {} if name == TERMINATED else {"final": True} for name in sorted(finals)})
    for row in graph["transitions"]:
        if row["dest"] in FINALS and draw(st.integers(0, 4)) == 4:
            row["stop_reason"] = "enough"
    if not plain:
        graph["description"] = draw(texts)
        graph["contexts"] = draw(_contexts(list(tools)))
        for name in states:
            if name in specs and graph["contexts"] and (specs[name].get("prompt") or specs[name].get("reset")):
                specs[name]["context"] = draw(st.sampled_from(["main", *graph["contexts"]]))
    return _answered(AgentGraph.model_validate(graph))


def _answered(graph: AgentGraph) -> AgentGraph:
    """Give the states that would let a model speak twice in a row something to answer."""
    told = [found.path for found in nothing_new(Structure(graph))]
    dests = {graph.transitions[int(path[1])].dest for path in told}
    if not dests:
        return graph
    states = {
        name: state.model_copy(update={"prompt": "and now?"}) if name in dests else state
        for name, state in graph.states.items()
    }
    return graph.model_copy(update={"states": FrozenMap(states)})


@st.composite
def _state(draw: Draw, name: str, plain: bool) -> Data:
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
        braces = texts.filter(lambda text: "{" not in text)
        if draw(st.booleans()):
            spec["prompt"] = draw(braces)
        spec["reset"] = draw(st.booleans())
        if handler == "generate":
            spec["sampling"] = draw(sampling())
        if handler == "call_tools" and draw(st.booleans()):
            spec["parallel"] = draw(st.integers(1, 3))
        if handler == "interact" and draw(st.booleans()):
            spec["interaction"] = {"use": SCRIPTED_USER, "kwargs": draw(free_form)}
    return spec


def _tool() -> st.SearchStrategy[Data]:
    again: Data = {
        "retry": st.fixed_dictionaries({"attempts": st.integers(1, 3), "errors": st.just(["OSError"])}),
        "repeatable": st.just(True),
    }
    once: Data = {"repeatable": st.just(False)}
    return st.sampled_from([again, once]).flatmap(
        lambda own: st.fixed_dictionaries(
            {"use": st.just(CALCULATOR), "timeout": st.just(5)},
            optional={
                "description": st.just("Calculates."),
                "truncate": st.sampled_from(["left", "right", "middle"]),
                **own,
            },
        )
    )


def _contexts(tools: list[str]) -> st.SearchStrategy[Data]:
    shown = st.lists(st.sampled_from(tools), unique=True, max_size=2) if tools else st.just([])
    context = st.fixed_dictionaries(
        {},
        optional={
            "system": texts,
            "tools": shown,
            "template_kwargs": free_form,
            "history": st.sampled_from(["keep", "split"]),
            "engine": st.sampled_from(["policy", "judge"]),
            "trainable": st.just(False),
        },
    )
    return st.dictionaries(st.sampled_from(["main", "critic", "no"]), context, max_size=2)


def _limits(most: int) -> st.SearchStrategy[Data]:
    return st.fixed_dictionaries(
        {},
        optional={
            **{name: st.integers(0, most) for name in ("assistant_turns", "tool_calls", "user_turns")},
            "bad_calls": st.integers(0, 3),
            "response_tokens": st.integers(1, 5000),
            "wall_seconds": st.sampled_from([10, 0.5]),
        },
    )


def _repair(rows: _Rows, states: list[str], specs: dict[str, Data]) -> None:
    while True:
        reachable = rows.closure({states[0]})
        for key in [key for key in rows.by if key[0] not in reachable]:
            del rows.by[key]
        endless = reachable - rows.closure(set(FINALS), backwards=True) - set(FINALS)
        if not endless:
            break
        state = min(endless, key=states.index)
        next(group for (name, _), group in rows.by.items() if name == state)[-1]["dest"] = TERMINATED
    for name in [name for name in specs if name not in reachable]:
        del specs[name]
    for group in rows.by.values():  # conditions may name states that are gone
        for row in group:
            for predicate in (*row.get("conditions", ()), *row.get("unless", ())):
                if isinstance(predicate.get("argument"), dict):
                    (named,) = predicate["argument"]
                    if named not in specs:
                        predicate["argument"] = {states[0]: 90 + len(str(predicate))}
    for key, group in rows.by.items():  # which may have made them equal
        plain = [{k: v for k, v in row.items() if k in ("conditions", "unless")} for row in group]
        rows.by[key] = [row for i, row in enumerate(group) if plain[i] not in plain[:i]]
    if rows.closure({states[0]}) - set(FINALS) != set(specs):
        _repair(rows, states, specs)


def _bound(rows: _Rows, specs: dict[str, Data], handlers: dict[str, str], limits: Data, draw: Draw) -> None:
    order = list(specs)
    for state in order:
        counted = limits.get(str(handler_spec(handlers[state]).spends)) is not None
        back = any(
            row["dest"] in specs and order.index(row["dest"]) <= order.index(state)
            for (name, _), group in rows.by.items()
            if name == state
            for row in group
        )
        if back and not counted and "max_visits" not in specs[state]:
            specs[state]["max_visits"] = draw(st.integers(1, 3))
