"""What was walked of a graph, row by row: rows that differ in their conditions alone are edges of their own."""

import re
from pathlib import Path

from msgspec.structs import replace

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.loader import loads
from fsm_rollout.diagrams.draw import to_mermaid, to_svg
from fsm_rollout.report.flow import Edge, Flow, path_picture, traffic_picture
from fsm_rollout.report.recording import Recording, open_run
from fsm_rollout.report.report import write_report
from fsm_rollout.report.trajectory import trajectory_page
from fsm_rollout.trajectory.events import AnyEvent, Transitioned
from tests.cases import FILES
from tests.unit.diagrams.sixty_states import STEPS, sixty_states
from tests.unit.report.recorded_runs import history, write_run

TWO_WAYS = FILES["goes two ways"]


def two_ways() -> AgentGraph:
    return loads(TWO_WAYS, name="two.yaml")


def numbered(row: int | None) -> list[AnyEvent]:
    """The usual history with its rows: the second `generated` took ``row``."""
    rows = iter([0, 1, 4, row, 6])
    return [replace(event, row=next(rows)) if isinstance(event, Transitioned) else event for event in history()]


def edge_of(traffic: Flow, asked: str) -> Edge:
    return next(e for e in traffic.edges if (e.source, e.dest, e.conditions) == ("GENERATING", "INTERACTING", asked))


def test_rows_that_differ_in_their_conditions_are_edges_of_their_own() -> None:
    traffic = Flow("tool_user", two_ways())
    for row in (3, 3, 2):
        traffic.add(Recording.of(numbered(row)))
    assert edge_of(traffic, 'text_contains "3"').count == 1
    assert edge_of(traffic, "").count == 2
    assert sum(traffic.share(e) for e in traffic.edges if e.source == "GENERATING") == 1.0
    drawn = str(traffic_picture(traffic))
    assert "[text_contains &quot;3&quot;]" in drawn or '[text_contains "3"]' in drawn


def test_what_took_no_row_is_on_no_rows_edge() -> None:
    """A `failed` that the machine ended itself must not count for the row that would have routed it."""
    events = numbered(3)
    last = next(at for at, e in enumerate(events) if isinstance(e, Transitioned) and e.trigger == "interaction_done")
    events[last] = replace(events[last], trigger="failed", dest="GENERATING", stop_reason=None, row=None)
    traffic = Flow("tool_user", two_ways())
    traffic.add(Recording.of(events[: last + 1]))
    failed = [e for e in traffic.edges if e.trigger == "failed"]
    assert [e.count for e in failed] == [0, 1]


def test_sixty_states_are_drawn_in_every_view(tmp_path: Path) -> None:
    graph = sixty_states()
    assert len(graph.states) == 2 * STEPS + 2
    names = {f"{kind}_{step}" for kind in ("STEP", "TOOLS") for step in range(STEPS)}
    assert set(re.findall(r">((?:STEP|TOOLS)_[0-9]+)\W", to_svg(graph))) == names
    assert set(re.findall(r'\("(\w+)<br/>', to_mermaid(graph))) == {*names, "PENDING"}

    def step(at: float, trigger: str, source: str, dest: str, row: int, **facts: str) -> Transitioned:
        return Transitioned(at=100 + at, trigger=trigger, source=source, dest=dest, spent={}, row=row, **facts)

    prompted = replace(history()[0], agent="sixty")
    walked = [
        step(0, "prompted", "PENDING", "STEP_0", 0),
        step(1, "generated", "STEP_0", "STEP_1", 2),
        step(9, "timed_out", "STEP_1", "TERMINATED", len(graph.transitions) - 1, stop_reason="too_slow"),
    ]
    recording = Recording.of([prompted, *walked])
    traffic = Flow("sixty", graph)
    traffic.add(recording)
    drawn = str(path_picture(traffic))
    assert drawn.count('class="edge row used"') == len(walked)
    assert drawn.count("timed_out") == 1, "what may happen in any state is drawn where it did"
    assert drawn.count('class="node state') == len(graph.states)
    least = re.search(r'^<svg style="min-width:(\d+)px"', drawn)
    assert least is not None
    assert int(least[1]) < 600, "what is long goes down the page"
    page = trajectory_page(recording, graph=graph)
    assert page.count('class="lane ') == 2 + 1, "only states that took time have a lane (and the axis)"
    write_report(write_run(tmp_path, {"0/0": [prompted, *walked]}, graph))
    assert (tmp_path / "report.html").read_text("utf-8").count('class="node state') == len(graph.states)
    assert not [note for note in open_run(tmp_path).notes if "drawn from what happened" in note]
