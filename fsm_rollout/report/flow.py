"""What was walked of a graph: how often, in which order, how likely, and what came of it.

Invariants: an edge is one row of the graph from one of its sources, taken or not, or ``(source, trigger, dest)`` where
no row says which; every transition that happened is on exactly one edge. Journals from before transitions told their
row (none of a trajectory's does) go by the triple: to its row where only one has it, else to an edge of their own.
The picture's colours are the page's (CSS classes), so it follows light and dark.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from markupsafe import Markup

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.diagrams.draw import DrawingError, render
from fsm_rollout.diagrams.picture import ANY, FEW, conditions_of, shown
from fsm_rollout.report.pages import state_class
from fsm_rollout.report.recorded import Recorded
from fsm_rollout.report.token_texts import visible
from fsm_rollout.trajectory.events import Transitioned

SCORE_STEPS = 5
"""Colours on the scale of scores, 0 the lowest."""
ORDERS_SHOWN = 6
CONDITIONS_SHOWN = 40
"""Characters of an edge's conditions in the picture."""
WIDEST = 5.0
"""Points of an edge that is always taken."""

SMALLEST = 0.5
"""How far a picture is shrunk to fit: its text can still be read."""
WIDE = 1600
"""CSS pixels of a picture from left to right; what would be wider is drawn from top to bottom, as pages are read."""
_POINT = 4 / 3
"""CSS pixels."""

_Key = tuple[str, str, str, int | None]
"""Source, trigger, dest, and the row's place in ``transitions``; ``None`` where it stands in no list."""


@dataclass(slots=True)
class Edge:
    """One way from a state to the next."""

    source: str
    trigger: str
    dest: str
    asked: str = ""
    """The row's conditions, where other rows lead from the same state by the same trigger to the same place."""
    shared: bool = False
    """Whether its row leaves any state, and there are many: drawn where it was taken only."""
    order: list[int] = field(default_factory=list)
    """The steps (1, 2, …) of the first trajectory that took it."""
    count: int = 0
    scored: int = 0
    score_sum: float = 0.0

    @property
    def score(self) -> float | None:
        """The mean score of the trajectories that took it, each counted once."""
        return self.score_sum / self.scored if self.scored else None


class Flow:
    """A graph with its traffic: :meth:`add` each trajectory, none of which is kept."""

    def __init__(self, agent: str, graph: AgentGraph | None) -> None:
        self.agent = agent
        self.visits: Counter[str] = Counter()
        self.trajectories = 0
        self._edges: dict[_Key, Edge] = {}
        self._rows: defaultdict[tuple[str, str, str], list[_Key]] = defaultdict(list)
        """The rows of each triple."""
        self._states: dict[str, None] = dict.fromkeys(graph.states if graph is not None else ())
        self._left: Counter[str] = Counter()
        if graph is not None:
            self._declare(graph)

    def _declare(self, graph: AgentGraph) -> None:
        places = {id(row): place for place, row in enumerate(graph.transitions)}
        triggers = dict.fromkeys((*(row.trigger for row in graph.transitions), "failed"))
        found = [
            ((state, trigger, row.dest, places.get(id(row))), row)  # `on_error` is written at its state
            for state in graph.working_states
            for trigger in triggers
            for row in graph.rows_of(state, trigger)
        ]
        for key, _ in found:
            self._rows[key[:3]].append(key)
        many = len(graph.working_states) > FEW
        for key, row in found:
            self._edge(key).shared = many and ANY in row.source
            self._edge(key).asked = " and ".join(conditions_of(row)) if len(self._rows[key[:3]]) > 1 else ""

    def add(self, recorded: Recorded) -> None:
        """Count one trajectory in."""
        self.trajectories += 1
        self.visits.update(recorded.trajectory.visits)
        self._states |= dict.fromkeys(recorded.state_names)
        steps = [event for event in recorded.events if isinstance(event, Transitioned)]
        told = any(step.row is not None for step in steps)
        taken: set[_Key] = set()
        for place, step in enumerate(steps, 1):
            key = self._key(step, told)
            edge = self._edge(key)
            edge.count += 1
            self._left[step.source] += 1
            if self.trajectories == 1:
                edge.order.append(place)
            taken.add(key)
        score = recorded.trajectory.score
        for key in taken if score is not None else ():
            self._edges[key].scored += 1
            self._edges[key].score_sum += score or 0.0

    def _key(self, step: Transitioned, told: bool) -> _Key:
        triple = (step.source, step.trigger, step.dest)
        rows = self._rows.get(triple, [])
        return rows[0] if not told and len(rows) == 1 else (*triple, step.row)

    @property
    def states(self) -> list[str]:
        """The graph's states as declared, then any other that occurred."""
        return list(self._states)

    @property
    def edges(self) -> list[Edge]:
        """The graph's rows as declared, then what happened without a row."""
        return list(self._edges.values())

    def share(self, edge: Edge) -> float:
        """Return of all the times that the edge's source was left, how many went this way; 0 when it never was."""
        return edge.count / self._left[edge.source] if self._left[edge.source] else 0.0

    def _edge(self, key: _Key) -> Edge:
        self._states |= {key[0]: None, key[2]: None}
        return self._edges.setdefault(key, Edge(*key[:3]))


