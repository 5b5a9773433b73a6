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

from fsm_rollout.report.recording import Recording
from fsm_rollout.report.spans import Interval, packed
from fsm_rollout.report.texts import replica_name
from fsm_rollout.trajectory.trajectory import Trajectory

TRAJECTORIES = 1  # process number of the trajectories; the replicas' follow
# Thread numbers apart from one replica to the next: viewers take some numbers (0, a process's own) for special.
LANES = 100_000

TraceEvent = dict[str, object]


def trace(recordings: Iterable[Recording]) -> dict[str, object]:
    """Return the trace of these trajectories, ready for ``json.dump``."""
    begun = [recording for recording in recordings if recording.events]
    origin = min((recording.events[0].at for recording in begun), default=0.0)
    events: list[TraceEvent] = [_named("process_name", TRAJECTORIES, "trajectories")]
    replicas: defaultdict[str, list[tuple[Interval, str]]] = defaultdict(list)
    for recording in begun:
        events += _trajectory(recording, origin)
        for interval in recording.intervals("generate"):
            replicas[interval.replica].append((interval, recording.trajectory.trajectory_id))
    for process, (name, generations) in enumerate(sorted(replicas.items()), TRAJECTORIES + 1):
        events += _replica(process, name, generations, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _trajectory(recording: Recording, origin: float) -> Iterator[TraceEvent]:
    """Yield a trajectory's spans in the order of time, each within the one around it.

    Viewers sort by time and then close what was opened last. So what overlaps without nesting (tools side by side) is
    given a further track, by its category.
    """
    # 1. The trajectory lies around its visits, and these around the rest; a visit that took no time was over before the
    #    next began.
    trajectory, inside = recording.trajectory, recording.intervals()
    end = recording.events[-1].at if trajectory.ended_at is None else trajectory.ended_at
    end = max([end, *(interval.end for interval in inside)])
    whole = Interval("visit", "", recording.events[0].at, end, trajectory.trajectory_id)

    def rank(span: Interval) -> int:
        return 0 if span is whole else 3 if span.kind != "visit" else 1 if span.start == span.end else 2

    def mark(phase: str, span: Interval, track: int) -> TraceEvent:
        return {
            "ph": phase,
            "name": f"tool {span.label}" if span.kind == "tool" else span.label,
            "cat": f"trajectory +{track}" if track else "trajectory",
            "id2": {"local": trajectory.trajectory_id},  # not "id", which would be shared by all processes
            "pid": TRAJECTORIES,
            "tid": LANES * TRAJECTORIES,
            "ts": _microseconds((span.start if phase == "b" else span.end) - origin),
        } | ({"args": _facts(trajectory) if span is whole else _details(span)} if phase == "b" else {})

    # 2. Each on the first track on which what is open lies around it.
    tracks: list[list[Interval]] = []
    for span in sorted([whole, *inside], key=lambda span: (span.start, rank(span), -span.end)):
        for track, around in enumerate(tracks):
            while around and rank(around[-1]) and around[-1].end <= span.start:
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


def _facts(trajectory: Trajectory) -> dict[str, object]:
    names = ("agent", "stop_reason", "score", "trained_tokens")
    facts = {name: getattr(trajectory, name) for name in names}
    return facts | {"group": trajectory.group_id, "parent": trajectory.parent_id}


def _details(span: Interval) -> dict[str, object]:
    if span.kind == "visit":
        return {"trigger": span.trigger}
    facts = {"state": span.state, "tokens": span.tokens, "generation": span.turn, "failure": span.failure}
    return {name: fact for name, fact in facts.items() if fact is not None}


def _replica(process: int, name: str, generations: list[tuple[Interval, str]], origin: float) -> Iterator[TraceEvent]:
    yield _named("process_name", process, replica_name(name) if name else "engine")
    lanes = packed([interval for interval, _ in generations])
    first = LANES * process
    for lane in range(max(lanes, default=-1) + 1):
        yield _named("thread_name", process, f"lane {lane}", tid=first + lane)
    changes: defaultdict[int, int] = defaultdict(int)
    for (interval, trajectory_id), lane in zip(generations, lanes, strict=True):
        start, end = _microseconds(interval.start - origin), _microseconds(interval.end - origin)
        yield {
            "ph": "X",
            "name": trajectory_id,
            "cat": "generate",
            "pid": process,
            "tid": first + lane,
            "ts": start,
            "dur": end - start,
            "args": {"state": interval.state, "generation": interval.turn, "tokens": interval.tokens},
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
