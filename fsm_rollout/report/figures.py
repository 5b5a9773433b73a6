"""The figures of a report: counts, spreads and courses over time, all of them sums over the trajectories' events.

Invariant: what is gathered of a trajectory is small (no tokens, no texts), so a run of any size is read in one pass;
and everything adds up: bars of a histogram to the number of values, the course of throughput to the tokens sampled.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fsm_rollout.batch.rows import turns_of
from fsm_rollout.report.endings import kind_of_end
from fsm_rollout.report.moments import BUSY, KINDS, Clock, Kind, Stretch, covered, stretches
from fsm_rollout.report.pages import number
from fsm_rollout.report.recorded import Recorded
from fsm_rollout.trajectory.events import Resumed
from fsm_rollout.trajectory.trajectory import Trajectory

BINS = 120
"""Points of a course over time."""
BARS = 24


@dataclass(frozen=True, slots=True)
class Line:
    """What a report keeps of one trajectory."""

    trajectory_id: str
    group_id: str
    agent: str
    parent_id: str | None
    ending: str
    detail: str | None
    score: float | None
    turns: int
    generations: int
    tokens: int
    trained: int
    calls: int
    failures: int
    start: float
    end: float
    seconds: dict[Kind, float]
    """Of its time, how much at least one such thing was under way."""
    longest: Stretch | None
    lives: tuple[tuple[float, float], ...]
    """When it was under way: from its start to its end without the times for which it was set aside."""
    resumed: int
    """How often it was set aside, or cut off, and went on."""
    versions: tuple[int, ...]
    """The weight versions that its trained tokens were sampled with, oldest first."""

    @property
    def wall(self) -> float:
        """Seconds from its first event to its end (or the latest event), without those for which it was set aside."""
        return sum(end - start for start, end in self.lives)

    @property
    def kind(self) -> Literal["fine", "cut", "open"]:
        """What kind of an end it came to."""
        return kind_of_end(self.ending)

    @property
    def away(self) -> float:
        """Seconds for which it was set aside."""
        return self.seconds["away"]

    @property
    def other(self) -> float:
        """Seconds in which none of the kinds was under way, at least."""
        return max(0.0, self.wall - sum(self.seconds[kind] for kind in BUSY))

    def why(self) -> str:
        """Return what its time went into, for the tail."""
        kind = max(BUSY, key=lambda name: self.seconds[name])
        if not self.wall:
            return "nothing took any time"
        if self.other > self.seconds[kind]:
            return f"{self.other / self.wall:.0%} outside of engine, tools and interactions"
        share = f"{self.seconds[kind] / self.wall:.0%} {_DOING[kind]}"
        if kind == "generate":
            return f"{share}: {_counted(self.generations, 'generation')}, {self.trained:,} trained tokens"
        if kind == "tool" and self.longest is not None and self.longest.kind == "tool":
            longest = f"the longest ({self.longest.label}) took {self.longest.seconds:.2f} s"
            return f"{share}: {_counted(self.calls, 'call')}, {longest}"
        return share


_DOING: dict[Kind, str] = {
    "queue": "waiting for the engine",
    "generate": "generating",
    "tool": "in tools",
    "interact": "in interactions",
}


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def versions_of(trajectory: Trajectory) -> tuple[int, ...]:
    """Return the weight versions that its trained tokens were sampled with, oldest first."""
    trained = [stream.tokens for stream in trajectory.streams if stream.tokens.trained]
    return tuple(sorted({span.version for tokens in trained for span in tokens.spans if span.version >= 0}))


@dataclass(frozen=True, slots=True)
class Replica:
    """What one engine process did; the courses have ``BINS`` points."""

    name: str
    generations: int
    tokens: int
    busy: float
    """Seconds in which at least one generation was under way on it."""
    queued: float
    """Seconds that its generations waited before, all together."""
    throughput: list[float]
    under_way: list[float]


@dataclass(slots=True)
class ToolUse:
    """All calls of one tool."""

    name: str
    seconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Figures:
    """Everything a report is about: :meth:`add` each trajectory, of which little is kept."""

    lines: list[Line] = field(default_factory=list)
    tools: dict[str, ToolUse] = field(default_factory=dict)
    generations: list[Stretch] = field(default_factory=list)
    queued: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _known: tuple[int, Clock] = field(default_factory=lambda: (0, Clock()))
    """The clock, and of how many lines it is."""

    def add(self, recorded: Recorded) -> None:
        """Take one trajectory in."""
        trajectory, events = recorded.trajectory, recorded.events
        found = stretches(events)
        for stretch in found:
            if stretch.kind == "generate":
                self.generations.append(stretch)
            elif stretch.kind == "queue":
                self.queued[stretch.replica] += stretch.seconds
            elif stretch.kind == "tool":
                use = self.tools.setdefault(stretch.label, ToolUse(stretch.label))
                use.seconds.append(stretch.seconds)
                if stretch.failure is not None:
                    use.failures[stretch.failure] += 1
        end = trajectory.ended_at if trajectory.ended_at is not None else events[-1].at
        clock = Clock((stretch.start, stretch.end) for stretch in found if stretch.kind == "away")
        self.lines.append(
            Line(
                trajectory_id=trajectory.trajectory_id,
                group_id=trajectory.group_id,
                agent=trajectory.agent,
                parent_id=trajectory.parent_id,
                ending=trajectory.stop_reason or ("suspended" if trajectory.suspended is not None else "unfinished"),
                detail=trajectory.detail,
                score=trajectory.score,
                turns=sum(map(turns_of, trajectory.streams)),
                generations=trajectory.turn,
                tokens=trajectory.response_tokens,
                trained=trajectory.trained_tokens,
                calls=trajectory.calls_seen,
                failures=trajectory.calls_failed,
                start=trajectory.started_at,
                end=end,
                seconds={kind: covered([s for s in found if s.kind == kind]) for kind in KINDS},
                longest=max((s for s in found if s.kind != "away"), key=lambda s: s.seconds, default=None),
                lives=tuple(clock.runs(trajectory.started_at, end)),
                resumed=sum(isinstance(event, Resumed) for event in events),
                versions=versions_of(trajectory),
            )
        )

    @property
    def own(self) -> list[Line]:
        """Those of the prompts; sub-agents are called by them, and have their scores."""
        return [line for line in self.lines if line.parent_id is None]

    @property
    def called(self) -> list[Line]:
        """Those of sub-agents."""
        return [line for line in self.lines if line.parent_id is not None]

    @property
    def begin(self) -> float:
        """When the first trajectory began."""
        return min((line.start for line in self.lines), default=0.0)

    @property
    def end(self) -> float:
        """When the last thing happened."""
        return max((line.end for line in self.lines), default=0.0)

    @property
    def seconds(self) -> float:
        """How long at least one trajectory was under way; what courses over time are over."""
        clock = self._clock()
        return clock(self.end) - clock(self.begin)

    def _clock(self) -> Clock:
        """Return the clock that stands while nothing is under way: between a crash and the run that goes on, say."""
        if self._known[0] == len(self.lines):
            return self._known[1]
        gaps, reached = list[tuple[float, float]](), self.begin
        for start, end in sorted(life for line in self.lines for life in line.lives):
            if start > reached:
                gaps.append((reached, start))
            reached = max(reached, end)
        self._known = (len(self.lines), Clock([*gaps, (reached, self.end)]))
        return self._known[1]

    def throughput(self) -> list[float]:
        """Return sampled tokens per second in each of ``BINS`` equal parts of the run."""
        return self._rate(self.generations)

    def under_way(self) -> list[float]:
        """Return the mean number of the prompts' own trajectories under way in each part."""
        return self._busy([life for line in self.own for life in line.lives])

    def load(self) -> list[float]:
        """Return the mean number of generations under way in each part."""
        return self._busy([(stretch.start, stretch.end) for stretch in self.generations])

    def replicas(self) -> list[Replica]:
        """Return what each replica did, by name; chunks that name none are of one without a name."""
        by_name: defaultdict[str, list[Stretch]] = defaultdict(list)
        for stretch in self.generations:
            by_name[stretch.replica].append(stretch)
        return [
            Replica(
                name=name,
                generations=len(own),
                tokens=sum(stretch.tokens for stretch in own),
                busy=covered(own),
                queued=self.queued[name],
                throughput=self._rate(own),
                under_way=self._busy([(stretch.start, stretch.end) for stretch in own]),
            )
            for name, own in sorted(by_name.items())
        ]

    def _rate(self, generations: Sequence[Stretch]) -> list[float]:
        width = self.seconds / BINS
        bins = self._course([(s.start, s.end, float(s.tokens)) for s in generations])
        return [tokens / width if width else 0.0 for tokens in bins]

    def _busy(self, times: Sequence[tuple[float, float]]) -> list[float]:
        width, clock = self.seconds / BINS, self._clock()
        bins = self._course([(start, end, clock(end) - clock(start)) for start, end in times])
        return [amount / width if width else 0.0 for amount in bins]

    def _course(self, amounts: Iterable[tuple[float, float, float]]) -> list[float]:
        """Spread each amount evenly over its time and return the sums by part: they add up to the amounts' sum.

        An amount's whole parts are entered as two differences, so that the cost does not grow with its length.
        """
        clock = self._clock()
        begin, width = clock(self.begin), self.seconds / BINS
        sums, differences = [0.0] * BINS, [0.0] * (BINS + 1)
        for start, end, amount in amounts if width > 0 else ():
            low = min(max((clock(start) - begin) / width, 0.0), BINS - 1e-9)
            high = min(max((clock(end) - begin) / width, low), float(BINS))
            first, last = int(low), min(int(high), BINS - 1)
            if first == last or high - low < 1e-9:
                sums[first] += amount
                continue
            rate = amount / (high - low)
            sums[first] += rate * (first + 1 - low)
            sums[last] += rate * (high - last)
            differences[first + 1] += rate
            differences[last] -= rate
        level = 0.0
        for place in range(BINS):
            level += differences[place]
            sums[place] += level
        return sums


