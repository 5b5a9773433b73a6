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
from pathlib import Path
from typing import Any

from fsm_rollout.diagrams.moments import Stretch, packed, stays, stretches
from fsm_rollout.diagrams.pages import write_page
from fsm_rollout.diagrams.recorded import Recorded

TRAJECTORIES = 1
"""Process number of the trajectories; the replicas' follow."""


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


def _trajectory(one: Recorded, origin: float) -> Iterator[dict[str, Any]]:
    trajectory = one.trajectory
    common = {"cat": "trajectory", "id": trajectory.trajectory_id, "pid": TRAJECTORIES, "tid": 0}

    def pair(name: str, start: float, end: float, **args: Any) -> Iterator[dict[str, Any]]:
        yield {**common, "ph": "b", "name": name, "ts": _microseconds(start - origin), "args": args}
        yield {**common, "ph": "e", "name": name, "ts": _microseconds(end - origin)}

    found, visits = stretches(one.events), stays(one.events)
    ends = [one.events[-1].at if trajectory.ended_at is None else trajectory.ended_at]
    whole, close = pair(
        trajectory.trajectory_id,
        one.events[0].at,
        max([*ends, *(stay.end for stay in visits), *(stretch.end for stretch in found)]),
        agent=trajectory.agent,
        group=trajectory.group_id,
        stop_reason=trajectory.stop_reason,
        score=trajectory.score,
        trained_tokens=trajectory.trained_tokens,
        parent=trajectory.parent_id,
    )
    yield whole
    for stay in visits:
        yield from pair(stay.state, stay.start, stay.end, trigger=stay.trigger)
    for stretch in found:
        facts = {"state": stretch.state, "tokens": stretch.tokens, "turn": stretch.turn, "failure": stretch.failure}
        name = stretch.label if stretch.kind != "tool" else f"tool {stretch.label}"
        yield from pair(name, stretch.start, stretch.end, **{k: v for k, v in facts.items() if v is not None})
    yield close


def _replica(number: int, replica: str, found: list[tuple[Stretch, str]], origin: float) -> Iterator[dict[str, Any]]:
    yield _named("process_name", number, f"replica {replica}" if replica else "engine")
    lanes = packed([stretch for stretch, _ in found])
    for lane in range(max(lanes, default=-1) + 1):
        yield _named("thread_name", number, f"lane {lane}", tid=lane)
    changes: defaultdict[int, int] = defaultdict(int)
    for (stretch, trajectory_id), lane in zip(found, lanes, strict=True):
        start, end = _microseconds(stretch.start - origin), _microseconds(stretch.end - origin)
        yield {
            "ph": "X",
            "name": trajectory_id,
            "cat": "generate",
            "pid": number,
            "tid": lane,
            "ts": start,
            "dur": end - start,
            "args": {"state": stretch.state, "turn": stretch.turn, "tokens": stretch.tokens},
        }
        changes[start] += 1
        changes[end] -= 1
    running = 0
    for at in sorted(changes):
        running += changes[at]
        yield {"ph": "C", "name": "generations", "pid": number, "tid": 0, "ts": at, "args": {"under way": running}}


def _named(what: str, pid: int, name: str, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
