"""A run as a Chrome trace: open the file in https://ui.perfetto.dev or ``chrome://tracing``.

Invariant: every transition, generation, tool call and interaction of the journal is in the trace once, with its own
times in microseconds since the run's first event. A process "trajectories" has an asynchronous track per trajectory
(its visits and within them what was waited for); a process per replica has as many lanes as generations ever ran on it
at once, and counters of what was under way.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsm_rollout.report.moments import Stretch, packed, stays, stretches
from fsm_rollout.report.pages import replica_name, write_page
from fsm_rollout.report.recorded import Recorded

TRAJECTORIES = 1
"""Process number of the trajectories; the replicas' follow."""
LANES = 100_000
"""Thread numbers apart from one replica to the next: viewers take some numbers (0, a process's own) for special."""


def trace(recorded: Iterable[Recorded]) -> dict[str, Any]:
    """Return the trace of these trajectories, ready for ``json.dump``."""
    ones = [(one, one.events[0].at) for one in recorded if one.events]
    origin = min((at for _, at in ones), default=0.0)
    events: list[dict[str, Any]] = [_named("process_name", TRAJECTORIES, "trajectories")]
    replicas: defaultdict[str, list[tuple[Stretch, str]]] = defaultdict(list)
    for one, _ in ones:
        events += _trajectory(one, origin)
        for stretch in stretches(one.events):
            if stretch.kind == "generate":
                replicas[stretch.replica].append((stretch, one.trajectory.trajectory_id))
    for number, replica in enumerate(sorted(replicas), TRAJECTORIES + 1):
        events += _replica(number, replica, replicas[replica], origin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(recorded: Iterable[Recorded], path: Path) -> None:
    """Write the trace of these trajectories as JSON.

    Raises:
        OSError: the file cannot be written.
    """
    write_page(path, json.dumps(trace(recorded), separators=(",", ":")))


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    start: float
    end: float
    rank: int
    """Which of those that begin together lies around the others: the lowest."""
    args: dict[str, Any]


def _trajectory(one: Recorded, origin: float) -> Iterator[dict[str, Any]]:
    """Yield a trajectory's spans in the order of time, each within the one around it.

    Viewers sort by time and then close what was opened last. So what overlaps without nesting (tools side by side) is
    given a further track, by its category.
    """
    tracks: list[list[_Span]] = []
    for span in sorted(_spans(one), key=lambda span: (span.start, span.rank, -span.end)):
        for track, around in enumerate(tracks):
            while around and around[-1].rank and around[-1].end <= span.start:
                yield _mark("e", around.pop(), one, track, origin)
            if not around or span.end <= around[-1].end:
                break
        else:
            track, around = len(tracks), []
            tracks.append(around)
        around.append(span)
        yield _mark("b", span, one, track, origin)
    for track, around in enumerate(tracks):
        while around:
            yield _mark("e", around.pop(), one, track, origin)


def _spans(one: Recorded) -> Iterator[_Span]:
    trajectory, found, visits = one.trajectory, stretches(one.events), stays(one.events)
    ends = [one.events[-1].at if trajectory.ended_at is None else trajectory.ended_at]
    facts: dict[str, Any] = {
        "agent": trajectory.agent,
        "group": trajectory.group_id,
        "stop_reason": trajectory.stop_reason,
        "score": trajectory.score,
        "trained_tokens": trajectory.trained_tokens,
        "parent": trajectory.parent_id,
    }
    end = max([*ends, *(stay.end for stay in visits), *(stretch.end for stretch in found)])
    yield _Span(trajectory.trajectory_id, one.events[0].at, end, 0, facts)
    for stay in visits:  # one that took no time was over before the next began
        yield _Span(stay.state, stay.start, stay.end, 1 if stay.start == stay.end else 2, {"trigger": stay.trigger})
    for stretch in found:
        facts = {"state": stretch.state, "tokens": stretch.tokens, "turn": stretch.turn, "failure": stretch.failure}
        name = stretch.label if stretch.kind != "tool" else f"tool {stretch.label}"
        yield _Span(name, stretch.start, stretch.end, 3, {k: v for k, v in facts.items() if v is not None})


def _mark(phase: str, span: _Span, one: Recorded, track: int, origin: float) -> dict[str, Any]:
    return {
        "ph": phase,
        "name": span.name,
        "cat": f"trajectory +{track}" if track else "trajectory",
        "id2": {"local": one.trajectory.trajectory_id},  # not "id", which would be shared by all processes
        "pid": TRAJECTORIES,
        "tid": LANES * TRAJECTORIES,
        "ts": _microseconds((span.start if phase == "b" else span.end) - origin),
    } | ({"args": span.args} if phase == "b" else {})


def _replica(number: int, replica: str, found: list[tuple[Stretch, str]], origin: float) -> Iterator[dict[str, Any]]:
    yield _named("process_name", number, replica_name(replica) if replica else "engine")
    lanes = packed([stretch for stretch, _ in found])
    first = LANES * number
    for lane in range(max(lanes, default=-1) + 1):
        yield _named("thread_name", number, f"lane {lane}", tid=first + lane)
    changes: defaultdict[int, int] = defaultdict(int)
    for (stretch, trajectory_id), lane in zip(found, lanes, strict=True):
        start, end = _microseconds(stretch.start - origin), _microseconds(stretch.end - origin)
        yield {
            "ph": "X",
            "name": trajectory_id,
            "cat": "generate",
            "pid": number,
            "tid": first + lane,
            "ts": start,
            "dur": end - start,
            "args": {"state": stretch.state, "turn": stretch.turn, "tokens": stretch.tokens},
        }
        changes[start] += 1
        changes[end] -= 1
    running = 0
    for at in sorted(changes):
        running += changes[at]
        yield {"ph": "C", "name": "generations", "pid": number, "tid": first, "ts": at, "args": {"under way": running}}


def _named(what: str, pid: int, name: str, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
