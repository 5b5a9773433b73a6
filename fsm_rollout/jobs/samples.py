"""The samples of a run, by prompt: what is counted when runs are judged or compared.

Invariant: of each sample the latest attempt stands, if it has ended; sub-agents' trajectories, which have their
callers' scores, are no samples. What is kept of one is small, so a run of any size is read in one pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import msgspec

from fsm_rollout.jobs.latest_attempts import latest_attempts
from fsm_rollout.jobs.run_folder import SUMMARY
from fsm_rollout.statistics.estimates import CONFIDENCE
from fsm_rollout.trajectory.journal import JournalFolder, Report
from fsm_rollout.trajectory.trajectory import Trajectory


@dataclass(slots=True)
class Sample:
    """What is kept of one sample."""

    trajectory_id: str
    score: float | None
    stop_reason: str
    visits: Mapping[str, int]
    figures: Mapping[str, float]
    """What it took, by the names of :data:`FIGURES`."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Sample:
        """Return what is kept of an ended trajectory."""
        figures = {name: float(figure(trajectory)) for name, figure in FIGURES.items()}
        reason = trajectory.stop_reason or ""
        return cls(trajectory.trajectory_id, trajectory.score, reason, dict(trajectory.visits), figures)


FIGURES: Mapping[str, Callable[[Trajectory], float]] = {
    "generations": lambda trajectory: trajectory.generations,
    "tokens": lambda trajectory: trajectory.response_tokens,
    "tool calls": lambda trajectory: trajectory.calls_seen,
    "tool errors": lambda trajectory: trajectory.calls_failed,
    "seconds": lambda trajectory: trajectory.wall_seconds or 0.0,
}
"""What a sample took, beside its score."""


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
        return [sample.figures[figure] for sample in self.samples]

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

    def counted(self, what: Callable[[Sample], Iterable[str]]) -> Counter[str]:
        """Return how many samples have which of the words that ``what`` says of each."""
        return Counter(word for sample in self.samples for word in what(sample))


def read_samples(folder: Path, report: Report) -> RunSamples:
    """Read the samples of a run, finished or not; ``report`` is told what is damaged.

    Raises:
        JournalError: there is no journal that can be read.
    """
    prompts: dict[str, PromptSamples] = {}
    unfinished = 0
    for trajectory, _ in latest_attempts(folder, report):
        if trajectory.parent_id is not None:
            continue
        unfinished += not trajectory.ended
        name = trajectory.group_id.removeprefix("evaluation/")
        if name not in prompts:
            digest = sha256(msgspec.msgpack.encode(list(trajectory.prompt_messages))).digest()
            prompts[name] = PromptSamples(digest, dict(trajectory.extra))
        if trajectory.ended:
            prompts[name].samples.append(Sample.of(trajectory))
    place = JournalFolder(folder).folder
    return RunSamples(place.absolute(), prompts, unfinished, _confidence(place))


def _confidence(folder: Path) -> float:
    """Return the confidence that the run's own end has set for its intervals."""
    try:
        return float(msgspec.json.decode((folder / SUMMARY).read_bytes()).get("confidence", CONFIDENCE))
    except (OSError, ValueError, TypeError, AttributeError):  # it goes on; or the file is no summary
        return CONFIDENCE
