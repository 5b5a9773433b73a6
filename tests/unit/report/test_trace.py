"""The trace says what the events say: recomputed here from the events, field by field."""

import json
import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from msgspec.structs import replace

from fsm_rollout.report.figures import BINS, Figures, histogram
from fsm_rollout.report.recording import Recording
from fsm_rollout.report.show import show
from fsm_rollout.report.spans import Interval, intervals_of, packed
from fsm_rollout.report.trace import trace
from fsm_rollout.trajectory.events import AnyEvent, Called, Generated, Prompted, Transitioned, UserReplied
from tests.histories import several_event_sequences
from tests.unit.report.recorded_runs import history, write_run


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def test_a_written_trace_is_what_happened(tmp_path: Path) -> None:
    first, second = history("0/0", at=100.0), history("0/1", at=101.0, replica="r1")
    run = write_run(tmp_path / "run", {"0/0": first, "0/1": second})
    show(run, None, tmp_path / "F.trace.json")
    found = json.loads((tmp_path / "F.trace.json").read_text("utf-8"))["traceEvents"]

    lanes = [(e["name"], e["ts"], e["dur"], e["args"]["tokens"]) for e in found if e["ph"] == "X"]
    sampled = [(i, e) for i, h in (("0/0", first), ("0/1", second)) for e in h if isinstance(e, Generated)]
    assert sorted(lanes) == sorted(
        (i, microseconds(e.at - e.seconds - 100), microseconds(e.seconds), len(e.ids)) for i, e in sampled
    )
    names = {e["args"]["name"] for e in found if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"trajectories", "replica r0", "replica r1"}
    visits = [(e["id2"]["local"], e["name"], e["ts"]) for e in found if e["ph"] == "b" and e["name"].isupper()]
    assert visits[:6] == [
        ("0/0", "PENDING", 0),
        ("0/0", "GENERATING", 0),
        ("0/0", "PROCESSING_TOOLS", 3_000_000),
        ("0/0", "GENERATING", 5_000_000),
        ("0/0", "INTERACTING", 8_000_000),
        ("0/0", "TERMINATED", 10_000_000),
    ]


@given(several_event_sequences)
def test_a_trace_holds_every_event_once_and_is_well_formed(histories: list[list[AnyEvent]]) -> None:
    found = trace(Recording.of(events) for events in histories)["traceEvents"]
    json.loads(json.dumps(found, allow_nan=False))
    everything = [event for events in histories for event in events]
    begun: Counter[str] = Counter(e["name"].split(" ")[0] for e in found if e["ph"] == "b")
    assert sum(e["ph"] == "X" for e in found) == sum(isinstance(e, Generated) for e in everything)
    assert begun["tool"] == sum(isinstance(e, Called) for e in everything)
    assert begun["interaction"] == sum(isinstance(e, UserReplied) for e in everything)
    moves = sum(isinstance(e, Transitioned | Prompted) for e in everything)  # each begins a visit
    ids = {e.trajectory_id for e in everything if isinstance(e, Prompted)}
    assert sum(count for name, count in begun.items() if name.isupper()) == moves
    open_: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in sorted(found, key=lambda e: e.get("ts", 0)):  # as viewers do, and what is at one time stays in order
        if event["ph"] not in "be":
            continue
        track = event["id2"]["local"], event["cat"]
        assert track[0] in ids
        assert event["ts"] >= 0
        if event["ph"] == "b":
            open_[track].append(event)
        else:
            assert open_[track].pop()["name"] == event["name"], "spans must nest"
    assert not any(open_.values())
    lanes = {e["tid"]: e["pid"] for e in found if e["ph"] == "X"}
    assert all(lanes[e["tid"]] == e["pid"] for e in found if e["ph"] == "X"), "viewers mix up lanes of one number"
    assert not lanes.keys() & {0, *(e["pid"] for e in found)}, "these numbers are taken for a process's main thread"
    running: dict[int, int] = {}
    for event in found:
        if event["ph"] == "C":
            running[event["pid"]] = event["args"]["under way"]
            assert event["args"]["under way"] >= 0
    assert not any(running.values()), "a generation that was counted in must be counted out"


def test_tools_side_by_side_have_tracks_of_their_own() -> None:
    """Spans of one track must nest: what overlaps would be closed in the wrong order, and lost."""
    events = history()
    at = next(place for place, event in enumerate(events) if isinstance(event, Called))
    slow = replace(events[at], at=events[at].at - 0.5, name="slow", id="c2")  # begins and ends before the other
    found = trace([Recording.of([*events[:at], slow, *events[at:]])])["traceEvents"]
    tools = {e["name"]: e["cat"] for e in found if e["ph"] == "b" and e["name"].startswith("tool ")}
    assert tools == {"tool slow": "trajectory +1", "tool calculate": "trajectory"}


@given(several_event_sequences)
def test_lanes_never_overlap_and_none_is_wasted(histories: list[list[AnyEvent]]) -> None:
    found = [interval for events in histories for interval in intervals_of(events) if interval.kind != "visit"]
    rows = packed(found)
    by_row: defaultdict[int, list[Any]] = defaultdict(list)
    for stretch, row in zip(found, rows, strict=True):
        by_row[row].append((stretch.start, stretch.end))
    for times in by_row.values():
        times.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(times))
    starts = [stretch.start for stretch in found if stretch.seconds > 0]
    at_once = max((sum(s.start <= at < s.end for s in found) for at in starts), default=0)
    assert len([row for row in by_row.values() if any(end > start for start, end in row)]) <= max(at_once, 1) + 1


@given(several_event_sequences)
def test_figures_add_up(histories: list[list[AnyEvent]]) -> None:
    figures = Figures(map(Recording.of, histories))
    width = figures.seconds / BINS
    sampled = sum(len(e.ids) for events in histories for e in events if isinstance(e, Generated))
    if width > 0:
        assert sum(figures.throughput()) * width == pytest.approx(sampled, abs=1e-6)
        walls = sum(line.wall for line in figures.lines)
        assert sum(figures.under_way()) * width == pytest.approx(walls, rel=1e-6, abs=1e-6)
    for line in figures.lines:
        assert all(seconds >= 0 for seconds in line.parts.values())
    for values in ([line.tokens for line in figures.lines], [line.score for line in figures.lines if line.score]):
        chart = histogram([float(value) for value in values])
        assert (sum(chart.counts) if chart else 0) == len(values)


def test_a_histogram_of_whole_numbers_gives_each_bar_as_many_of_them() -> None:
    chart = histogram([float(value) for value in range(100)])
    assert chart is not None
    assert len(set(chart.counts[:-1])) == 1
    assert [chart.bar(0), chart.bar(1)] == ["0 to 4", "5 to 9"]


def test_equal_values_are_one_bar() -> None:
    chart = histogram([0.5, 0.5, math.inf])
    assert chart is not None
    assert (chart.counts, chart.mean) == ((2,), 0.5)


def test_lanes_are_shared_by_what_follows_and_not_by_what_overlaps() -> None:
    def lanes(*times: tuple[float, float]) -> list[int]:
        return packed([Interval("generate", "GENERATING", start, end, "generate") for start, end in times])

    assert lanes((0, 1), (1, 2), (2, 3)) == [0, 0, 0]
    assert lanes((0, 2), (1, 3), (2, 4)) == [0, 1, 0]
    assert lanes((1, 3), (0, 2)) == [1, 0]
