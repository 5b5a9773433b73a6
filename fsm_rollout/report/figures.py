"""The figures of a report: counts, histograms and courses over time, all of them sums over the trajectories' events.

Invariant: what is gathered of a trajectory is small (no tokens, no texts; of a run, a few pictures), so a run of any
size is read in one pass; and everything adds up: bars of a histogram to the number of values, the course of throughput
to the tokens sampled.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fsm_rollout.report.recording import Recording, kind_of_end
from fsm_rollout.report.spans import BUSY, Clock, Interval, Kind, parts_of
from fsm_rollout.report.texts import number, percent
from fsm_rollout.trajectory.latest_attempts import latest_of
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.stream import turns_of
from fsm_rollout.trajectory.wall_time import covered

BINS = 120  # points of a course over time
BARS = 24
PICTURES = 24  # of a run, that its report shows
_DOING: dict[Kind, str] = {
    "queue": "waiting for the engine",
    "generate": "generating",
    "tool": "in tools",
    "interact": "in interactions",
}


class Line:
    """What a report keeps of one trajectory."""

    def __init__(self, recording: Recording) -> None:
        trajectory = recording.trajectory
        self.trajectory_id = trajectory.trajectory_id
        self.group_id = trajectory.group_id
        self.agent = trajectory.agent
        self.parent_id = trajectory.parent_id
        self.ending = recording.ending
        self.kind = kind_of_end(recording.ending)
        self.detail = trajectory.detail
        self.failure = trajectory.failure  # whose fault its end was, if it failed
        self.score = trajectory.score
        self.sample = trajectory.sample
        self.tool_rewards = tuple(trajectory.tool_rewards)
        self.visits = trajectory.visits
        self.messages = turns_of(trajectory.streams)
        self.generations = trajectory.generations
        self.tokens = trajectory.response_tokens
        self.trained = trajectory.trained_tokens
        self.cost = trajectory.cost
        self.calls = trajectory.calls_seen
        self.failures = trajectory.calls_failed
        self.bad_calls = trajectory.bad_calls
        self.resumed = trajectory.resumptions  # how often it was suspended, or cut off, and resumed
        self.versions = recording.versions
        self.start = trajectory.started_at
        # Its end, or the latest event.
        self.end = recording.events[-1].at if trajectory.ended_at is None else trajectory.ended_at
        self.parts = parts_of(trajectory)  # seconds by what they went into
        self.away = trajectory.suspended_seconds
        self.longest = max(recording.intervals(*BUSY), key=lambda interval: interval.seconds, default=None)
        away = Clock(interval.times for interval in recording.intervals("away"))
        # When it was under way: from its start to its end without the times for which it was suspended.
        self.lives = tuple(away.runs(self.start, self.end))
        self.wall = sum(end - start for start, end in self.lives)  # seconds for which it was under way

    def why(self) -> str:
        """Return what its time went into, for the tail."""
        kind = max(BUSY, key=lambda name: self.parts[name])
        other = self.parts["other"]
        if not self.wall:
            return "nothing took any time"
        if other > self.parts[kind]:
            return f"{percent(other / self.wall)} outside of engine, tools and interactions"
        share = f"{percent(self.parts[kind] / self.wall)} {_DOING[kind]}"
        if kind == "generate":
            return f"{share}: {counted(self.generations, 'generation')}, {self.trained:,} trained tokens"
        if kind == "tool" and self.longest is not None and self.longest.kind == "tool":
            longest = f"the longest ({self.longest.label}) took {self.longest.seconds:.2f} s"
            return f"{share}: {counted(self.calls, 'call')}, {longest}"
        return share


def counted(count: int, word: str) -> str:
    """Return a number with its word."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class ReplicaUse:
    """What one engine process did; the courses have ``BINS`` points."""

    name: str
    generations: int
    tokens: int
    busy: float  # seconds in which at least one generation was under way on it
    queued: float  # seconds that its generations waited before, all together
    throughput: list[float]
    under_way: list[float]


@dataclass(slots=True)
class ToolUse:
    """All calls of one tool."""

    name: str
    seconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class PictureUse:
    """One picture of a run."""

    picture: StoredPicture
    trajectory_id: str
    """The first that was shown it."""
    tokens: set[int] = field(default_factory=set)
    """How many it was, by the models that saw it."""


