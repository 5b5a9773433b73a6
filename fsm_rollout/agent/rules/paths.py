"""Rules about paths through the graph: 2, 3, 9, 10 and 21. They judge only graphs whose names are all defined."""

from __future__ import annotations

from collections.abc import Iterator

from fsm_rollout.agent.graph import TERMINATED, TransitionRow
from fsm_rollout.agent.rules.finding import Finding
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.trajectory.model_errors import ConfigPath
from fsm_rollout.trajectory.reasons import Trigger


def unreachable(structure: Structure) -> Iterator[Finding]:
    """Yield rule 2: a state that nothing leads to."""
    reachable = structure.reachable()
    for state in structure.graph.states:
        if state not in reachable and state != TERMINATED:
            message = f"state '{state}' is never entered; add a row with dest: {state}, or remove it"
            yield Finding(2, ("states", state), message)


def endless(structure: Structure) -> Iterator[Finding]:
    """Yield rule 3: a state from which no rows lead to a final state."""
    can_end, reachable = structure.can_end(), structure.reachable()
    for state in structure.graph.states:
        if state in reachable and state not in can_end:
            message = (
                f"state '{state}' cannot end: no rows lead from it to a final state; add one with dest: {TERMINATED}"
            )
            yield Finding(3, ("states", state), message)


def cycles(structure: Structure) -> Iterator[Finding]:
    """Yield rule 9 and 10: cycles that nothing counted bounds."""
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
            f"the cycle {' -> '.join(cycle)} may never end: {' and '.join(missing)} "
            f"{'is not set; set it' if len(missing) == 1 else 'are not set; set them'}, "
            "or give one of its states max_visits"
        )
        yield Finding(10, ("limits",), message)


def agents_as_tools(structure: Structure) -> Iterator[Finding]:
    """Yield rule 10: agents used as tools, whose calls nothing bounds."""
    graph = structure.graph
    agents = [name for name, tool in graph.tools.items() if tool.agent is not None]
    callers = [s for s, spec in structure.specs.items() if spec.name == "call_tools" or structure.is_custom(s)]
    if not agents or not callers:
        return
    if graph.limits.tool_calls is None:
        message = f"tool '{agents[0]}' is an agent, so its calls must be bounded; set limits.tool_calls"
        yield Finding(10, ("tools", agents[0]), message)
        return
    routed = any(_routes(row, "tool_calls") and {*structure.sources(row)} & {*callers} for row in graph.transitions)
    for state in callers:
        if routed and graph.states[state].max_visits is not None:
            message = (
                f"state '{state}' has max_visits, so tool_calls no longer bounds its calls of agents once a "
                "'limit_reached' row has routed it; remove max_visits"
            )
            yield Finding(10, ("states", state, "max_visits"), message)


def _routes(row: TransitionRow, limit: str) -> bool:
    """Whether a row may take a limit that was reached."""
    wanted = [(predicate, True) for predicate in row.conditions] + [(predicate, False) for predicate in row.unless]
    return row.trigger == Trigger.LIMIT_REACHED and all(
        (predicate.argument == limit) is holds for predicate, holds in wanted if predicate.name == "limit"
    )


def nothing_new(structure: Structure) -> Iterator[Finding]:
    """Yield rule 21: a row that lets a model speak again in a context where it has just spoken.

    What follows ``generated`` is a finished turn; a chat template has no way to put another one right after it. Only
    what is certain is reported: states that might write there (the user's own, tools, interactions) end the search.
    """
    graph = structure.graph
    reported: set[ConfigPath] = set()
    for start, spec in structure.specs.items():
        if spec.name != "generate":
            continue
        context = graph.states[start].context
        silent, queue = {start}, [start]
        while queue:
            state = queue.pop()
            for row in structure.edges(state):
                if state == start and row.trigger != Trigger.GENERATED:
                    continue
                if row.dest not in structure.specs or _may_write(structure, row.dest, context):
                    continue
                if structure.specs[row.dest].name == "generate" and graph.states[row.dest].context == context:
                    found = _speaks_again(structure, row, state, start)
                    if found.path not in reported:
                        reported.add(found.path)
                        yield found
                elif row.dest not in silent:
                    silent.add(row.dest)
                    queue.append(row.dest)


def _may_write(structure: Structure, state: str, context: str) -> bool:
    """Whether a visit of ``state`` may put messages into ``context``, or begin it anew."""
    spec, name = structure.graph.states[state], structure.specs[state].name
    if structure.is_custom(state) or name == "call_tools":
        return True
    return spec.context == context and (spec.prompt is not None or spec.reset or name == "interact")


def _speaks_again(structure: Structure, row: TransitionRow, source: str, start: str) -> Finding:
    index = next((i for i, each in enumerate(structure.graph.transitions) if each is row), None)
    path: ConfigPath = ("states", source, "on_error") if index is None else ("transitions", index)
    where = f"state '{source}': on_error" if index is None else f"row {index + 1}"
    message = (
        f"{where}: '{start}' has let the model speak in context '{structure.graph.states[start].context}', and nothing "
        f"answers before '{row.dest}' asks it again; give '{row.dest}' a prompt, or write a message on the way"
    )
    return Finding(21, path, message)


RULES = (unreachable, endless, cycles, agents_as_tools, nothing_new)
