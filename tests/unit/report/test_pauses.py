"""What was set aside and went on, on which weights, and on which replica: in the times, the pages and the figures."""

from dataclasses import replace as replace_field
from pathlib import Path
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout.report.cards import cards
from fsm_rollout.report.figures import BINS, Figures
from fsm_rollout.report.recording import Recording
from fsm_rollout.report.report import write_report
from fsm_rollout.report.show import show
from fsm_rollout.report.spans import BUSY, Clock
from fsm_rollout.report.trajectory import time_lanes
from fsm_rollout.trajectory.events import AnyEvent, Called, Generated, Restored, Resumed, Suspended
from fsm_rollout.trajectory.wall_time import covered
from tests.histories import several_event_sequences
from tests.unit.report.recorded_runs import history, write_run


def interrupted(trajectory_id: str = "0/0", *, away: float = 7.0, clock: float | None = None) -> list[AnyEvent]:
    """The usual history, set aside after its tool call; it goes on ``clock`` later on the clock of then."""
    events = history(trajectory_id)
    at = next(place for place, event in enumerate(events) if isinstance(event, Called)) + 1
    left = events[at - 1].at
    later = away if clock is None else clock
    pause = [Suspended(at=left, reason="partial"), Resumed(at=left + later, away=later, weight_version=4)]
    return [*events[:at], *pause, *(replace(event, at=event.at + later) for event in events[at:])]


def test_time_away_is_neither_tools_nor_generation() -> None:
    recording = Recording.of(interrupted(away=7.0))
    away = recording.intervals("away")
    assert [(s.state, s.start, s.end) for s in away] == [("PROCESSING_TOOLS", 105.0, 112.0)]
    figures = Figures([recording])
    (line,) = figures.lines
    assert (line.resumed, line.away, line.wall, figures.seconds) == (1, 7.0, 10.0, 10.0)
    assert line.parts["tool"] == 2.0
    assert line.why().startswith("45 % generating")


def test_a_run_that_went_on_after_a_night_is_looked_at_without_the_night(tmp_path: Path) -> None:
    """What took seconds fills the lanes and the courses, as it does where nothing was set aside."""
    night = 50_000.0
    lanes = [time_lanes(Recording.of(events), ["PENDING", "GENERATING", "PROCESSING_TOOLS", "INTERACTING"])
             for events in (history(), interrupted(away=night))]  # fmt: skip
    assert lanes[0] is not None
    assert lanes[1] is not None
    assert (lanes[1].seconds, lanes[1].largest) == (lanes[0].seconds, lanes[0].largest) == (10.0, ANY)
    for calm_lane, torn_lane in zip(lanes[0].lanes, lanes[1].lanes, strict=True):
        assert torn_lane == replace_field(calm_lane, marks=torn_lane.marks), "apart from the mark nothing is different"
        assert [at for _, at in torn_lane.marks] == [5.0] * (torn_lane.state == "PROCESSING_TOOLS")
    show(write_run(tmp_path / "run", {"0/0": interrupted(away=night)}), "0/0", tmp_path / "t.html")
    assert "left:50.0000%;width:0.0000%;top:0;height:100%" in (tmp_path / "t.html").read_text("utf-8")

    torn, calm = Recording.of(interrupted(away=night)), Recording.of(history("1/0"))
    assert Figures([torn]).seconds == 10.0
    figures = Figures([torn, calm])  # the other went on meanwhile
    assert figures.seconds == 15.0
    assert sum(figures.throughput()) * 15.0 / BINS == pytest.approx(sum(s.tokens for s in figures.generations))
    write_report(write_run(tmp_path, {"0/0": interrupted(away=night)}))
    report = (tmp_path / "report.html").read_text("utf-8")
    assert "without 833 min 20 s in which nothing was under way" in report.replace("\u00a0", " ")
    assert "It was also suspended for 833 min 20 s, which does not count." in report.replace("\u00a0", " ")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted), max_size=5), st.integers(0, 40),
       st.integers(0, 40))  # fmt: skip
def test_a_clock_stands_in_its_gaps_and_runs_elsewhere(gaps: list[list[int]], start: int, end: int) -> None:
    start, end = sorted((start, end))
    clock = Clock((a, b) for a, b in gaps)
    runs = [second for second in range(start, end) if not any(a <= second < b for a, b in gaps)]
    assert clock(end) - clock(start) == len(runs)
    assert [second for a, b in clock.runs(start, end) for second in range(int(a), int(b))] == runs


def test_a_clock_that_lies_behind_is_taken_to_have_stood_still() -> None:
    """A run that goes on in a freshly booted machine has times from before those that it began with."""
    recording = Recording.of(interrupted(clock=-90.0))
    times = [event.at for event in recording.events]
    assert times == sorted(times)
    kinds = (*BUSY, "away")
    took, calm = ([i.times for i in each.intervals(*kinds)] for each in (recording, Recording.of(history())))
    assert covered(took) == covered(calm)
    assert recording.trajectory.ended_at == 110.0
    assert recording.trajectory.suspended_seconds == 0.0


def test_pages_say_how_long_it_was_away_and_which_weights_it_crossed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"0/0": interrupted(), "1/0": history("1/0", group_id="1", versions=(1, 1))})
    show(run, "0/0", tmp_path / "t.html")
    page = (tmp_path / "t.html").read_text("utf-8")
    assert "suspended: partial" in page
    assert "resumed after 7.00 s, with weights 4" in page
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
@settings(max_examples=min(40, settings().max_examples))
def test_what_replicas_did_adds_up_to_what_was_done(histories: list[list[AnyEvent]]) -> None:
    figures = Figures(map(Recording.of, histories))
    sampled = [event for events in histories for event in events if isinstance(event, Generated)]
    replicas = figures.replicas()
    assert [replica.name for replica in replicas] == sorted({event.replica for event in sampled})
    for replica in replicas:
        own = [event for event in sampled if event.replica == replica.name]
        assert (replica.generations, replica.tokens) == (len(own), sum(len(event.ids) for event in own))
        assert 0 <= replica.busy <= figures.end - figures.begin + 1e-6
    for course, parts in (
        (figures.throughput(), [replica.throughput for replica in replicas]),
        (figures.load(), [replica.under_way for replica in replicas]),
    ):
        together = [sum(values) for values in zip(*parts, strict=True)] or [0.0] * BINS
        assert together == pytest.approx(course, abs=1e-6)


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


def test_a_page_says_by_what_tools_were_restored() -> None:
    events = interrupted()
    place = next(place for place, event in enumerate(events) if isinstance(event, Resumed)) + 1
    ways = {"notes": "its snapshot", "files": "2 calls made again"}
    events.insert(place, Restored(at=events[place - 1].at, ways=ways))
    pauses = [card.pause for card in cards(Recording.of(events)) if card.pause is not None]
    assert pauses[-1] == "restored: notes by its snapshot, files by 2 calls made again"