class Figures:
    """Everything a report is about: :meth:`add` all trajectories, of which little is kept, then read."""

    def __init__(self, recordings: Iterable[Recording] = ()) -> None:
        self.lines: list[Line] = []
        self.tools: dict[str, ToolUse] = {}
        self.generations: list[Interval] = []
        self.queued: defaultdict[str, float] = defaultdict(float)  # seconds that generations waited, by replica
        self.pictures: dict[str, PictureUse] = {}  # the first that were shown, by hash
        self.seen: Counter[str] = Counter()  # how often each picture was shown, by hash
        self.picture_tokens = 0
        for recording in recordings:
            self.add(recording)

    def add(self, recording: Recording) -> None:
        """Take one trajectory in."""
        self.lines.append(Line(recording))
        self.generations += recording.intervals("generate")
        for interval in recording.intervals("queue"):
            self.queued[interval.replica] += interval.seconds
        for interval in recording.intervals("tool"):
            use = self.tools.setdefault(interval.label, ToolUse(interval.label))
            use.seconds.append(interval.seconds)
            if interval.failure is not None:
                use.failures[interval.failure] += 1
        for span in (span for stream in recording.trajectory.streams for span in stream.media):
            self.seen[name := span.picture.sha256] += 1
            self.picture_tokens += span.length
            if name not in self.pictures and len(self.pictures) < PICTURES:
                self.pictures[name] = PictureUse(span.picture, recording.trajectory.trajectory_id)
            if name in self.pictures:
                self.pictures[name].tokens.add(span.length)

    @cached_property
    def counted(self) -> list[Line]:
        """The trajectories without attempts that were given up, which are in no batch, and what those had called."""
        return list(latest_of(self.lines))

    @cached_property
    def own(self) -> list[Line]:
        """The prompts' own trajectories. A sub-agent has its caller's score, so it would count twice in a headline."""
        return [line for line in self.counted if line.parent_id is None]

    @cached_property
    def called(self) -> list[Line]:
        """The trajectories of sub-agents."""
        return [line for line in self.counted if line.parent_id is not None]

    @cached_property
    def begin(self) -> float:
        """When the first trajectory began."""
        return min((line.start for line in self.lines), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last thing happened."""
        return max((line.end for line in self.lines), default=0.0)

    @cached_property
    def clock(self) -> Clock:
        """A clock that stands still while nothing is under way, say between a crash and the resumed run."""
        gaps, reached = list[tuple[float, float]](), self.begin
        for start, end in sorted(life for line in self.lines for life in line.lives):
            if start > reached:
                gaps.append((reached, start))
            reached = max(reached, end)
        return Clock([*gaps, (reached, self.end)])

    @cached_property
    def seconds(self) -> float:
        """How long at least one trajectory was under way: the time axis of every course."""
        return self.clock(self.end) - self.clock(self.begin)

    def throughput(self) -> list[float]:
        """Return sampled tokens per second in each of ``BINS`` equal parts of the run."""
        return self._rate(self.generations)

    def under_way(self) -> list[float]:
        """Return the mean number of the prompts' own trajectories under way in each part."""
        return self._busy([life for line in self.lines if line.parent_id is None for life in line.lives])

    def load(self) -> list[float]:
        """Return the mean number of generations under way in each part."""
        return self._busy([interval.times for interval in self.generations])

    def replicas(self) -> list[ReplicaUse]:
        """Return what each replica did, by name; generations that name no replica are those of one without a name."""
        by_name: defaultdict[str, list[Interval]] = defaultdict(list)
        for interval in self.generations:
            by_name[interval.replica].append(interval)
        return [
            ReplicaUse(
                name=name,
                generations=len(generations),
                tokens=sum(interval.tokens for interval in generations),
                busy=covered([interval.times for interval in generations]),
                queued=self.queued[name],
                throughput=self._rate(generations),
                under_way=self._busy([interval.times for interval in generations]),
            )
            for name, generations in sorted(by_name.items())
        ]

    def _rate(self, generations: Sequence[Interval]) -> list[float]:
        return self._course([s.times for s in generations], [s.tokens for s in generations])

    def _busy(self, times: Sequence[tuple[float, float]]) -> list[float]:
        return self._course(times, [self.clock(end) - self.clock(start) for start, end in times])

    def _course(self, times: Sequence[tuple[float, float]], amounts: Sequence[float]) -> list[float]:
        """Spread each amount evenly over its time; return the sums per second by part, which add up to all amounts."""
        width = self.seconds / BINS
        if not width > 0 or not times:
            return [0.0] * BINS
        clock = np.array([(self.clock(start), self.clock(end)) for start, end in times]) - self.clock(self.begin)
        starts = clock[:, 0].clip(0.0, self.seconds - 1e-9 * width)
        seconds = (clock[:, 1] - starts).clip(1e-9 * width)
        reached = [((edge * width - starts) / seconds).clip(0.0, 1.0) @ np.array(amounts) for edge in range(BINS + 1)]
        course: list[float] = (np.diff(reached) / width).tolist()
        return course


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
    integers, bars = all(float(value).is_integer() for value in values), BARS if low < high else 1
    if integers:
        step = max(1, math.ceil((high - low + 1) / BARS))
        bars = math.ceil((high - low + 1) / step)
        low, high = low - 0.5, max(high, low - 0.5 + bars * step)
    counts: list[int] = np.histogram(values, bars, (low, high))[0].tolist()
    return Histogram(low, high, tuple(counts), mean, integers)
