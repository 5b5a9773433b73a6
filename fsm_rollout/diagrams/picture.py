"""What a picture of an agent says, before any format: boxes, arrows, a caption.

Invariant: every transition of the graph is one :class:`Label` on one :class:`Arrow` per state that it leaves (one from
:data:`ANY` where a ``*`` transition leaves many), and nothing else is, unless it is marked implicit. Texts here are
plain and complete; formats shorten and escape them.

A graph that does not pass verification can be drawn too: a picture helps to see what is wrong with it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from fsm_rollout.agent.graph import MAIN, POLICY, TERMINATED, AgentGraph, ToolSpec, TransitionSpec
from fsm_rollout.agent.limits import LIMITS
from fsm_rollout.agent.proof import prove
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.diagrams.palette import PALE, Colour, colour_of
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.enums import IMPLICIT_TRIGGERS, LimitName, Trigger
from fsm_rollout.trajectory.outcome import Outcome

ANY = "*"  # stands for every working state, where drawing each transition from each of them would hide the rest
FEW = 6  # up to this many arrows are drawn for a transition that leaves any state


class Values(Protocol):
    """What a run was worth, in words, as it is written on a picture."""

    about: str
    """What these values are of."""

    def of_state(self, name: str) -> str:
        """Return what being there was worth; empty where that is not known."""

    def of_transition(self, sources: Collection[str], trigger: str, dest: str, row: int | None) -> tuple[str, float]:
        """Return what going this way was worth, and how often it was gone of all times that it could be, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Box:
    """One state, or :data:`ANY`."""

    name: str
    kind: Literal["working", "final", "undefined", "any"]
    colour: Colour
    handler: str = ""
    lines: tuple[str, ...] = ()  # what a visit is charged for and bounded by, most telling first
    trained: bool | None = None  # whether what it samples is trained on; `None` where nothing is known to be sampled
    value: str = ""  # over a run, if the picture is of one


@dataclass(frozen=True, slots=True)
class Label:
    """One transition, as it stands on an arrow."""

    trigger: str
    # Its place among the transitions that may take the same trigger in the same state, where there are several.
    order: int | None = None
    conditions: tuple[str, ...] = ()  # must all hold
    stop_reason: str | None = None  # how a trajectory that takes it has ended
    value: str = ""  # over a run, if the picture is of one
    share: float | None = None  # of all times that it could be taken in that run


