"""When what happened: a trajectory's events as stretches of time and as visits.

Invariant: every stretch is read off exactly one event (every visit off two transitions) and lies within the
trajectory's life; nothing is estimated. Times are seconds on the scheduler's clock.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.trajectory import Trajectory
from fsm_rollout.trajectory.wall_time import covered

Kind = Literal["queue", "generate", "tool", "interact", "away"]
# `away`: from the last event before the trajectory was suspended until it was resumed.
KINDS: tuple[Kind, ...] = ("queue", "generate", "tool", "interact", "away")
BUSY = KINDS[:-1]  # what a trajectory's time goes into while it is under way
PARTS = (*BUSY, "other")  # the same, and the time in which none of these was under way


@dataclass(frozen=True, slots=True)
class Stretch:
    """Something that took from ``start`` to ``end``."""

    kind: Kind
    state: str
    start: float
    end: float
    label: str
    replica: str = ""
    tokens: int = 0
    failure: str | None = None
    turn: int | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class TimedVisit:
    """One visit of a state; ``trigger`` is what ended it (``None`` for the last)."""

    state: str
    start: float
    end: float
    trigger: str | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """What took how long."""

    # All waiting, sampling, tool calling, interacting and being away, in the order in which it ended.
    stretches: tuple[Stretch, ...] = ()
    visits: tuple[TimedVisit, ...] = ()  # the visits, in order; a final state's lasts no time

    def of(self, *kinds: Kind) -> list[Stretch]:
        """Return the stretches of some kinds."""
        return [stretch for stretch in self.stretches if stretch.kind in kinds]

    @property
    def end(self) -> float:
        """When the last of it ended."""
        ends = [visit.end for visit in self.visits] + [stretch.end for stretch in self.stretches]
        return max(ends, default=-math.inf)

    def totals(self) -> dict[str, float]:
        """Return, for each kind, the seconds in which at least one such thing was under way."""
        return {kind: wall_seconds(self.of(kind)) for kind in KINDS}


def times_of(history: Sequence[AnyEvent]) -> Times:
    """Return when what happened."""
    stretches: list[Stretch] = []
    visits: list[TimedVisit] = []
    origin = since = history[0].at if history else 0.0
    turn, turn_of, state, final = 0, dict[str, int](), "", False

    def add(kind: Kind, state: str, start: float, end: float, label: str, replica: str = "", tokens: int = 0,
            failure: str | None = None, turn: int | None = None) -> None:  # fmt: skip
        start, end = max(start, origin), max(end, origin)
        stretches.append(Stretch(kind, state, start, end, label, replica, tokens, failure, turn))

    for event in history:
        match event:
            case events.Prompted():
                state = event.initial
            case events.Transitioned():
                visits.append(TimedVisit(state, since, event.at, event.trigger))
                state, since, final = event.dest, event.at, event.stop_reason is not None
            case events.Resumed() if event.away > 0:
                add("away", state, event.at - event.away, event.at, "suspended")
            case events.ContextOpened():
                turn_of.pop(event.context, None)
            case events.Generated():
                index = turn_of.get(event.context, turn) if event.resumed else turn
                turn_of[event.context] = index
                turn += not event.resumed
                begun, replica, tokens = event.at - event.seconds, event.replica, len(event.ids)
                if event.queue_seconds > 0:
                    add("queue", event.state, begun - event.queue_seconds, begun, "queue", replica, turn=index)
                cut = None if event.finish_reason == FinishReason.STOP else event.finish_reason
                add("generate", event.state, begun, event.at, f"generate {tokens} tokens", replica, tokens, cut, index)
            case events.Called():
                name = event.name or "broken call"
                add("tool", event.state, event.at - event.seconds, event.at, name, failure=event.failure)
            case events.UserReplied():
                add("interact", event.state, event.at - event.seconds, event.at, "interaction")
            case _:
                pass
    if history:
        visits.append(TimedVisit(state, since, since if final else max(since, history[-1].at)))
    return Times(tuple(stretches), tuple(visits))


def parts_of(trajectory: Trajectory) -> dict[str, float]:
    """Return the seconds that a trajectory spent in each of :data:`PARTS`."""
    return {part: getattr(trajectory, f"{part}_seconds") for part in PARTS}


def wall_seconds(stretches: Iterable[Stretch]) -> float:
    """Return the seconds in which at least one of the stretches was under way."""
    return covered([(stretch.start, stretch.end) for stretch in stretches])


class Clock:
    """A clock that stands still in some gaps: a run that resumed after a night is shown without the night."""

    def __init__(self, gaps: Iterable[tuple[float, float]] = ()) -> None:
        self._starts, self._ends, self._before = list[float](), list[float](), [0.0]
        for start, end in sorted(gaps):
            if self._ends and start <= self._ends[-1]:
                start = self._ends[-1]
            if end > start:
                self._starts.append(start)
                self._ends.append(end)
                self._before.append(self._before[-1] + end - start)

    def __call__(self, at: float) -> float:
        """Return ``at`` less all gaps before it; within a gap the clock stands still."""
        place = bisect(self._starts, at)
        return at - self._before[place] + (max(0.0, self._ends[place - 1] - at) if place else 0.0)

    def runs(self, start: float, end: float) -> list[tuple[float, float]]:
        """Return the parts of ``[start, end]`` in which it runs."""
        inside = [gap for gap in zip(self._starts, self._ends, strict=True) if gap[0] < end and gap[1] > start]
        bounds = [start, *(at for gap in inside for at in gap), end]
        return [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if b > a]


def packed(stretches: Sequence[Stretch]) -> list[int]:
    """Return a row number for each stretch such that no two in one row overlap, with as few rows as can be."""
    order = sorted(range(len(stretches)), key=lambda index: (stretches[index].start, stretches[index].end))
    rows = [0] * len(stretches)
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    used = 0
    for index in order:
        while busy and busy[0][0] <= stretches[index].start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free, used = [used], used + 1
        rows[index] = heapq.heappop(free)
        heapq.heappush(busy, (stretches[index].end, rows[index]))
    return rows
