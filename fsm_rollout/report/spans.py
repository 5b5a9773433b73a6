"""When what happened: a trajectory's events as intervals of time.

Invariant: every interval is read off exactly one event (a visit off two transitions) and lies within the trajectory's
life; nothing is estimated. Timelines, pages, reports and tables show these and no others. Times are seconds on the
scheduler's clock.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.trajectory import Trajectory

Kind = Literal["visit", "queue", "generate", "tool", "interact", "away"]
"""`away`: from the last event before the trajectory was suspended until it was resumed."""
# What a trajectory's time goes into while it is under way.
BUSY: tuple[Kind, ...] = ("queue", "generate", "tool", "interact")
PARTS = (*BUSY, "other")  # the same, and the time in which none of these was under way


class Interval(msgspec.Struct, frozen=True, gc=False):
    """Something that took from ``start`` to ``end``."""

    kind: Kind
    state: str
    start: float
    end: float
    label: str
    trigger: str | None = None  # what ended a visit; `None` for the last
    replica: str = ""
    tokens: int = 0
    failure: str | None = None
    turn: int | None = None

    @property
    def times(self) -> tuple[float, float]:
        """When it began and ended."""
        return self.start, self.end

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Turns:
    """Numbers the generations of a trajectory as its events come; one that goes on after a cut is the same one."""

    def __init__(self) -> None:
        self._next, self._of = 0, dict[str, int]()  # by context

    def opened(self, context: str) -> None:
        """Hear that a context begins another stream."""
        self._of.pop(context, None)

    def number(self, event: events.Generated) -> int:
        """Return the number of a generation."""
        number = self._of[event.context] = self._of.get(event.context, self._next) if event.resumed else self._next
        self._next += not event.resumed
        return number


def intervals_of(history: Sequence[AnyEvent]) -> Iterator[Interval]:
    """Yield visits, waiting, sampling, tool calling, interacting and being away, in the order in which they ended."""
    state, since, origin, is_final, turns = "", 0.0, 0.0, False, Turns()

    def took(kind: Kind, seconds: float, end: float, label: str, **more: Any) -> Interval:
        end = max(end, origin)
        start = min(max(end - seconds, origin), end)
        return Interval(kind, more.pop("state", state), start, end, label, **more)

    for event in history:
        match event:
            case events.Generated(tokens=tokens):
                where = {"state": event.state, "replica": event.replica, "turn": turns.number(event)}
                if event.queue_seconds > 0:
                    yield took("queue", event.queue_seconds, event.at - event.seconds, "queue", **where)
                cut = None if event.finish_reason == FinishReason.STOP else event.finish_reason
                label = f"generate {tokens} tokens"
                yield took("generate", event.seconds, event.at, label, tokens=tokens, failure=cut, **where)
            case events.Transitioned():
                yield Interval("visit", state, since, event.at, state, event.trigger)
                state, since, is_final = event.dest, event.at, event.stop_reason is not None
            case events.Called():
                label = event.name or "broken call"
                yield took("tool", event.seconds, event.at, label, state=event.state, failure=event.failure)
            case events.ContextOpened():
                turns.opened(event.context)
            case events.Prompted():
                state, since, origin = event.initial, event.at, event.at
            case events.UserReplied():
                yield took("interact", event.seconds, event.at, "interaction", state=event.state)
            case events.Resumed() if event.away > 0:
                yield took("away", event.away, event.at, "suspended")
    if history:
        end = since if is_final else max(since, history[-1].at)  # a final state's visit lasts no time
        yield Interval("visit", state, since, end, state)


def parts_of(trajectory: Trajectory) -> dict[str, float]:
    """Return the seconds that a trajectory spent in each of :data:`PARTS`."""
    return {part: getattr(trajectory, f"{part}_seconds") for part in PARTS}


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


def packed(intervals: Sequence[Interval]) -> list[int]:
    """Return a row number for each interval such that no two in one row overlap, with as few rows as can be."""
    order = sorted(range(len(intervals)), key=lambda index: (intervals[index].start, intervals[index].end))
    rows = [0] * len(intervals)
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    used = 0
    for index in order:
        while busy and busy[0][0] <= intervals[index].start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free, used = [used], used + 1
        rows[index] = heapq.heappop(free)
        heapq.heappush(busy, (intervals[index].end, rows[index]))
    return rows
