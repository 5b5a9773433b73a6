"""The reader of runs, and the samples of one, by prompt: what is listed, judged and compared.

Invariant: what is kept of a trajectory is small, so a run of any size is read in one pass, and one that goes on is read
on from there. Of each sample the latest attempt counts, if it has ended; sub-agents' trajectories, which have their
callers' scores, are no samples.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import msgspec

from fsm_rollout.jobs.run_folder import SUMMARY
from fsm_rollout.report.recording import OPEN, Recording
from fsm_rollout.statistics.estimates import CONFIDENCE
from fsm_rollout.trajectory.event_bytes import comparable
from fsm_rollout.trajectory.events import Called
from fsm_rollout.trajectory.journal import JournalFolder, Report, changed, recordings
from fsm_rollout.trajectory.latest_attempts import latest_of
from fsm_rollout.trajectory.trajectory import Trajectory


@dataclass(slots=True)
class Sample:
    """What is kept of one trajectory: a sample's, or a sub-agent's (``parent_id``)."""

    trajectory_id: str
    group_id: str
    parent_id: str | None
    agent: str
    state: str
    ending: str
    """The stop reason; ``suspended`` or ``unfinished`` while there is none."""
    detail: str | None
    score: float | None
    visits: Mapping[str, int]
    failures: Sequence[str]
    """What kinds of failures its tool calls had."""
    figures: Mapping[str, float]
    """What it took, by the names of :data:`FIGURES`."""
    events: int
    """How many it has so far."""

    @classmethod
    def of(cls, recording: Recording) -> Sample:
        """Return what is kept of a trajectory."""
        t, history = recording.trajectory, recording.events
        failures = {event.failure: None for event in history if isinstance(event, Called) and event.failure is not None}
        figures = {name: float(took) for name, figure in FIGURES.items() if (took := figure(t)) is not None}
        return cls(
            t.trajectory_id, t.group_id, t.parent_id, t.agent, t.state, recording.ending, t.detail, t.score,
            dict(t.visits), tuple(failures), figures, len(history),
        )  # fmt: skip

    @property
    def ended(self) -> bool:
        """Whether it has a stop reason."""
        return self.ending not in OPEN


FIGURES: Mapping[str, Callable[[Trajectory], float | None]] = {
    "generations": lambda trajectory: trajectory.generations,
    "tokens": lambda trajectory: trajectory.response_tokens,
    "tool calls": lambda trajectory: trajectory.calls_seen,
    "tool errors": lambda trajectory: trajectory.calls_failed,
    "seconds": lambda trajectory: trajectory.elapsed(trajectory.ended_at or trajectory.latest_at),
    "cost": lambda trajectory: trajectory.cost,
}
"""What a sample took, beside its score; ``None``: nothing that is known."""


@dataclass(slots=True)
class PromptSamples:
    """The samples of one prompt."""

    digest: bytes
    """Tells prompts of one name and other messages apart."""
    columns: Mapping[str, object]
    """The prompt's extra fields."""
    samples: list[Sample] = field(default_factory=list)

    @property
    def scores(self) -> list[float]:
        """The scores of those that have one."""
        return [sample.score for sample in self.samples if sample.score is not None]

    def took(self, figure: str) -> list[float]:
        """Return what each sample took."""
        return [sample.figures.get(figure, 0.0) for sample in self.samples]

    def passed(self, least: float) -> list[bool]:
        """Say of each sample with a score whether that is at least so much."""
        return [score >= least for score in self.scores]


@dataclass(slots=True)
class RunSamples:
    """A run, as far as it is judged: its samples by the names of their prompts."""

    folder: Path
    prompts: dict[str, PromptSamples]
    unfinished: int
    """Samples that have not ended, and count nowhere."""
    confidence: float
    """What intervals need for a promise of :data:`~fsm_rollout.statistics.estimates.CONFIDENCE`; more where the run
    was looked at several times (``until``)."""

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.folder.name

    @property
    def samples(self) -> Iterable[Sample]:
        """All samples."""
        return (sample for prompt in self.prompts.values() for sample in prompt.samples)

    @property
    def figures(self) -> list[str]:
        """The names of what is known of any sample: a cost, say, only where an engine has a price."""
        return [name for name in FIGURES if any(name in sample.figures for sample in self.samples)]

    def counted(self, what: Callable[[Sample], Iterable[str]]) -> Counter[str]:
        """Return how many samples have which of the words that ``what`` says of each."""
        return Counter(word for sample in self.samples for word in what(sample))


