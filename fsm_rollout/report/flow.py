"""Which transitions of a graph trajectories took: how often, in which order, how likely, and with which score.

Invariants: an edge is one transition of the graph from one of its sources, taken or not; every one that fired is on
exactly one edge, and one that the graph does not explain has an edge of its own. The picture's colours are the page's
(CSS classes), so it follows light and dark.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from markupsafe import Markup

from fsm_rollout.agent.graph import AgentGraph, TransitionSpec
from fsm_rollout.diagrams.draw import DrawingError, render
from fsm_rollout.diagrams.picture import ANY, FEW, conditions_of
from fsm_rollout.report.pages import render_template
from fsm_rollout.report.recording import Recording
from fsm_rollout.report.texts import percent

SCORE_STEPS = 5  # colours on the scale of scores, 0 the lowest
ORDERS_SHOWN = 6
WIDEST = 5.0  # points of an edge that is always taken

SMALLEST = 0.5  # how far a picture is shrunk to fit: its text can still be read
# CSS pixels of a picture from left to right; what would be wider is drawn from top to bottom, as pages are read.
WIDE = 1600
_POINT = 4 / 3  # CSS pixels

# Source, trigger, dest, and the place in `transitions`; `None` where it stands in no list.
_Key = tuple[str, str, str, int | None]


@dataclass(slots=True)
class Edge:
    """One way from a state to the next."""

    source: str
    trigger: str
    dest: str
    # The transition's conditions, where others lead from the same state by the same trigger to the same place.
    conditions: str = ""
    shared: bool = False  # whether its transition leaves any state, and there are many: drawn where it was taken only
    order: list[int] = field(default_factory=list)  # the steps (1, 2, …) of the first trajectory that took it
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
        self._states: dict[str, None] = dict.fromkeys(graph.states if graph is not None else ())
        self._departures: Counter[str] = Counter()
        if graph is not None:
            self._declare(graph)

    def _declare(self, graph: AgentGraph) -> None:
        triggers = dict.fromkeys((*(row.trigger for row in graph.transitions), "failed"))
        rows: dict[_Key, TransitionSpec] = {
            (state, trigger, row.dest, place): row
            for state in graph.working_states
            for trigger in triggers
            for place, row in graph.rows_of(state, trigger)
        }
        alike = Counter(key[:3] for key in rows)
        many = len(graph.working_states) > FEW
        for key, row in rows.items():
            edge = self._edge(key)
            edge.shared = many and ANY in row.source
            edge.conditions = " and ".join(conditions_of(row)) if alike[key[:3]] > 1 else ""

    def add(self, recording: Recording) -> None:
        """Count one trajectory in."""
        self.trajectories += 1
        self.visits.update(recording.trajectory.visits)
        self._states |= dict.fromkeys(recording.state_names)
        edges_taken: set[_Key] = set()
        for place, step in enumerate(recording.steps, 1):
            key = (step.source, step.trigger, step.dest, step.row)
            edge = self._edge(key)
            edge.count += 1
            self._departures[step.source] += 1
            if self.trajectories == 1:
                edge.order.append(place)
            edges_taken.add(key)
        if recording.trajectory.score is not None:
            for key in edges_taken:
                self._edges[key].scored += 1
                self._edges[key].score_sum += recording.trajectory.score

    @property
    def states(self) -> list[str]:
        """The graph's states as declared, then any other that occurred."""
        return list(self._states)

    @property
    def edges(self) -> list[Edge]:
        """The graph's transitions as declared, then what happened besides."""
        return list(self._edges.values())

    def share(self, edge: Edge) -> float:
        """Return of all the times that the edge's source was left, how many went this way; 0 when it never was."""
        return edge.count / self._departures[edge.source] if self._departures[edge.source] else 0.0

    def _edge(self, key: _Key) -> Edge:
        self._states |= {key[0]: None, key[2]: None}
        return self._edges.setdefault(key, Edge(*key[:3]))


def path_picture(flow: Flow) -> Markup | None:
    """Return the SVG of one trajectory's path: visit counts in the states, the order of steps on the edges."""

    def look(edge: Edge) -> tuple[str, float, str]:
        steps = ", ".join(map(str, edge.order[:ORDERS_SHOWN]))
        more = f", … ({len(edge.order)} ×)" if len(edge.order) > ORDERS_SHOWN else ""
        return steps + more, 1.2 + 0.5 * min(edge.count, 4), ""

    return _picture(flow, look)


def traffic_picture(flow: Flow) -> Markup | None:
    """Return the SVG of many trajectories: an edge's width is its probability, its colour the mean score."""
    means = [edge.score for edge in flow.edges if edge.score is not None]
    low, high = min(means, default=0.0), max(means, default=0.0)

    def look(edge: Edge) -> tuple[str, float, str]:
        colour = ""
        if edge.score is not None and high > low:
            colour = f" score{round((edge.score - low) / (high - low) * (SCORE_STEPS - 1))}"
        return percent(flow.share(edge)) if edge.count else "", 0.8 + (WIDEST - 0.8) * flow.share(edge), colour

    return _picture(flow, look)


def _picture(flow: Flow, look: Callable[[Edge], tuple[str, float, str]]) -> Markup | None:
    """Lay out with Graphviz, from left to right where there is room; ``look`` gives an edge's text, width and colour.

    ``None`` where there is no Graphviz, or it fails: the page then has a table alone.
    """
    drawn = [edge for edge in flow.edges if edge.count or not edge.shared]
    edges = [(edge, *look(edge)) for edge in drawn]
    # What leads on is drawn straight, and what only leads there and back is beside it.
    back = {(edge.dest, edge.source) for edge in drawn}
    onward = {edge.source for edge in drawn if (edge.source, edge.dest) not in back}
    for direction in ("LR", "TB"):
        values = {"flow": flow, "edges": edges, "onward": onward, "direction": direction}
        try:
            svg = render(render_template("flow.dot.jinja", values), "svg").decode("utf-8")
        except DrawingError:
            return None
        svg = svg[svg.index("<svg") :]
        found = re.search(r'<svg width="(\d+)pt"', svg)
        width = int(found[1]) * _POINT if found else 0.0
        if width <= WIDE:
            break
    # What is wider than the page when it has been shrunk as far as can be read is scrolled.
    return Markup(f'<svg style="min-width:{width * SMALLEST:.0f}px"{svg.removeprefix("<svg")}')
