"""A run as a Chrome trace: open the file in https://ui.perfetto.dev or ``chrome://tracing``.

Invariant: every transition, generation, tool call and interaction of the journal is in the trace once, with its own
times in microseconds since the run's first event. A process "trajectories" has an asynchronous track per trajectory
(its visits and within them what was waited for); a process per replica has as many lanes as generations ever ran on it
at once, and counters of what was under way.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fsm_rollout.report.recording import Recording
from fsm_rollout.report.texts import replica_name
from fsm_rollout.report.times import Stretch, packed

TRAJECTORIES = 1  # process number of the trajectories; the replicas' follow
# Thread numbers apart from one replica to the next: viewers take some numbers (0, a process's own) for special.
LANES = 100_000

TraceEvent = dict[str, object]


def trace(recordings: Iterable[Recording]) -> dict[str, object]:
    """Return the trace of these trajectories, ready for ``json.dump``."""
    begun = [recording for recording in recordings if recording.events]
    origin = min((recording.events[0].at for recording in begun), default=0.0)
    events: list[TraceEvent] = [_named("process_name", TRAJECTORIES, "trajectories")]
    replicas: defaultdict[str, list[tuple[Stretch, str]]] = defaultdict(list)
    for recording in begun:
        events += _trajectory(recording, origin)
        for stretch in recording.times.of("generate"):
            replicas[stretch.replica].append((stretch, recording.trajectory.trajectory_id))
    for process, (name, generations) in enumerate(sorted(replicas.items()), TRAJECTORIES + 1):
        events += _replica(process, name, generations, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    start: float
    end: float
    rank: int  # which of those that begin together lies around the others: the lowest
    args: dict[str, object]


def _trajectory(recording: Recording, origin: float) -> Iterator[TraceEvent]:
    """Yield a trajectory's spans in the order of time, each within the one around it.

    Viewers sort by time and then close what was opened last. So what overlaps without nesting (tools side by side) is
    given a further track, by its category.
    """

    def mark(phase: str, span: _Span, track: int) -> TraceEvent:
        return {
            "ph": phase,
            "name": span.name,
            "cat": f"trajectory +{track}" if track else "trajectory",
            "id2": {"local": recording.trajectory.trajectory_id},  # not "id", which would be shared by all processes
            "pid": TRAJECTORIES,
            "tid": LANES * TRAJECTORIES,
            "ts": _microseconds((span.start if phase == "b" else span.end) - origin),
        } | ({"args": span.args} if phase == "b" else {})

    tracks: list[list[_Span]] = []
    for span in sorted(_spans(recording), key=lambda span: (span.start, span.rank, -span.end)):
        for track, around in enumerate(tracks):
            while around and around[-1].rank and around[-1].end <= span.start:
                yield mark("e", around.pop(), track)
            if not around or span.end <= around[-1].end:
                break
        else:
            track, around = len(tracks), []
            tracks.append(around)
        around.append(span)
        yield mark("b", span, track)
    for track, around in enumerate(tracks):
        while around:
            yield mark("e", around.pop(), track)


def _spans(recording: Recording) -> Iterator[_Span]:
    trajectory, times = recording.trajectory, recording.times
    end = recording.events[-1].at if trajectory.ended_at is None else trajectory.ended_at
    end = max(end, times.end)
    facts: dict[str, object] = {
        "agent": trajectory.agent,
        "group": trajectory.group_id,
        "stop_reason": trajectory.stop_reason,
        "score": trajectory.score,
        "trained_tokens": trajectory.trained_tokens,
        "parent": trajectory.parent_id,
    }
    yield _Span(trajectory.trajectory_id, recording.events[0].at, end, 0, facts)
    for visit in times.visits:  # one that took no time was over before the next began
        yield _Span(
            visit.state, visit.start, visit.end, 1 if visit.start == visit.end else 2, {"trigger": visit.trigger}
        )
    for stretch in times.stretches:
        facts = {
            "state": stretch.state,
            "tokens": stretch.tokens,
            "generation": stretch.turn,
            "failure": stretch.failure,
        }
        name = stretch.label if stretch.kind != "tool" else f"tool {stretch.label}"
        yield _Span(name, stretch.start, stretch.end, 3, {k: v for k, v in facts.items() if v is not None})


def _replica(process: int, name: str, generations: list[tuple[Stretch, str]], origin: float) -> Iterator[TraceEvent]:
    yield _named("process_name", process, replica_name(name) if name else "engine")
    lanes = packed([stretch for stretch, _ in generations])
    first = LANES * process
    for lane in range(max(lanes, default=-1) + 1):
        yield _named("thread_name", process, f"lane {lane}", tid=first + lane)
    changes: defaultdict[int, int] = defaultdict(int)
    for (stretch, trajectory_id), lane in zip(generations, lanes, strict=True):
        start, end = _microseconds(stretch.start - origin), _microseconds(stretch.end - origin)
        yield {
            "ph": "X",
            "name": trajectory_id,
            "cat": "generate",
            "pid": process,
            "tid": first + lane,
            "ts": start,
            "dur": end - start,
            "args": {"state": stretch.state, "generation": stretch.turn, "tokens": stretch.tokens},
        }
        changes[start] += 1
        changes[end] -= 1
    running = 0
    for at in sorted(changes):
        running += changes[at]
        args = {"under way": running}
        yield {"ph": "C", "name": "generations", "pid": process, "tid": first, "ts": at, "args": args}


def _named(what: str, process: int, name: str, tid: int = 0) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": process, "tid": tid, "args": {"name": name}}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