def path_picture(traffic: Flow) -> Markup | None:
    """Return the SVG of one trajectory's path: visit counts in the states, the order of steps on the edges."""
    return _picture(
        traffic, {id(edge): (_orders(edge.order), 1.2 + 0.5 * min(edge.count, 4), "") for edge in traffic.edges}
    )


def traffic_picture(traffic: Flow) -> Markup | None:
    """Return the SVG of many trajectories: an edge's width is its probability, its colour the mean score."""
    means = [edge.score for edge in traffic.edges if edge.score is not None]
    low, high = min(means, default=0.0), max(means, default=0.0)
    looks = {}
    for edge in traffic.edges:
        text = f"{traffic.share(edge):.0%}" if edge.count else ""
        step = ""
        if edge.score is not None and high > low:
            step = f" score{round((edge.score - low) / (high - low) * (SCORE_STEPS - 1))}"
        looks[id(edge)] = (text, 0.8 + (WIDEST - 0.8) * traffic.share(edge), step)
    return _picture(traffic, looks)


def _picture(traffic: Flow, looks: Mapping[int, tuple[str, float, str]]) -> Markup | None:
    drawn = [edge for edge in traffic.edges if edge.count or not edge.shared]
    back = {(edge.dest, edge.source) for edge in drawn}
    onward = {edge.source for edge in drawn if (edge.source, edge.dest) not in back}
    lines = [
        'bgcolor="transparent"; nodesep=0.35; ranksep=0.45; pad=0.1;',
        'node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=12, margin="0.16,0.08"];',
        'edge [fontname="Helvetica", fontsize=10, arrowsize=0.7];',
    ]
    numbers = {state: f"n{place}" for place, state in enumerate(traffic.states)}
    for state, name in numbers.items():
        visits = traffic.visits[state]
        used = "used" if visits else "unused"
        label = f"{visible(state)}\n{visits:,} ×" if visits else visible(state)
        lines.append(f'{name} [label={_quoted(label)}, class="state {used} {state_class(state)}"];')
    for edge in drawn:
        text, width, step = looks[id(edge)]
        asked = f"[{shown(edge.asked, CONDITIONS_SHOWN)}]" if edge.asked else ""
        label = _beside([visible(edge.trigger), *filter(None, (asked, text))], width)
        used = "used" if edge.count else "unused"
        lines.append(
            f"{numbers[edge.source]} -> {numbers[edge.dest]} [label={label}, penwidth={width:.2f}, "
            # What leads on is straight, and what only leads there and back is beside it.
            f'class="row {used}{step}", weight={8 if edge.dest in onward else 1}];'
        )
    try:
        return _svg("\n".join(lines))
    except DrawingError:  # there is no Graphviz, or it fails: the page has a table alone
        return None


def _svg(body: str) -> Markup:
    """Lay out with Graphviz, from left to right where there is room for that."""
    for direction in ("LR", "TB"):
        drawn = render(f"digraph {{ rankdir={direction};\n{body}\n}}", "svg").decode("utf-8")
        drawn = drawn[drawn.index("<svg") :]
        found = re.search(r'<svg width="(\d+)pt"', drawn)
        width = int(found[1]) * _POINT if found else 0.0
        if width <= WIDE:
            break
    # What is wider than the page when it has been shrunk as far as can be read is scrolled.
    return Markup(f'<svg style="min-width:{width * SMALLEST:.0f}px"{drawn.removeprefix("<svg")}')


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _beside(lines: Sequence[str], width: float) -> str:
    """Return a label that keeps clear of its edge: Graphviz places labels as if every line were hair-thin."""
    text = "<BR/>".join(map(escape, lines))
    clear = f'BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="{round(1 + width / 2)}"'
    return f"<<TABLE {clear}><TR><TD>{text}</TD></TR></TABLE>>"


def _orders(order: Sequence[int]) -> str:
    shown = ", ".join(map(str, order[:ORDERS_SHOWN]))
    return f"{shown}, … ({len(order)} ×)" if len(order) > ORDERS_SHOWN else shown