class RunReader:
    """Reads a run, and later what has come since: :meth:`read` until it says that there is no more."""

    def __init__(self, run: Path, report: Report) -> None:
        self.run = run
        self.trajectories: dict[str, Sample] = {}
        """All trajectories that were read, in the order in which they began."""
        self.version = 0
        """Grows with everything that is read."""
        self._report = report
        self._prompts: dict[str, PromptSamples] = {}
        self._seen: dict[Path, int] = {}
        self._news: deque[str] = deque()

    @property
    def unread(self) -> int:
        """How many trajectories there is more of, as far as is known."""
        return len(self._news)

    def read(self, most: int | None = None) -> bool:
        """Read what there is, of so many trajectories at most; return whether anything was.

        Raises:
            JournalError: there is no journal that can be read.
        """
        if not self._news:
            found = changed(self.run, self._seen, self._report)
            if found is None:
                self.trajectories, self._prompts, self.version = {}, {}, self.version + 1
                found = changed(self.run, self._seen, self._report)
            self._news.extend(found or ())
        ids = [self._news.popleft() for _ in range(min(most or len(self._news), len(self._news)))]
        # All at once is read as one moment of the run, and says what is gone without a trace.
        only = ids if self.version or self._news else None
        for trajectory, history in recordings(self.run, only=only, report=self._report) if ids else ():
            self.trajectories[trajectory.trajectory_id] = Sample.of(Recording(trajectory, history))
            name = prompt_name(trajectory)
            if trajectory.parent_id is None and name not in self._prompts:
                digest = sha256(msgspec.msgpack.encode(comparable(trajectory.prompt_messages))).digest()
                self._prompts[name] = PromptSamples(digest, dict(trajectory.extra))
        self.version += len(ids)
        return bool(ids)

    def samples(self) -> RunSamples:
        """Return the samples of what was read."""
        latest = list(latest_of(list(self.trajectories.values())))
        own = [each for each in latest if each.parent_id is None]
        costs = _with_sub_agents(latest)
        own = [
            replace(each, figures={**each.figures, "cost": costs[each.trajectory_id]})
            if each.trajectory_id in costs
            else each
            for each in own
        ]
        prompts = {name: PromptSamples(prompt.digest, prompt.columns) for name, prompt in self._prompts.items()}
        for sample in own:
            if sample.ended:
                prompts[prompt_name(sample)].samples.append(sample)
        place = JournalFolder(self.run).folder
        return RunSamples(place.absolute(), prompts, sum(not each.ended for each in own), _confidence(place))


def _with_sub_agents(trajectories: Sequence[Sample]) -> dict[str, float]:
    """Return what each sample that called sub-agents cost with them, where anything has a price."""
    callers = {each.trajectory_id: each for each in trajectories}
    costs: dict[str, float] = {}
    for each in trajectories:
        if each.parent_id is None or (cost := each.figures.get("cost")) is None:
            continue
        caller = each
        while caller.parent_id is not None and caller.parent_id in callers:
            caller = callers[caller.parent_id]
        costs[caller.trajectory_id] = costs.get(caller.trajectory_id, caller.figures.get("cost", 0.0)) + cost
    return costs


def prompt_name(trajectory: Trajectory | Sample) -> str:
    """Return what a trajectory's prompt is called."""
    return trajectory.group_id.removeprefix("evaluation/")


def read_samples(folder: Path, report: Report) -> RunSamples:
    """Read the samples of a run, finished or not; ``report`` is told what is damaged.

    Raises:
        JournalError: there is no journal that can be read.
    """
    reader = RunReader(folder, report)
    reader.read()
    return reader.samples()


def _confidence(folder: Path) -> float:
    """Return the confidence that the run's own end has set for its intervals."""
    try:
        return float(msgspec.json.decode((folder / SUMMARY).read_bytes()).get("confidence", CONFIDENCE))
    except (OSError, ValueError, TypeError, AttributeError):  # it goes on; or the file is no summary
        return CONFIDENCE
