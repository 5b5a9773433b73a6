"""What makes sense: the numbered rules that an agent is held to before it runs.

Invariant: an agent with no problems here ends (:func:`fsm_rollout.proof.prove` gives its bound), and every trigger
that can be raised in it has a row or ends the trajectory by the rules of the machine. All rules are tried; those about
paths are left out while names are wrong, because what follows from a misspelt name is not worth reading.

| rule | what is wrong |
|---|---|
| 1 | a name that is not defined: a state, context, tool, handler, predicate, or a trigger that no state raises |
| 2 | a state that nothing leads to |
| 3 | a state from which no rows lead to a final state |
| 4 | an outcome of a state's handler for which there is no row (the scheduler's own triggers need none) |
| 5 | a row whose source never raises its trigger |
| 6 | the last row for an outcome is conditional |
| 7 | a row that can never fire: an earlier one takes all its cases, or its conditions contradict each other |
| 8 | a row for ``cancelled`` |
| 9 | a cycle that spends nothing countable and has no ``max_visits``: it may never end |
| 10 | a limit that a cycle spends, or agents used as tools need, is not set: it may never end |
| 11 | a state that waits, with nothing to end the wait |
| 12 | a predicate's argument |
| 13 | a ``stop_reason`` on a row that does not end the trajectory |
| 14 | a tool whose schema cannot be built, an interaction that cannot be imported |
| 15 | a context of an untrained engine that is to be trained |
| 16 | a key that means nothing to the state's handler, or one that it needs |
| 17 | a final state that does things, or that rows leave |
| 18 | an initial state that is final |
| 19 | a state that interacts, with nobody to answer |
| 20 | a prompt that is not a Jinja template |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fsm_rollout.errors import ConfigError, Problem, RolloutError, did_you_mean
from fsm_rollout.graph import IMPLICIT_TRIGGERS, POLICY, TERMINATED, AgentGraph, Predicate, Row, State
from fsm_rollout.handlers import BUILT_IN_STATES, handler_spec, load_object
from fsm_rollout.predicates import PREDICATES, compile_predicate
from fsm_rollout.source_map import ConfigPath, SourceMap, describe, in_file_order
from fsm_rollout.structure import WAITING, Structure


@dataclass(frozen=True, slots=True)
class Finding:
    """One breach of a rule, at a config path. ``text_line`` counts lines of a text from 1."""

    rule: int
    path: ConfigPath
    message: str
    text_line: int | None = None


def verify(graph: AgentGraph, source: SourceMap | None = None) -> list[Problem]:
    """Return every breach of the rules, in file order where ``source`` tells places; none means that it makes sense."""
    source = source or SourceMap()
    problems = []
    for found in findings(graph):
        text = found.text_line is not None
        file, line = source.locate_text(found.path, found.text_line or 1) if text else source.locate(found.path)
        problems.append(Problem(found.message, file, line, found.rule))
    return in_file_order(problems)


def findings(graph: AgentGraph) -> Iterator[Finding]:
    """Yield every breach of the rules, those of agents used as tools included."""
    structure = Structure(graph)
    unknown = list(names(graph, structure, nested=False))
    yield from unknown
    for rule in _LOCAL_RULES:
        yield from rule(structure)
    if not unknown:
        for rule in _PATH_RULES:
            yield from rule(structure)
    yield from _in_tools(graph, findings)


def names(graph: AgentGraph, structure: Structure | None = None, *, nested: bool = True) -> Iterator[Finding]:
    """Yield rule 1 alone: names that are not defined."""
    structure = structure or Structure(graph)
    contexts, tools = {*graph.contexts, "main"}, graph.tools
    states = {*graph.states, TERMINATED}

    def undefined(kind: str, name: str, known: Sequence[str] | set[str], path: ConfigPath) -> Finding:
        where = ": ".join(part for part in (describe(path[:-1]), str(path[-1])) if part)
        return Finding(1, path, f"{where} '{name}' is not defined{did_you_mean(name, known)}".replace("'' ", ""))

    if graph.initial not in states:
        yield undefined("state", graph.initial, states, ("initial",))
    for name, context in graph.contexts.items():
        for tool in context.tools or ():
            if tool not in tools:
                hint = did_you_mean(tool, tools)
                yield Finding(1, ("contexts", name, "tools"), f"context '{name}': tool '{tool}' is not defined{hint}")
    for name, state in graph.states.items():
        yield from _state_names(name, state, graph, states, contexts)
    triggers = {*IMPLICIT_TRIGGERS, *(t for spec in structure.specs.values() for t in spec.triggers)}
    all_known = len(structure.specs) == len(graph.working_states)
    for index, row in enumerate(graph.transitions):
        at: ConfigPath = ("transitions", index)
        if row.trigger not in triggers and all_known:
            hint = did_you_mean(row.trigger, triggers)
            yield Finding(1, (*at, "trigger"), f"row {index + 1}: no state raises trigger '{row.trigger}'{hint}")
        for source in row.source:
            if source not in states and source != "*":
                yield undefined("state", source, states, (*at, "source"))
        if row.dest not in states:
            yield undefined("state", row.dest, states, (*at, "dest"))
        for key, predicate in _predicates(row):
            if predicate.name not in PREDICATES and ":" not in predicate.name:
                hint = did_you_mean(predicate.name, PREDICATES)
                message = f"row {index + 1}: predicate '{predicate.name}' is not defined{hint}"
                yield Finding(1, (*at, key), message)
    if nested:
        yield from _in_tools(graph, names)


def _state_names(name: str, state: State, graph: AgentGraph, states: set[str], contexts: set[str]) -> Iterator[Finding]:
    at: ConfigPath = ("states", name)
    if state.context not in contexts:
        hint = did_you_mean(state.context, contexts)
        yield Finding(1, (*at, "context"), f"state '{name}': context '{state.context}' is not defined{hint}")
    if state.on_error is not None and state.on_error not in states:
        hint = did_you_mean(state.on_error, states)
        yield Finding(1, (*at, "on_error"), f"state '{name}': on_error '{state.on_error}' is not defined{hint}")
    if graph.is_final(name):
        return
    handler = state.handler or BUILT_IN_STATES.get(name)
    if handler is None:
        hint = did_you_mean(name, BUILT_IN_STATES) if did_you_mean(name, BUILT_IN_STATES).startswith("; did") else ""
        message = f"state '{name}' names no handler{hint or '; give it one, or `final: true`'}"
        yield Finding(1, (*at, "handler"), message)
        return
    try:
        handler_spec(handler)
    except ConfigError as error:
        yield Finding(1, (*at, "handler"), f"state '{name}': {error}")


def _in_tools(graph: AgentGraph, rules: Callable[[AgentGraph], Iterator[Finding]]) -> Iterator[Finding]:
    for name, tool in graph.tools.items():
        if tool.agent is not None:
            for found in rules(tool.agent):
                path: ConfigPath = ("tools", name, "agent", *found.path)
                yield Finding(found.rule, path, f"tool '{name}': agent: {found.message}", found.text_line)


def _predicates(row: Row) -> Iterator[tuple[str, Predicate]]:
    for key, predicates in (("conditions", row.conditions), ("unless", row.unless)):
        for predicate in predicates:
            yield key, predicate


def _unreachable(structure: Structure) -> Iterator[Finding]:
    reachable = structure.reachable()
    for state in structure.graph.states:
        if state not in reachable and state != TERMINATED:
            message = f"state '{state}' is never entered; add a row with dest: {state}, or remove it"
            yield Finding(2, ("states", state), message)


def _endless(structure: Structure) -> Iterator[Finding]:
    can_end, reachable = structure.can_end(), structure.reachable()
    for state in structure.graph.states:
        if state in reachable and state not in can_end:
            message = (
                f"state '{state}' cannot end: no rows lead from it to a final state; add one with dest: {TERMINATED}"
            )
            yield Finding(3, ("states", state), message)


def _outcomes(structure: Structure) -> Iterator[Finding]:
    graph = structure.graph
    for state, spec in structure.specs.items():
        for trigger in spec.triggers:
            if trigger in IMPLICIT_TRIGGERS:
                continue
            rows = [
                (i, row)
                for i, row in enumerate(graph.transitions)
                if row.trigger == trigger and {state, "*"} & set(row.source)
            ]
            if not rows:
                message = f"state '{state}' may raise '{trigger}', which no row takes; add one with source: {state}"
                yield Finding(4, ("states", state), message)
            elif all(row.conditions or row.unless for _, row in rows):
                message = (
                    f"row {rows[-1][0] + 1}: the last row for '{trigger}' from '{state}' is conditional; "
                    "add one without conditions after it"
                )
                yield Finding(6, ("transitions", rows[-1][0]), message)


def _never_raised(structure: Structure) -> Iterator[Finding]:
    known = {trigger for spec in structure.specs.values() for trigger in spec.triggers} | set(IMPLICIT_TRIGGERS)
    for index, row in enumerate(structure.graph.transitions):
        if row.trigger not in known:
            continue  # rule 1 says so
        named = [s for s in row.source if s in structure.specs]
        wrong = [s for s in named if not structure.may_raise(s, row.trigger)]
        for state in wrong:
            raised = ", ".join(structure.specs[state].triggers)
            message = f"row {index + 1}: state '{state}' never raises '{row.trigger}'; its handler raises {raised}"
            yield Finding(5, ("transitions", index, "source"), message)
        if "*" in row.source and not structure.sources(row):
            message = f"row {index + 1}: no state raises '{row.trigger}'"
            yield Finding(5, ("transitions", index, "source"), message)


def _shadowed(structure: Structure) -> Iterator[Finding]:
    graph = structure.graph
    for index, row in enumerate(graph.transitions):
        at: ConfigPath = ("transitions", index)
        both = [p.name for p in row.conditions if p in row.unless]
        if both:
            yield Finding(7, at, f"row {index + 1} never fires: it wants '{both[0]}' both to hold and not to hold")
            continue
        covered = {}
        for state in structure.sources(row):
            for before, earlier in enumerate(graph.transitions[:index]):
                if earlier.trigger == row.trigger and state in structure.sources(earlier) and _covers(earlier, row):
                    covered[state] = before
                    break
        everywhere = len(covered) == len(structure.sources(row))
        for state, before in covered.items():
            if everywhere or state in row.source:  # a `*` may be taken in part by rows before it
                message = (
                    f"row {index + 1} never fires from '{state}': row {before + 1} takes all its cases; "
                    "put it before, or remove it"
                )
                yield Finding(7, at, message)
                if everywhere:
                    break
    for state in structure.specs:
        on_error = graph.states[state].on_error
        plain = [i for i, r in enumerate(graph.transitions) if r.trigger == "failed" and state in structure.sources(r)]
        plain = [i for i in plain if not graph.transitions[i].conditions and not graph.transitions[i].unless]
        if on_error is not None and plain:
            message = (
                f"state '{state}': on_error never holds: row {plain[0] + 1} takes every 'failed'; remove one of them"
            )
            yield Finding(7, ("states", state, "on_error"), message)


def _covers(earlier: Row, later: Row) -> bool:
    """Whether ``earlier`` holds whenever ``later`` does."""
    return all(p in later.conditions for p in earlier.conditions) and all(p in later.unless for p in earlier.unless)


def _cancelled(structure: Structure) -> Iterator[Finding]:
    for index, row in enumerate(structure.graph.transitions):
        if row.trigger == "cancelled":
            message = f"row {index + 1}: 'cancelled' cannot be routed; it always ends the trajectory"
            yield Finding(8, ("transitions", index, "trigger"), message)


def _cycles(structure: Structure) -> Iterator[Finding]:
    graph, limits = structure.graph, structure.graph.limits
    unbound = [s for s in structure.specs if graph.states[s].max_visits is None and s in structure.reachable()]
    free = [s for s in unbound if structure.spends(s) is None]
    cycle = structure.cycle_within(free)
    if cycle:
        message = (
            f"the cycle {' -> '.join(cycle)} spends nothing that is counted, so it may never end; "
            f"give one of its states max_visits"
        )
        yield Finding(9, ("states", cycle[0]), message)
        return
    loose = [s for s in unbound if (spends := structure.spends(s)) is None or getattr(limits, spends) is None]
    cycle = structure.cycle_within(loose)
    if cycle:
        missing = dict.fromkeys(f"limits.{structure.spends(s)}" for s in cycle if structure.spends(s))
        message = (
            f"the cycle {' -> '.join(cycle)} may never end: {' and '.join(missing)} is not set; "
            "set it, or give one of its states max_visits"
        )
        yield Finding(10, ("limits",), message)


def _agents_as_tools(structure: Structure) -> Iterator[Finding]:
    graph = structure.graph
    agents = [name for name, tool in graph.tools.items() if tool.agent is not None]
    callers = [s for s, spec in structure.specs.items() if spec.name == "call_tools" or structure.is_custom(s)]
    if not agents or not callers:
        return
    if graph.limits.tool_calls is None:
        message = f"tool '{agents[0]}' is an agent, so its calls must be bounded; set limits.tool_calls"
        yield Finding(10, ("tools", agents[0]), message)
        return
    routed = any(row.trigger == "limit_reached" for row in graph.transitions)
    for state in callers:
        if routed and graph.states[state].max_visits is not None:
            message = (
                f"state '{state}' has max_visits, so tool_calls no longer bounds its calls of agents once a "
                "'limit_reached' row has routed it; remove max_visits"
            )
            yield Finding(10, ("states", state, "max_visits"), message)


def _waits(structure: Structure) -> Iterator[Finding]:
    graph = structure.graph
    if graph.limits.wall_seconds is not None:
        return
    for name, spec in structure.specs.items():
        state = graph.states[name]
        if state.timeout is not None or not (spec.name in WAITING or structure.is_custom(name)):
            continue
        if spec.name == "call_tools" and all(_ends(graph, tool) for tool in graph.tools_of(state.context)):
            continue
        message = f"state '{name}' may wait for ever; give it a timeout, or set limits.wall_seconds"
        yield Finding(11, ("states", name), message)


def _ends(graph: AgentGraph, name: str) -> bool:
    tool = graph.tools.get(name)
    return tool is None or tool.timeout is not None


def _arguments(structure: Structure) -> Iterator[Finding]:
    for index, row in enumerate(structure.graph.transitions):
        for key, predicate in _predicates(row):
            at: ConfigPath = ("transitions", index, key)
            if predicate.name not in PREDICATES and ":" not in predicate.name:
                continue  # rule 1 says so
            if predicate.name == "limit" and row.trigger != "limit_reached":
                message = f"row {index + 1}: predicate 'limit' says nothing about '{row.trigger}', only 'limit_reached'"
                yield Finding(12, at, message)
            try:
                compile_predicate(predicate, structure.graph)
            except ConfigError as error:
                yield Finding(12, at, f"row {index + 1}: {error}")


def _stop_reasons(structure: Structure) -> Iterator[Finding]:
    graph = structure.graph
    for index, row in enumerate(graph.transitions):
        if row.stop_reason is not None and row.dest in graph.states and not graph.is_final(row.dest):
            message = f"row {index + 1}: stop_reason '{row.stop_reason}' would be lost, as '{row.dest}' is not final"
            yield Finding(13, ("transitions", index, "stop_reason"), message)


def _code(structure: Structure) -> Iterator[Finding]:
    graph = structure.graph
    if graph.tools:
        from fsm_rollout.tools.schema import tool_schema_of

        for name, tool in graph.tools.items():
            try:
                tool_schema_of(name, tool)
            except RolloutError as error:
                yield Finding(14, ("tools", name), str(error))
    interactions: list[tuple[ConfigPath, str]] = []
    if graph.interaction is not None:
        interactions.append((("interaction", "use"), graph.interaction.use))
    for name, state in graph.states.items():
        if state.interaction is not None:
            interactions.append((("states", name, "interaction", "use"), state.interaction.use))
    for path, use in interactions:
        try:
            if not callable(load_object(use)):
                yield Finding(14, path, f"interaction '{use}' cannot be called; name a class or a function")
        except ConfigError as error:
            yield Finding(14, path, f"interaction: {error}")


def _trained(structure: Structure) -> Iterator[Finding]:
    for name, context in structure.graph.contexts.items():
        if context.trainable and context.engine != POLICY:
            message = (
                f"context '{name}': only contexts of engine '{POLICY}' can be trained, this one has '{context.engine}'"
            )
            yield Finding(15, ("contexts", name, "trainable"), message)


_HANDLERS_KEYS = ("sampling", "parallel", "interaction", "options")


def _keys(structure: Structure) -> Iterator[Finding]:
    for name, spec in structure.specs.items():
        state = structure.graph.states[name]
        for key in _HANDLERS_KEYS:
            if key not in spec.keys and getattr(state, key) != State.model_fields[key].get_default(
                call_default_factory=True
            ):
                own = f"it takes {', '.join(spec.keys)}" if spec.keys else "it has no keys of its own"
                message = f"state '{name}': {key} means nothing to handler '{spec.name}'; {own}"
                yield Finding(16, ("states", name, key), message)
        if spec.name == "write" and state.prompt is None:
            yield Finding(16, ("states", name), f"state '{name}' writes nothing; give it a prompt")


def _finals(structure: Structure) -> Iterator[Finding]:
    graph = structure.graph
    for name, state in graph.states.items():
        if not graph.is_final(name):
            continue
        if name == TERMINATED and "final" in state.model_fields_set and not state.final:
            yield Finding(17, ("states", name, "final"), f"state '{name}' is always final; give another state the rows")
        for key, field in State.model_fields.items():
            if key != "final" and getattr(state, key) != field.get_default(call_default_factory=True):
                yield Finding(17, ("states", name, key), f"state '{name}' is final, so its {key} would never be used")
    for index, row in enumerate(graph.transitions):
        for source in row.source:
            if source == TERMINATED or (source in graph.states and graph.is_final(source)):
                message = f"row {index + 1}: state '{source}' is final; nothing leaves it"
                yield Finding(17, ("transitions", index, "source"), message)


def _initial(structure: Structure) -> Iterator[Finding]:
    graph = structure.graph
    if graph.initial == TERMINATED or (graph.initial in graph.states and graph.is_final(graph.initial)):
        message = f"initial state '{graph.initial}' is final; a trajectory would end before it began"
        yield Finding(18, ("initial",), message)


def _nobody(structure: Structure) -> Iterator[Finding]:
    graph = structure.graph
    for name, spec in structure.specs.items():
        if spec.name == "interact" and graph.states[name].interaction is None and graph.interaction is None:
            message = f"state '{name}' has nobody to answer; give it (or the agent) an `interaction: {{use: …}}`"
            yield Finding(19, ("states", name), message)


def _templates(structure: Structure) -> Iterator[Finding]:
    for name, state in structure.graph.states.items():
        if state.prompt is None or not any(mark in state.prompt for mark in ("{{", "{%", "{#")):
            continue
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import SandboxedEnvironment

        try:
            SandboxedEnvironment().from_string(state.prompt)
        except TemplateSyntaxError as error:
            path: ConfigPath = ("states", name, "prompt")
            yield Finding(20, path, f"state '{name}': prompt is no Jinja template: {error.message}", error.lineno)


_LOCAL_RULES = (
    _outcomes,
    _never_raised,
    _shadowed,
    _cancelled,
    _waits,
    _arguments,
    _stop_reasons,
    _code,
    _trained,
    _keys,
    _finals,
    _initial,
    _nobody,
    _templates,
)
_PATH_RULES = (_unreachable, _endless, _cycles, _agents_as_tools)
