"""Rules about paths through the graph: 2, 3, 9 and 10. They judge only graphs whose names are all defined."""

from __future__ import annotations

from collections.abc import Iterator

from fsm_rollout.graph import TERMINATED
from fsm_rollout.rules.finding import Finding
from fsm_rollout.rules.structure import Structure


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
            f"the cycle {' -> '.join(cycle)} may never end: {' and '.join(missing)} is not set; "
            "set it, or give one of its states max_visits"
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
    routed = any(row.trigger == "limit_reached" for row in graph.transitions)
    for state in callers:
        if routed and graph.states[state].max_visits is not None:
            message = (
                f"state '{state}' has max_visits, so tool_calls no longer bounds its calls of agents once a "
                "'limit_reached' row has routed it; remove max_visits"
            )
            yield Finding(10, ("states", state, "max_visits"), message)


RULES = (unreachable, endless, cycles, agents_as_tools)
