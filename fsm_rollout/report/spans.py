"""When what happened: a trajectory's events as intervals of time.

Invariant: every interval is read off exactly one event (a visit off two transitions) and lies within the trajectory's
life; nothing is estimated. Timelines, pages, reports, tables and traces show these and no others. Times are seconds on
the scheduler's clock. A trace is made from the same :class:`Fold` while a run goes on and from its journal.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.trace_ids import reply_key, try_key, visit_key
from fsm_rollout.trajectory.trajectory import Trajectory

Kind = Literal["visit", "queue", "generate", "tool", "interact", "away", "part", "ask", "reward"]
# `away`: from the last event before the trajectory was suspended until it was resumed. Only of a fold in parts:
# `part` (the trajectory from its beginning or a resumption to its end or a suspension), `ask` (the environment asked a
# model), `reward` (which is given after the end).
# What a trajectory's time goes into while it is under way.
BUSY: tuple[Kind, ...] = ("queue", "generate", "tool", "interact")
AGAIN = "again"
PARTS = (*BUSY, "other")  # the same, and the time in which none of these was under way


_TIMED = frozenset({
    events.Generated, events.Transitioned, events.Called, events.PromptExtended, events.ContextOpened, events.Prompted,
    events.UserReplied, events.ModelQueried, events.Resumed, events.Suspended, events.Ended, events.Scored,
    events.NotScored,
})  # fmt: skip
"""What :meth:`Fold.take` looks at."""


class Interval(msgspec.Struct, frozen=True, gc=False):
    """Something that took from ``start`` to ``end``."""

    kind: Kind
    state: str
    start: float
    end: float
    label: str
    trigger: str | None = None  # what ended a visit; `None` for the last. AGAIN: a try after which there was another
    replica: str = ""
    tokens: int = 0
    failure: str | None = None
    turn: int | None = None
    event: AnyEvent | None = None  # what it is read off; `None`: nothing has ended it, the process died
    key: str = ""  # its name within the trajectory, and that of the interval around it
    within: str = ""
    input_tokens: int = 0  # the length of a generation's input
    marks: Sequence[events.Scored] = ()  # the scores that were given in a visit

    @property
    def times(self) -> tuple[float, float]:
        """When it began and ended."""
        return self.start, self.end

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Fold:
    """Takes in a trajectory's events one by one, and gives back the intervals that end with each.

    Args:
        in_parts: the trajectory itself is given, too, and both it and the visit under way end where it is set aside or
            cut off, and begin anew where it goes on. So everything ends once, in the process that it began in, unless
            that died; and everything but a reward lies within what its ``within`` names.
    """

    def __init__(self, *, in_parts: bool = False) -> None:
        self.in_parts = in_parts
        self.part = self.visit = 0
        self._state, self._final, self._open = "", False, False
        self._origin = self._since = self._begun = self._latest = self._end = 0.0  # `_begun`: the present part
        self._turn, self._turn_of = 0, dict[str, int]()
        self._lengths, self._turns = dict[str, int](), dict[str, int]()  # by context
        self._replies = self._rewards = 0
        self._tries: dict[str, int] = {}  # by call
        self._marks: list[events.Scored] = []

    @property
    def part_key(self) -> str:
        """The key of the present part."""
        return f"part/{self.part}"

    def take(self, event: AnyEvent) -> list[Interval]:
        """Take in the next event."""
        found: list[Interval] = []
        if type(event) not in _TIMED:  # half of all; to be compared with each kind below takes a while
            self._latest = event.at
            return found
        match event:
            case events.Generated():
                found = self._generated(event)
            case events.Transitioned():
                found = self._left(event.at, event.trigger, event)
                self._state, self._since, self._final = event.dest, event.at, event.stop_reason is not None
                self._replies = 0
                self.visit += 1
            case events.Called():
                found = self._called(event)
            case events.PromptExtended():
                self._lengths[event.context] = self._lengths.get(event.context, 0) + len(event.ids)
            case events.ContextOpened():
                self._turn_of.pop(event.context, None)
                self._lengths[event.context] = len(event.ids)
            case events.Prompted():
                self._state, self._open = event.initial, True
                self._origin = self._since = self._begun = self._end = event.at
            case events.UserReplied():
                key = reply_key(self.visit, self._replies)
                self._replies += 1
                found = [self._took("interact", event.state, event.seconds, event.at, "interaction", event, key)]
            case events.ModelQueried() if self.in_parts:
                key = f"ask:{event.engine}/{event.index}"  # as the request is called
                found = [
                    self._took("ask", event.state, event.seconds, event.at, "query", event, key, tokens=event.tokens)
                ]
            case events.Resumed():
                found = self._resumed(event)
            case events.Suspended() if self.in_parts and self._open:
                found = [*self._left(event.at, None, event), self._part(event.at, event)]
                self._open = False
            case events.Ended() if self.in_parts:
                found = [*self._left(event.at, None, event), self._part(event.at, event)]
                self._open, self._final = False, True
            case events.Scored() | events.NotScored() if self.in_parts:
                found = self._scored(event)
            case _:
                pass
        self._latest = event.at
        return found

    def rest(self) -> list[Interval]:
        """Return what is still open, as far as it has come."""
        if self.in_parts:
            return [*self._left(self._latest, None, None), self._part(self._latest, None)] if self._open else []
        end = self._since if self._final else max(self._since, self._latest)
        return [Interval("visit", self._state, self._since, end, self._state)]  # a final state's visit lasts no time

    def _visit_key(self) -> str:
        return visit_key(self.visit, self.part)

    def _took(
        self,
        kind: Kind,
        state: str,
        seconds: float,
        end: float,
        label: str,
        event: AnyEvent,
        key: str = "",
        **more: Any,
    ) -> Interval:
        earliest = self._since if self.in_parts else self._origin
        end = max(end, earliest)
        start = min(max(end - seconds, earliest), end)
        if self.in_parts:
            more |= {"event": event, "key": key, "within": self._visit_key()}
        return Interval(kind, state, start, end, label, **more)

    def _left(self, at: float, trigger: str | None, event: AnyEvent | None) -> list[Interval]:
        """Return the visit that ends, or is broken off. In parts there is none of a final state."""
        state, since = self._state, self._since
        if not self.in_parts:
            return [Interval("visit", state, since, at, state, trigger)]
        if self._final or not self._open:
            return []
        marks, self._marks = self._marks, []
        self._end = max(at, since)
        return [
            Interval(
                "visit", state, since, self._end, state, trigger, event=event, key=self._visit_key(),
                within=self.part_key, marks=marks,
            )
        ]  # fmt: skip

    def _part(self, at: float, event: AnyEvent | None) -> Interval:
        """Return the part that ends; where the trajectory ends twice, it stays as it was, with another reason."""
        end = max(self._end, self._begun)  # its visits lie close: it ends with the last of them
        return Interval("part", self._state, self._begun, end, "", event=event, key=self.part_key, turn=self.part)

    def _resumed(self, event: events.Resumed) -> list[Interval]:
        if not self.in_parts:
            away = event.away
            return [self._took("away", self._state, away, event.at, "suspended", event)] if away > 0 else []
        found = self.rest()  # what the process that died has left open
        self.part += 1
        self._begun = self._since = self._end = event.at  # on another clock, maybe
        self._open = True
        return found

    def _generated(self, event: events.Generated) -> list[Interval]:
        context, tokens, found = event.context, len(event.ids), list[Interval]()
        index = self._turn_of.get(context, self._turn) if event.resumed else self._turn
        self._turn_of[context] = index
        self._turn += not event.resumed
        length, turn = self._lengths.get(context, 0), self._turns.get(context, 0) - event.resumed
        self._lengths[context], self._turns[context] = length + tokens, turn + 1
        read = length
        if event.usage is not None:  # an engine that gives text alone has counted for itself
            read, tokens = event.usage.input, event.usage.output
        if event.queue_seconds > 0 and not self.in_parts:
            begun, replica = event.at - event.seconds, event.replica
            found.append(
                self._took(
                    "queue", event.state, event.queue_seconds, begun, "queue", event, replica=replica, turn=index
                )
            )
        cut = None if event.finish_reason == FinishReason.STOP else event.finish_reason
        seconds = event.seconds + event.queue_seconds if self.in_parts else event.seconds
        found.append(
            self._took(
                "generate", event.state, seconds, event.at, f"generate {tokens} tokens", event,
                f"{context}/{turn}/{length}", tokens=tokens, failure=cut, replica=event.replica, turn=index,
                input_tokens=read,
            )
        )  # fmt: skip
        return found

    def _called(self, event: events.Called) -> list[Interval]:
        """Return a call; in parts each of its tries, the pause before it included."""
        label, state = event.name or "broken call", event.state
        if not self.in_parts:
            return [self._took("tool", state, event.seconds, event.at, label, event, failure=event.failure)]
        number, since, found = self._tries.get(event.id, 0), event.at - event.seconds, list[Interval]()
        for seconds, failure in (*event.failed_tries, (event.at - since, event.failure)):
            number += 1
            again = len(found) < len(event.failed_tries)
            end, key = since + seconds if again else event.at, try_key(event.id, number)
            tried = self._took("tool", state, end - since, end, label, event, key, failure=failure, turn=number)
            found.append(replace(tried, trigger=AGAIN) if again else tried)
            since = end
        self._tries[event.id] = number
        return found

    def _scored(self, event: events.Scored | events.NotScored) -> list[Interval]:
        if self._open:
            if isinstance(event, events.Scored):
                self._marks.append(event)
            return []
        end = max(event.at, self._end)
        start, key = max(end - event.seconds, self._end), f"reward/{self._rewards}"
        self._rewards += 1
        return [Interval("reward", self._state, start, end, "", event=event, key=key, within=self.part_key)]


def intervals_of(history: Sequence[AnyEvent]) -> Iterator[Interval]:
    """Yield visits, waiting, sampling, tool calling, interacting and being away, in the order in which they ended."""
    fold = Fold()
    for event in history:
        yield from fold.take(event)
    if history:
        yield from fold.rest()


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
