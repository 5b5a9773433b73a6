"""What was walked of a graph: how often, in which order, how likely, and what came of it.

Invariants: an edge is ``(source, trigger, dest)``; every transition that happened is on exactly one edge, and every row
of the graph is an edge, taken or not. The picture's colours are the page's (CSS classes), so it follows light and dark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from markupsafe import Markup

from fsm_rollout.diagrams.pages import state_class
from fsm_rollout.diagrams.recorded import Recorded
from fsm_rollout.diagrams.renderer import DrawingError, render
from fsm_rollout.diagrams.token_texts import visible
from fsm_rollout.events import Transitioned
from fsm_rollout.graph import AgentGraph

SCORE_STEPS = 5
"""Colours on the scale of scores, 0 the lowest."""
ORDERS_SHOWN = 6


@dataclass(slots=True)
class Edge:
    """One way from a state to the next."""

    source: str
    trigger: str
    dest: str
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
        self._edges: dict[tuple[str, str, str], Edge] = {}
        self._states: dict[str, None] = dict.fromkeys(graph.states if graph is not None else ())
        self._left: Counter[str] = Counter()
        if graph is not None:
            triggers = dict.fromkeys((*(row.trigger for row in graph.transitions), "failed"))
            for state, trigger in product(graph.working_states, triggers):
                for row in graph.rows_of(state, trigger):
                    self._edge((state, trigger, row.dest))

    def add(self, recorded: Recorded) -> None:
        """Count one trajectory in."""
        self.trajectories += 1
        self.visits.update(recorded.trajectory.visits)
        self._states |= dict.fromkeys(recorded.state_names)
        steps = [event for event in recorded.events if isinstance(event, Transitioned)]
        taken: set[tuple[str, str, str]] = set()
        for place, step in enumerate(steps, 1):
            key = (step.source, step.trigger, step.dest)
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

    def _edge(self, key: tuple[str, str, str]) -> Edge:
        self._states |= {key[0]: None, key[2]: None}
        return self._edges.setdefault(key, Edge(*key))


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
        looks[id(edge)] = (text, 0.8 + 6.0 * traffic.share(edge), step)
    return _picture(traffic, looks)


def _picture(traffic: Flow, looks: Mapping[int, tuple[str, float, str]]) -> Markup | None:
    lines = [
        "digraph {",
        'bgcolor="transparent"; rankdir=LR; nodesep=0.35; ranksep=0.45; pad=0.1;',
        'node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=12, margin="0.16,0.08"];',
        'edge [fontname="Helvetica", fontsize=10, arrowsize=0.7];',
    ]
    numbers = {state: f"n{place}" for place, state in enumerate(traffic.states)}
    for state, name in numbers.items():
        visits = traffic.visits[state]
        used = "used" if visits else "unused"
        label = f"{visible(state)}\n{visits:,} ×" if visits else visible(state)
        lines.append(f'{name} [label={_quoted(label)}, class="state {used} {state_class(state)}"];')
    for edge in traffic.edges:
        text, width, step = looks[id(edge)]
        label = f"{visible(edge.trigger)}\n{text}" if text else visible(edge.trigger)
        used = "used" if edge.count else "unused"
        lines.append(
            f"{numbers[edge.source]} -> {numbers[edge.dest]} [label={_quoted(label)}, penwidth={width:.2f}, "
            f'class="row {used}{step}"];'
        )
    return _svg("\n".join([*lines, "}"]))


def _svg(dot: str) -> Markup | None:
    """Lay out with Graphviz; ``None`` where there is none (or it fails): pages then have a table alone."""
    try:
        drawn = render(dot, "svg").decode("utf-8")
    except DrawingError:
        return None
    return Markup(drawn[drawn.index("<svg") :])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _orders(order: Sequence[int]) -> str:
    shown = ", ".join(map(str, order[:ORDERS_SHOWN]))
    return f"{shown}, … ({len(order)} ×)" if len(order) > ORDERS_SHOWN else shown
