"""What a picture of an agent says, before any format: boxes, arrows, a caption.

Invariant: every row of the graph is one :class:`Label` on one :class:`Arrow` per state that it leaves (one arrow from
:data:`ANY` where a ``*`` row leaves many), and nothing else is, unless it is marked implicit. Texts here are plain and
complete; formats shorten and escape them.

A graph that does not pass verification can be drawn too: a picture helps to see what is wrong with it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fsm_rollout.agent.graph import MAIN, POLICY, TERMINATED, AgentGraph, Predicate, TransitionRow
from fsm_rollout.agent.limits import LIMITS
from fsm_rollout.agent.proof import prove
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.diagrams.palette import PALE, Colour, colour_of
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.reasons import IMPLICIT_TRIGGERS, LimitName, Trigger
from fsm_rollout.trajectory.trajectory import Outcome

ANY = "*"
"""Stands for every working state, where drawing each row from each of them would hide the rest."""
FEW = 6
"""Up to this many arrows are drawn for a row that leaves any state."""


@dataclass(frozen=True, slots=True)
class Box:
    """One state, or :data:`ANY`."""

    name: str
    kind: Literal["working", "final", "undefined", "any"]
    colour: Colour
    handler: str = ""
    lines: tuple[str, ...] = ()
    """What a visit is charged for and bounded by, most telling first."""
    trained: bool | None = None
    """Whether what it samples is trained on; ``None`` where nothing is sampled, or not known to be."""


@dataclass(frozen=True, slots=True)
class Label:
    """One row, as it stands on an arrow."""

    trigger: str
    order: int | None = None
    """Its place among the rows that may take the same trigger in the same state, where there are several."""
    conditions: tuple[str, ...] = ()
    """Must all hold."""
    stop_reason: str | None = None
    """How a trajectory that takes it has ended."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """The rows from one state to another."""

    source: str
    dest: str
    labels: tuple[Label, ...]
    colour: Colour
    implicit: bool = False
    """The machine's own last rows, which no user wrote."""


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is drawn."""

    agent: str
    description: str
    initial: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    bound: str
    """The proven bound, in words."""


def picture(graph: AgentGraph, *, implicit: bool = False) -> Picture:
    """Return the picture of ``graph``; ``implicit`` adds the ends that the machine has without a row."""
    structure = Structure(graph)
    arrows = [*_arrows(structure), *(_implicit_arrows(structure) if implicit else ())]
    names = dict.fromkeys([*graph.states, *(name for arrow in arrows for name in (arrow.source, arrow.dest))])
    try:
        bound = f"proven: {prove(graph)}"
    except ConfigError:
        bound = "not proven to end"
    boxes = tuple(_box(structure, name) for name in names)
    return Picture(graph.agent, graph.description, graph.initial, boxes, tuple(arrows), bound)


def _is_final(graph: AgentGraph, name: str) -> bool:
    return name == TERMINATED or (name in graph.states and graph.states[name].final)


def _colour(graph: AgentGraph, name: str) -> Colour:
    return colour_of(name, tuple(graph.states)) if name in graph.states or _is_final(graph, name) else PALE


def _box(structure: Structure, name: str) -> Box:
    graph, colour = structure.graph, _colour(structure.graph, name)
    if name == ANY:
        return Box(name, "any", colour)
    if _is_final(graph, name):
        return Box(name, "final", colour)
    spec = structure.specs.get(name)
    if spec is None:
        return Box(name, "undefined", colour)
    state, context = graph.states[name], graph.context(graph.states[name].context)
    samples = spec.spends == LimitName.ASSISTANT_TURNS  # a handler of the user's that spends nothing may sample or not
    where = "" if state.context == MAIN else f" in {state.context}"
    if samples and context.engine != POLICY:
        where += f" by {context.engine}"
    return Box(
        name,
        "working",
        colour,
        handler=(spec.name.rpartition(":")[2] if ":" in spec.name else spec.name) + where,
        lines=tuple(_facts(graph, name, spec.name, spec.spends)),
        trained=context.trained if samples else None,
    )


def _facts(graph: AgentGraph, name: str, handler: str, spends: str | None) -> Iterator[str]:
    state, limits = graph.states[name], graph.limits.model_dump()
    calls = spends == LimitName.TOOL_CALLS or (":" in handler and spends == LimitName.ASSISTANT_TURNS)
    if calls and (tools := graph.tools_of(state.context)):
        agents = {name: tool.agent.agent for name, tool in graph.tools.items() if tool.agent is not None}
        yield ", ".join(f"{name} (agent {agents[name]})" if name in agents else name for name in tools)
    if handler == "interact" and (interaction := state.interaction or graph.interaction):
        yield interaction.use.rpartition(":")[2]
    for limit in (name for name, row in LIMITS.items() if name == spends or row.handler == handler):
        if limits.get(limit) is not None:
            yield f"{limit} ≤ {limits[limit]}"
        elif limit == spends:
            yield f"{limit}, no limit"
    if state.max_visits is not None:
        yield f"max_visits ≤ {state.max_visits}"
    if state.sampling.max_tokens is not None:
        yield f"max_tokens ≤ {state.sampling.max_tokens:,}"
    if state.timeout is not None:
        yield f"timeout {state.timeout:,g} s"
    if state.reset:
        yield "opens a new stream"


def _arrows(structure: Structure) -> Iterator[Arrow]:
    """Yield the arrows of what the user wrote, in the order in which the rows stand."""
    graph = structure.graph
    rows = [(row, structure.sources(row)) for row in graph.transitions]
    rows += [
        (TransitionRow(trigger=Trigger.FAILED, source=(name,), dest=state.on_error), (name,))
        for name, state in graph.states.items()
        if state.on_error is not None and name in graph.working_states
    ]
    rivals = Counter((source, row.trigger) for row, sources in rows for source in sources)
    seen: Counter[tuple[str, str]] = Counter()
    labels: defaultdict[tuple[str, str], list[Label]] = defaultdict(list)
    for row, sources in rows:
        seen.update((source, row.trigger) for source in sources)
        if ANY in row.source and len(sources) > FEW:
            labels[ANY, row.dest].append(_label(graph, row, None))
            continue
        for source in sources:
            order = seen[source, row.trigger] if rivals[source, row.trigger] > 1 else None
            labels[source, row.dest].append(_label(graph, row, order))
    for (source, dest), stacked in labels.items():
        yield Arrow(source, dest, tuple(stacked), _colour(graph, source))


def _label(graph: AgentGraph, row: TransitionRow, order: int | None) -> Label:
    """Return what stands on an arrow for a row; ``…`` in a stop reason stands for what only a run knows."""
    limits = [predicate.argument for predicate in row.conditions if predicate.name == "limit"]
    limit = limits[0] if limits and isinstance(limits[0], str) else "…"
    reason = row.stop_reason or Outcome(row.trigger, limit=limit, error="…").stop_reason
    return Label(row.trigger, order, conditions_of(row), reason if _is_final(graph, row.dest) else None)


def conditions_of(row: TransitionRow) -> tuple[str, ...]:
    """Return what must all hold for a row to fire, in words."""
    return (*map(_condition, row.conditions), *(f"not {_condition(predicate)}" for predicate in row.unless))


def shown(text: str, width: int) -> str:
    """Return ``text`` on one line of at most ``width`` characters, with what cannot be printed written as an escape."""
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _condition(predicate: Predicate) -> str:
    if predicate.argument is None:
        return predicate.name
    if predicate.name in ("limit", "tool_called"):  # these name something, the others quote a text
        return f"{predicate.name} {predicate.argument}"
    return f"{predicate.name} {_argument(predicate.argument)}"


def _argument(value: object) -> str:
    match value:
        case str():
            return f'"{value}"'
        case dict():
            return ", ".join(f"{key}: {_argument(item)}" for key, item in value.items())
        case list() | tuple():
            return ", ".join(map(_argument, value))
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case _:
            return f"{value}"


def _implicit_arrows(structure: Structure) -> Iterator[Arrow]:
    """Yield the ends that need no row: one arrow per state with all the triggers that end it where no row holds."""
    working = structure.graph.working_states
    if len(working) > FEW:
        yield Arrow(ANY, TERMINATED, tuple(map(Label, IMPLICIT_TRIGGERS)), PALE, implicit=True)
        return
    for state in working:
        triggers = [trigger for trigger in IMPLICIT_TRIGGERS if structure.may_raise(state, trigger)]
        labels = tuple(Label(trigger) for trigger in triggers if not _always_taken(structure, state, trigger))
        yield Arrow(state, TERMINATED, labels, PALE, implicit=True)


def _always_taken(structure: Structure, state: str, trigger: str) -> bool:
    """Whether a row takes ``trigger`` whatever holds; a limit is routed once only, the second time it ends the run."""
    rows = structure.graph.rows_of(state, trigger)
    return trigger not in (Trigger.LIMIT_REACHED, Trigger.CANCELLED) and any(not row.tests for _, row in rows)
