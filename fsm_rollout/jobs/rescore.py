"""``fsm-rollout rescore``: scores a recorded run with another reward, without generating anything.

Invariant: the journal keeps the scores that it has. New ones go to a file of their own, one line per sample, which
``export --scores`` takes; so any number of rewards can be compared, and a run that still goes on is not disturbed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from fsm_rollout.concurrency.interruption import interruptible
from fsm_rollout.environment.rewards import Reward, Verdict
from fsm_rollout.errors import ConfigError, describe
from fsm_rollout.files import written_whole
from fsm_rollout.report.recording import open_run
from fsm_rollout.trajectory.events import REWARD, NotScored, Part, Scored
from fsm_rollout.trajectory.journal import JournalFolder, Report
from fsm_rollout.trajectory.latest_attempts import latest_attempts
from fsm_rollout.trajectory.trajectory import Trajectory

SCORES = "scores"  # the folder in a run's folder with the files of rescoring


class Score(msgspec.Struct, kw_only=True):
    """One line of a file of scores."""

    trajectory_id: str
    group_id: str
    sample: int
    score: float | None  # what the new reward gives; `None` where it gives none, or fails
    parts: dict[str, Part] = {}
    recorded: float | None  # what the run's own reward gave
    error: str | None = None


def rescore(
    folder: Path, reward: str, out: Path | None = None, *, report: Report, stream: TextIO | None = None
) -> tuple[Path | None, list[Score]]:
    """Judge the ended samples of a run with another reward, write the scores, and return where they are, and them.

    A reward of a group judges groups whose samples have all ended; of the others there is no score yet.

    Args:
        folder: the run's folder, or its journal.
        reward: ``module:function``.
        out: the file; by default ``scores/module.function.jsonl`` in the run's folder.
        report: is told what is damaged.
        stream: takes the lines instead of a file; they are nowhere else then.

    Raises:
        ConfigError: the reward cannot be imported, or the file not be written.
        JournalError: there is no journal that can be read.
    """
    judge = Reward(reward)
    out = out or JournalFolder(folder).folder / SCORES / f"{reward.replace(':', '.')}.jsonl"
    groups: dict[str, list[Trajectory]] = {}
    for trajectory, _ in latest_attempts(folder, report):
        if trajectory.parent_id is None:
            groups.setdefault(trajectory.group_id, []).append(trajectory)
    size = open_run(folder).config.get("n") if judge.of_group else None
    judged = []
    for group in groups.values():
        ended = sorted((t for t in group if t.ended), key=lambda trajectory: trajectory.sample)
        whole = len(ended) == len(group) and not (isinstance(size, int) and len(ended) < size)
        if judge.of_group and not whole:
            continue
        judged.append(ended)
    with interruptible() as main:
        scores = main.run(_scores(judge, judged))
    lines = b"".join(msgspec.json.encode(score) + b"\n" for score in scores)
    if stream is not None:
        stream.write(lines.decode())
        return None, scores
    with written_whole(out, "; give -o F") as partial:
        partial.write_bytes(lines)
    return out, scores


async def _scores(judge: Reward, groups: Sequence[Sequence[Trajectory]]) -> list[Score]:
    scores = []
    for group in groups:
        for trajectory, judgement in zip(group, await judge.score(group), strict=True):
            verdict = Verdict(None) if isinstance(judgement, Exception) else judgement
            scores.append(
                Score(
                    trajectory_id=trajectory.trajectory_id,
                    group_id=trajectory.group_id,
                    sample=trajectory.sample,
                    score=verdict.score,
                    parts=dict(verdict.parts),
                    recorded=trajectory.score,
                    error=describe(judgement) if isinstance(judgement, Exception) else None,
                )
            )
    return scores


# By group and sample: a sub-agent's trajectory has the score of the sample that it served.
Scores = Mapping[tuple[str, int], Score]


def read_scores(path: Path) -> Scores:
    """Return the scores of a file that :func:`rescore` has written; ConfigError: no file, or a line is no score."""
    scores: dict[tuple[str, int], Score] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        try:
            score = msgspec.json.decode(line, type=Score)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: is not a line that `fsm-rollout rescore` wrote: {error}") from error
        scores[score.group_id, score.sample] = score
    return scores


def apply_score(trajectory: Trajectory, scores: Scores) -> None:
    """Give an ended trajectory that was read from a journal the score that it has there for the run's, or none."""
    score, now = scores.get((trajectory.group_id, trajectory.sample)), trajectory.latest_at
    trajectory.score, trajectory.reward_parts = None, {}
    trajectory.apply(NotScored(at=now, detail="it has not been scored again" if score is None else score.error or ""))
    if score is not None and score.score is not None:
        trajectory.apply(Scored(at=now, value=score.score, source=REWARD, parts=score.parts))


def mean_of(scores: Iterable[float | None]) -> str:
    """Return the mean of those that there are, in words."""
    values = [score for score in scores if score is not None]
    return f"{sum(values) / len(values):.3f}" if values else "none"
