"""The numbered rules that an agent is held to before it runs.

Invariant: an agent with no problems here ends (:func:`fsm_rollout.agent.proof.prove` gives its bound), and every
trigger that can be raised in it has a transition or ends the trajectory by the machine's own. All rules are tried;
those about paths are left out while names are wrong, because what follows from a misspelt name is not worth reading.

| rule | what is wrong |
|---|---|
| 1 | a name that is not defined: a state, context, tool, handler, predicate, or a trigger that no state raises |
| 2 | a state that nothing leads to |
| 3 | a state from which no transitions lead to a final state |
| 4 | an outcome of a state's handler for which there is no transition (the scheduler's own triggers need none) |
| 5 | a transition whose source never raises its trigger (``timed_out`` without timeout, or no limit is reached) |
| 6 | the last transition for an outcome is conditional |
| 7 | a transition that can never fire: an earlier one takes all its cases, or its conditions never hold (at once) |
| 8 | a transition for ``cancelled`` |
| 9 | a cycle that spends nothing countable and has no ``max_visits``: it may never end |
| 10 | a limit that a cycle spends, or agents used as tools need, is not set: it may never end |
| 11 | a state that waits, with nothing to end the wait |
| 12 | a predicate's argument |
| 13 | a ``stop_reason`` on a transition that does not end the trajectory |
| 14 | a tool whose schema cannot be built, an interaction or a state's score that cannot be imported |
| 15 | a context of an untrained engine that is to be trained |
| 16 | a key that means nothing to the state's handler, or one that it needs |
| 17 | a final state that does things, or that transitions leave |
| 18 | an initial state that is final |
| 19 | a state that interacts, with nobody to answer |
| 20 | a prompt that is not a Jinja template, or names what no trajectory has |
| 21 | a transition that lets a model speak again right after its own finished turn, with nothing new to answer |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from weakref import WeakSet

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.rules import paths, states, transitions
from fsm_rollout.agent.rules.structure import Finding, Structure
from fsm_rollout.agent.yaml.source import SourceMap, in_file_order
from fsm_rollout.errors import Problem

_sound: WeakSet[AgentGraph] = WeakSet()  # agents in which nothing was found: they are not looked at again


def verify(graph: AgentGraph, source: SourceMap | None = None) -> list[Problem]:
    """Return every breach of the rules, in file order where ``source`` knows places; none means that it makes sense."""
    if graph in _sound:
        return []
    source = source or SourceMap()
    problems = [
        source.problem(finding.path, finding.message, finding.rule, finding.text_line) for finding in findings(graph)
    ]
    if not problems:
        _sound.add(graph)
    return in_file_order(problems)


OF_ONE_STATE = (14, 16, 17, 20)
"""Rules about one state by itself: they hold or not whatever else is wrong."""


def findings(graph: AgentGraph, *, of_states: bool = False) -> Iterator[Finding]:
    """Yield every breach of the rules (``of_states``: about names, and one state each), those of sub-agents too."""
    structure = Structure(graph)
    unknown = list(transitions.names(structure))
    yield from unknown
    rules = states.RULES if of_states else (*transitions.RULES, *states.RULES, *(() if unknown else paths.RULES))
    found = [finding for rule in rules for finding in rule(structure)]
    follow = (6, 21) if any(finding.path == ("transitions",) for finding in found) else ()  # where nothing ends it
    for finding in found:
        if finding.rule not in follow and (
            not of_states or (finding.rule in OF_ONE_STATE and finding.path[0] == "states")
        ):
            yield finding
    for name, tool in graph.tools.items():
        if tool.agent is not None:
            for finding in findings(tool.agent, of_states=of_states):
                message = f"tool '{name}': agent: {finding.message}"
                yield replace(finding, path=("tools", name, "agent", *finding.path), message=message)
