"""What a picture of an agent says, before any format: boxes, arrows, a caption.

Invariant: every row of the graph is one :class:`Label` on one :class:`Arrow` per state that it leaves (one arrow from
:data:`ANY` where a ``*`` row leaves many), and nothing else is, unless it is marked implicit. Texts here are plain and
complete; formats shorten and escape them.

A graph that does not pass verification can be drawn too: a picture helps to see what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fsm_rollout.agent.graph import IMPLICIT_TRIGGERS, MAIN, POLICY, TERMINATED, AgentGraph, Predicate, TransitionRow
from fsm_rollout.agent.proof import prove
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.errors import ConfigError
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
    implicit: bool = False
    """The machine's own last rows, which no user wrote."""


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is drawn."""

    agent: str
    description: str
    initial: str
    declared: tuple[str, ...]
    """States in the order that colours go by."""
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    bound: str
    """The proven bound, in words."""


def picture(graph: AgentGraph, *, implicit: bool = False) -> Picture:
    """Return the picture of ``graph``; ``implicit`` adds the ends that the machine has without a row."""
    structure = Structure(graph)
    arrows = [*_arrows(structure), *(_implicit(structure) if implicit else ())]
    names = dict.fromkeys([*graph.states, *(name for arrow in arrows for name in (arrow.source, arrow.dest))])
    return Picture(
        agent=graph.agent,
        description=graph.description,
        initial=graph.initial,
        declared=tuple(graph.states),
        boxes=tuple(_box(structure, name) for name in names),
        arrows=tuple(arrows),
        bound=_bound(graph),
    )


def _bound(graph: AgentGraph) -> str:
    try:
        return f"proven: {prove(graph)}"
    except (ConfigError, KeyError):  # the second: it names states that it does not have
        return "not proven to end"


def _box(structure: Structure, name: str) -> Box:
    graph = structure.graph
    if name == ANY:
        return Box(name, "any")
    if name == TERMINATED or (name in graph.states and graph.states[name].final):
        return Box(name, "final")
    spec = structure.specs.get(name)
    if spec is None:
        return Box(name, "undefined")
    state, context = graph.states[name], graph.context(graph.states[name].context)
    samples = spec.spends == "assistant_turns"  # of a handler of the user's that spends nothing, nothing is known
    where = "" if state.context == MAIN else f" in {state.context}"
    if samples and context.engine != POLICY:
        where += f" by {context.engine}"
    return Box(
        name,
        "working",
        handler=(spec.name.rpartition(":")[2] if ":" in spec.name else spec.name) + where,
        lines=tuple(_facts(graph, name, spec.name, spec.spends)),
        trained=context.trained if samples else None,
    )


def _facts(graph: AgentGraph, name: str, handler: str, spends: str | None) -> Iterator[str]:
    state, limits = graph.states[name], graph.limits.model_dump()
    calls = spends == "tool_calls" or (":" in handler and spends == "assistant_turns")
    if calls and (tools := graph.tools_of(state.context)):
        yield ", ".join(_tool(graph, name) for name in tools)
    if handler == "interact" and (interaction := state.interaction or graph.interaction):
        yield interaction.use.rpartition(":")[2]
    charged = [spends, *(["bad_calls"] if handler == "call_tools" else [])]
    for limit in charged:
        if limit is not None and limits.get(limit) is not None:
            yield f"{limit} ≤ {limits[limit]}"
        elif limit == spends and limit is not None:
            yield f"{limit}, no limit"
    if state.max_visits is not None:
        yield f"max_visits ≤ {state.max_visits}"
    if state.sampling.max_tokens is not None:
        yield f"max_tokens ≤ {state.sampling.max_tokens:,}"
    if state.timeout is not None:
        yield f"timeout {state.timeout:,g} s"
    if state.reset:
        yield "opens a new stream"


def _tool(graph: AgentGraph, name: str) -> str:
    tool = graph.tools.get(name)
    return name if tool is None or tool.agent is None else f"{name} (agent {tool.agent.agent})"


def _arrows(structure: Structure) -> Iterator[Arrow]:
    """Yield the arrows of what the user wrote, in the order in which the rows stand."""
    graph = structure.graph
    rows = [(row, structure.sources(row)) for row in graph.transitions]
    rows += [
        (TransitionRow(trigger="failed", source=(name,), dest=state.on_error), (name,))
        for name, state in graph.states.items()
        if state.on_error is not None and name in graph.working_states
    ]
    takers: dict[tuple[str, str], int] = {}
    for row, sources in rows:
        for source in sources:
            takers[source, row.trigger] = takers.get((source, row.trigger), 0) + 1
    seen: dict[tuple[str, str], int] = {}
    labels: dict[tuple[str, str], list[Label]] = {}
    for row, sources in rows:
        places = []
        for source in sources:
            seen[source, row.trigger] = place = seen.get((source, row.trigger), 0) + 1
            places.append((source, place if takers[source, row.trigger] > 1 else None))
        if ANY in row.source and len(places) > FEW:
            labels.setdefault((ANY, row.dest), []).append(_label(graph, row, None))
            places = []
        for source, order in places:
            labels.setdefault((source, row.dest), []).append(_label(graph, row, order))
    for (source, dest), stacked in labels.items():
        yield Arrow(source, dest, tuple(stacked))


def _label(graph: AgentGraph, row: TransitionRow, order: int | None) -> Label:
    final = row.dest == TERMINATED or (row.dest in graph.states and graph.states[row.dest].final)
    return Label(
        trigger=row.trigger,
        order=order,
        conditions=conditions_of(row),
        stop_reason=(row.stop_reason or _reason(row.trigger, row.conditions)) if final else None,
    )


def conditions_of(row: TransitionRow) -> tuple[str, ...]:
    """Return what must all hold for a row to fire, in words."""
    return (*map(_asked, row.conditions), *(f"not {_asked(predicate)}" for predicate in row.unless))


def _reason(trigger: str, conditions: Sequence[Predicate]) -> str:
    """Return the stop reason of a row that names none; ``…`` stands for what only a run knows."""
    asked = [predicate.argument for predicate in conditions if predicate.name == "limit"]
    limit = asked[0] if asked and isinstance(asked[0], str) else "…"
    return Outcome(trigger, limit=limit, error="…").stop_reason


def shown(text: str, width: int) -> str:
    """Return ``text`` on one line of at most ``width`` characters, with what cannot be printed written as an escape."""
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _asked(predicate: Predicate) -> str:
    if predicate.argument is None:
        return predicate.name
    if predicate.name in ("limit", "tool_called"):  # these name something, the others quote a text
        return f"{predicate.name} {predicate.argument}"
    return f"{predicate.name} {_value(predicate.argument)}"


def _value(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def _implicit(structure: Structure) -> Iterator[Arrow]:
    """Yield the ends that need no row: one arrow per state with all the triggers that end it where no row holds."""
    working = structure.graph.working_states
    if len(working) > FEW:
        yield Arrow(ANY, TERMINATED, tuple(Label(trigger) for trigger in IMPLICIT_TRIGGERS), implicit=True)
        return
    for state in working:
        left = [trigger for trigger in IMPLICIT_TRIGGERS if structure.may_raise(state, trigger)]
        left = [trigger for trigger in left if not _always_taken(structure, state, trigger)]
        yield Arrow(state, TERMINATED, tuple(Label(trigger) for trigger in left), implicit=True)


def _always_taken(structure: Structure, state: str, trigger: str) -> bool:
    """Whether a row takes ``trigger`` whatever holds; a limit is routed once only, the second time it ends the run."""
    rows = structure.graph.rows_of(state, trigger)
    return trigger not in ("limit_reached", "cancelled") and any(not (row.conditions or row.unless) for row in rows)
