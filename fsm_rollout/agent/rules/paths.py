"""Rules about paths through the graph: 2, 3, 9, 10 and 21. They judge only graphs whose names are all defined."""

from __future__ import annotations

from collections.abc import Iterator

from fsm_rollout.agent.graph import TERMINATED, TransitionSpec
from fsm_rollout.agent.rules.structure import Finding, Structure, finding
from fsm_rollout.trajectory.config_errors import ConfigPath
from fsm_rollout.trajectory.enums import LimitName, Trigger


def _unreachable_or_endless(structure: Structure) -> Iterator[Finding]:
    """Yield rules 2 and 3."""
    reachable, can_end = structure.reachable(), structure.can_end()
    nothing_ends = all(map(structure.graph.is_final, can_end))  # one cause, however many states there are
    if nothing_ends:
        yield Finding(3, ("transitions",), f"no transition leads to a final state; add one with dest: {TERMINATED}")
    for state in structure.graph.states:
        if state not in reachable and state != TERMINATED:
            what = f" is never entered; add a transition with dest: {state}, or remove it"
            yield finding(2, ("states", state), what)
        elif state in reachable and state not in can_end and not nothing_ends:
            what = f" cannot end: no transitions lead from it to a final state; add one with dest: {TERMINATED}"
            yield finding(3, ("states", state), what)


def _cycles(structure: Structure) -> Iterator[Finding]:
    """Yield rule 9 or 10: a cycle that nothing counted bounds."""
    graph, limits, reachable = structure.graph, structure.graph.limits, structure.reachable()
    unbound = [s for s in structure.handlers if graph.states[s].max_visits is None and s in reachable]
    cycle = structure.cycle_within([s for s in unbound if structure.spends(s) is None])
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
            f"the cycle {' -> '.join(cycle)} may never end: {' and '.join(missing)} "
            f"{'is not set; set it' if len(missing) == 1 else 'are not set; set them'}, "
            "or give one of its states max_visits"
        )
        yield Finding(10, ("limits",), message)


def _agents_as_tools(structure: Structure) -> Iterator[Finding]:
    """Yield rule 10: agents used as tools, whose calls nothing bounds."""
    graph = structure.graph
    agents = [name for name, tool in graph.tools.items() if tool.agent is not None]
    callers = [s for s in structure.handlers if graph.handler_of(s) == "call_tools" or structure.is_custom(s)]
    if not agents or not callers:
        return
    if graph.limits.tool_calls is None:
        yield finding(10, ("tools", agents[0]), " is an agent, so its calls must be bounded; set limits.tool_calls")
        return
    routed = any(_routes_calls(row) and {*structure.sources(row)} & {*callers} for row in graph.transitions)
    for state in callers:
        if routed and graph.states[state].max_visits is not None:
            what = " has max_visits, so tool_calls no longer bounds its calls of agents once a 'limit_reached' "
            yield finding(10, ("states", state, "max_visits"), f"{what}transition has routed it; remove max_visits")


def _routes_calls(row: TransitionSpec) -> bool:
    """Whether a transition may take ``tool_calls`` when it was reached."""
    return row.trigger == Trigger.LIMIT_REACHED and all(
        (predicate.argument == LimitName.TOOL_CALLS) is answer
        for predicate, answer in row.tests
        if predicate.name == "limit"
    )


def nothing_new(structure: Structure) -> Iterator[Finding]:
    """Yield rule 21: a transition that lets a model speak again in a context where it has just spoken.

    What follows ``generated`` is a finished turn; a chat template has no way to put another one right after it. Only
    what is certain is reported: states that might write there (the user's own, tools, interactions) end the search.
    """
    graph = structure.graph
    reported: set[ConfigPath] = set()
    for start in structure.handlers:
        if graph.handler_of(start) != "generate":
            continue
        context = graph.states[start].context
        silent = [start]
        for state in silent:  # which grows meanwhile
            for place, row in structure.edges[state]:
                if state == start and row.trigger != Trigger.GENERATED:
                    continue
                if row.dest not in structure.handlers or _may_write(structure, row.dest, context):
                    continue
                if graph.handler_of(row.dest) != "generate" or graph.states[row.dest].context != context:
                    if row.dest not in silent:
                        silent.append(row.dest)
                    continue
                path: ConfigPath = ("states", state, "on_error") if place is None else ("transitions", place)
                if path not in reported:
                    reported.add(path)
                    spoken = f"'{start}' has let the model speak in context '{context}', and nothing answers"
                    remedy = f"give '{row.dest}' a prompt, or write a message on the way"
                    where = ": on_error: " if place is None else ": "
                    yield finding(21, path, f"{where}{spoken} before '{row.dest}' asks it again; {remedy}")


def _may_write(structure: Structure, state: str, context: str) -> bool:
    """Whether a visit of ``state`` may put messages into ``context``, or begin it anew."""
    spec, name = structure.graph.states[state], structure.graph.handler_of(state)
    if structure.is_custom(state) or name == "call_tools":
        return True
    return spec.context == context and (spec.prompt is not None or spec.reset or name == "interact")


RULES = (_unreachable_or_endless, _cycles, _agents_as_tools, nothing_new)