@dataclass(frozen=True, slots=True)
class Arrow:
    """The transitions from one state to another."""

    source: str
    dest: str
    labels: tuple[Label, ...]
    colour: Colour
    implicit: bool = False  # the machine's own last transitions, which no user wrote

    @property
    def share(self) -> float | None:
        """How often a run went this way, 0 to 1; ``None``: the picture is of no run."""
        shares = [label.share for label in self.labels if label.share is not None]
        return sum(shares) if shares else None


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is drawn."""

    graph: AgentGraph
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    bound: str  # the proven bound, in words
    about: str = ""  # what values are of


def picture(graph: AgentGraph, *, implicit: bool = False, values: Values | None = None) -> Picture:
    """Return the picture of ``graph``; ``implicit`` adds the ends that the machine has without a transition.

    With ``values`` it also says what a run was worth: in its states, and where it went from them.
    """
    structure = Structure(graph)
    arrows = [*_arrows(structure, values), *(_implicit_arrows(structure) if implicit else ())]
    names = dict.fromkeys([*graph.states, *(name for arrow in arrows for name in (arrow.source, arrow.dest))])
    try:
        bound = f"proven: {prove(graph)}"
    except ConfigError:
        bound = "not proven to end"
    boxes = tuple(_box(structure, name, values) for name in names)
    return Picture(graph, boxes, tuple(arrows), bound, values.about if values else "")


def _colour(graph: AgentGraph, name: str) -> Colour:
    return colour_of(name, tuple(graph.states)) if name in graph.states or graph.is_final(name) else PALE


def _box(structure: Structure, name: str, values: Values | None) -> Box:
    graph, declared, colour = structure.graph, structure.handlers.get(name), _colour(structure.graph, name)
    if declared is None:
        return Box(name, "any" if name == ANY else "final" if graph.is_final(name) else "undefined", colour)
    state, context = graph.states[name], graph.context(graph.states[name].context)
    samples = (
        declared.spends == LimitName.ASSISTANT_TURNS
    )  # a handler of the user's that spends nothing may sample or not
    handler = graph.handler_of(name).rpartition(":")[2]
    if state.context != MAIN:
        handler += f" in {state.context}"
    if samples and context.engine != POLICY:
        handler += f" by {context.engine}"
    facts = tuple(_facts(graph, name, graph.handler_of(name), declared.spends))
    value = values.of_state(name) if values else ""
    return Box(name, "working", colour, handler, facts, trained=context.trained if samples else None, value=value)


def _facts(graph: AgentGraph, name: str, handler: str, spends: str | None) -> Iterator[str]:
    state, limits = graph.states[name], graph.limits.model_dump()
    calls = spends == LimitName.TOOL_CALLS or (":" in handler and spends == LimitName.ASSISTANT_TURNS)
    if calls and (tools := graph.tools_of(state.context)):
        yield ", ".join(f"{name}{_kind(graph.tools[name])}" for name in tools)
    if handler == "external":
        yield " ".join(map(str, state.options.get("command") or [state.options.get("use")]))
        yield f"speaks {state.options.get('dialect', 'openai')}"
    if handler == "interact" and (interaction := state.interaction or graph.interaction):
        yield interaction.use.rpartition(":")[2]
    for limit, row in LIMITS.items():
        if limits.get(limit) is not None and (limit == spends or row.handler == handler):
            yield f"{limit} ≤ {limits[limit]}"
        elif limit == spends:
            yield f"{limit}, no limit"
    words = ("max_visits ≤ {}", "max_tokens ≤ {:,}", "timeout {:,g} s")
    for text, bound in zip(words, (state.max_visits, state.sampling.max_tokens, state.timeout), strict=True):
        if bound is not None:
            yield text.format(bound)
    if state.reset:
        yield "opens a new stream"


def _kind(tool: ToolSpec) -> str:
    if tool.agent is not None:
        return f" (agent {tool.agent.agent})"
    return " (MCP)" if tool.mcp is not None else " (verifiers)" if tool.verifiers is not None else ""


def _arrows(structure: Structure, values: Values | None) -> Iterator[Arrow]:
    """Yield the arrows of what the user wrote, in the order in which the transitions stand."""
    graph = structure.graph
    rows: list[tuple[int | None, TransitionSpec, Sequence[str]]] = []
    rows += [(place, row, structure.sources(row)) for place, row in enumerate(graph.transitions)]
    for name in graph.working_states:
        rows += [(place, row, (name,)) for place, row in graph.rows_of(name, Trigger.FAILED) if place is None]
    rivals = Counter((source, row.trigger) for _, row, sources in rows for source in sources)
    seen: Counter[tuple[str, str]] = Counter()
    labels: defaultdict[tuple[str, str], list[Label]] = defaultdict(list)
    for place, row, sources in rows:
        seen.update((source, row.trigger) for source in sources)
        together = ANY in row.source and len(sources) > FEW
        for source in (ANY,) if together else sources:
            order = seen[source, row.trigger] if not together and rivals[source, row.trigger] > 1 else None
            label = _label(graph, row, order)
            if values is not None:
                value, share = values.of_transition(sources if together else (source,), row.trigger, row.dest, place)
                label = replace(label, value=value, share=share)
            labels[source, row.dest].append(label)
    for (source, dest), stacked in labels.items():
        taken = values is None or any(label.share for label in stacked)
        yield Arrow(source, dest, tuple(stacked), _colour(graph, source) if taken else PALE)


def _label(graph: AgentGraph, row: TransitionSpec, order: int | None) -> Label:
    """Return what stands on an arrow for a transition; ``…`` in a stop reason stands for what only a run knows."""
    limit = next((str(p.argument) for p in row.conditions if p.name == "limit"), "…")
    reason = row.stop_reason or Outcome(row.trigger, limit=limit, error="…").stop_reason
    return Label(row.trigger, order, conditions_of(row), reason if graph.is_final(row.dest) else None)


def conditions_of(row: TransitionSpec) -> tuple[str, ...]:
    """Return what must all hold for a transition to fire, in words."""
    return tuple(str(predicate) if answer else f"not {predicate}" for predicate, answer in row.tests)


def shown(text: str, width: int) -> str:
    """Return ``text`` on one line of at most ``width`` characters, with what cannot be printed written as an escape."""
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _implicit_arrows(structure: Structure) -> Iterator[Arrow]:
    """Yield the ends that need no transition: one arrow per state with all triggers that end it where none holds."""
    graph = structure.graph
    if len(graph.working_states) > FEW:
        yield Arrow(ANY, TERMINATED, tuple(map(Label, IMPLICIT_TRIGGERS)), PALE, implicit=True)
        return
    for state in graph.working_states:
        # A limit is routed once only; the second time it ends the run, whatever transitions there are.
        raised = [trigger for trigger in IMPLICIT_TRIGGERS if structure.may_raise(state, trigger)]
        always = {trigger for trigger in raised for _, row in graph.rows_of(state, trigger) if not row.tests}
        always -= {Trigger.LIMIT_REACHED, Trigger.CANCELLED}
        labels = tuple(Label(trigger) for trigger in raised if trigger not in always)
        yield Arrow(state, TERMINATED, labels, PALE, implicit=True)
