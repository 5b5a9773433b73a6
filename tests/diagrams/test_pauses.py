"""What was set aside and went on, on which weights, and on which replica: in the times, the pages and the figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from msgspec.structs import replace
from recorded_runs import history, write_run

from fsm_rollout.diagrams.figures import BINS, Figures
from fsm_rollout.diagrams.moments import covered, stretches
from fsm_rollout.diagrams.recorded import Recorded
from fsm_rollout.diagrams.report import write_report
from fsm_rollout.diagrams.show import show
from fsm_rollout.events import AnyEvent, Called, Generated, Resumed, Suspended
from fsm_rollout.testing.strategies.histories import several_event_sequences


def interrupted(trajectory_id: str = "0/0", *, away: float = 7.0, clock: float | None = None) -> list[AnyEvent]:
    """The usual history, set aside after its tool call; it goes on ``clock`` later on the clock of then."""
    events = history(trajectory_id)
    at = next(place for place, event in enumerate(events) if isinstance(event, Called)) + 1
    left = events[at - 1].at
    later = away if clock is None else clock
    pause = [Suspended(at=left, reason="partial"), Resumed(at=left + later, away=later, weight_version=4)]
    return [*events[:at], *pause, *(replace(event, at=event.at + later) for event in events[at:])]


def test_time_away_is_neither_tools_nor_generation() -> None:
    recorded = Recorded.of(interrupted(away=7.0))
    away = [s for s in stretches(recorded.events) if s.kind == "away"]
    assert [(s.state, s.start, s.end) for s in away] == [("PROCESSING_TOOLS", 105.0, 112.0)]
    figures = Figures()
    figures.add(recorded)
    (line,) = figures.lines
    assert (line.resumed, line.away, line.wall) == (1, 7.0, 17.0)
    assert line.seconds["tool"] == 2.0
    assert line.why() == "41% set aside"


def test_a_clock_that_lies_behind_is_taken_to_have_stood_still() -> None:
    """A run that goes on in a freshly booted machine has times from before those that it began with."""
    recorded = Recorded.of(interrupted(clock=-90.0))
    times = [event.at for event in recorded.events]
    assert times == sorted(times)
    assert covered(stretches(recorded.events)) == covered(stretches(history()))
    assert recorded.trajectory.ended_at == 110.0
    assert recorded.trajectory.away == 0.0


def test_pages_say_how_long_it_was_away_and_which_weights_it_crossed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"0/0": interrupted(), "1/0": history("1/0", group_id="1", versions=(1, 1))})
    show(run, "0/0", tmp_path / "t.html")
    page = (tmp_path / "t.html").read_text("utf-8")
    assert "set aside: partial" in page
    assert "went on after 7.00 s, on weights 4" in page
    assert "1 × <small>away 7.00" in page
    assert "0 → 1 <small>2 versions" in page
    write_report(run)
    report = (run / "report.html").read_text("utf-8")
    assert "1 <small>away 7.00" in report
    assert "0 → 1 <small>more than one in 1<" in report
    assert '"0 \\u2192 1"' in report
    calm = write_run(tmp_path / "calm", {"1/0": history("1/0", versions=(1, 1))})
    write_report(calm)
    for nothing in ("resumed", "more than one", '"away"'):
        assert nothing not in (calm / "report.html").read_text("utf-8").split("<main>")[1].split("<script>")[0]


@given(several_event_sequences)
@settings(max_examples=40)
def test_what_replicas_did_adds_up_to_what_was_done(histories: list[list[AnyEvent]]) -> None:
    figures = Figures()
    for events in histories:
        figures.add(Recorded.of(events))
    sampled = [event for events in histories for event in events if isinstance(event, Generated)]
    replicas = figures.replicas()
    assert [one.name for one in replicas] == sorted({event.replica for event in sampled})
    for one in replicas:
        own = [event for event in sampled if event.replica == one.name]
        assert (one.generations, one.tokens) == (len(own), sum(len(event.ids) for event in own))
        assert 0 <= one.busy <= figures.end - figures.begin + 1e-6
    for place in range(BINS):
        assert sum(one.throughput[place] for one in replicas) == pytest.approx(figures.throughput()[place], abs=1e-6)
        assert sum(one.under_way[place] for one in replicas) == pytest.approx(figures.load()[place], abs=1e-6)


def test_replicas_have_lanes_on_one_scale_where_there_are_several(tmp_path: Path) -> None:
    busy, idle = history("0/0", replica="r0"), history("1/0", group_id="1", replica="r1")
    more = history("2/0", group_id="2", replica="r0")
    write_report(write_run(tmp_path / "two", {"0/0": busy, "1/0": idle, "2/0": more}))
    page = (tmp_path / "two/report.html").read_text("utf-8")
    lanes = page.split('id="replicas"')[1].split("</section>")[0].split('class="replica"')[1:]
    assert ["r0" in lanes[0], "r1" in lanes[1], len(lanes)] == [True, True, 2]
    heights = [min(float(point.split(",")[1]) for point in lane.split('polyline points="')[1].split('"')[0].split())
               for lane in lanes]  # fmt: skip
    assert heights == [5.0, 52.5], "half the load is half as high"
    write_report(write_run(tmp_path / "one", {"0/0": busy}))
    assert 'id="replicas"' not in (tmp_path / "one/report.html").read_text("utf-8")