@dataclass(frozen=True, slots=True)
class Histogram:
    """Equal bars from ``low`` to ``high``; ``counts`` add up to the number of values."""

    low: float
    high: float
    counts: tuple[int, ...]
    mean: float
    integers: bool

    def bar(self, place: int, say: Callable[[float], str] = number) -> str:
        """Return which values a bar holds; ``say`` writes one."""
        width = (self.high - self.low) / len(self.counts)
        low, high = self.low + place * width, self.low + (place + 1) * width
        if self.integers:
            first, last = math.ceil(low), math.ceil(high) - 1
            return say(first) if first >= last else f"{say(first)} to {say(last)}"
        return f"{say(low)} to {say(high)}"


def histogram(values: Sequence[float]) -> Histogram | None:
    """Return the histogram of finite values, ``None`` when there are none. Whole numbers never share a bar unevenly."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return None
    low, high, mean = min(values), max(values), math.fsum(values) / len(values)
    integers = all(float(value).is_integer() for value in values)
    if integers:
        step = max(1, math.ceil((high - low + 1) / BARS))
        bars = math.ceil((high - low + 1) / step)
        counts = Counter(int(value - low) // step for value in values)
        return Histogram(low - 0.5, low - 0.5 + bars * step, tuple(counts[n] for n in range(bars)), mean, True)
    width = (high - low) / BARS
    places = Counter(min(int((value - low) / width), BARS - 1) if width > 0 else 0 for value in values)
    return Histogram(low, high, tuple(places[n] for n in range(BARS)), mean, False)
