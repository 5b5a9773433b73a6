"""Advantages over groups: how much better a sample was than the others of its prompt.

Invariant: each *sample* counts once in its group's baseline, however many rows it has, and also when it has none; a
sample without a score (``None``, which is not 0) counts nowhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean, stdev
from typing import NamedTuple

from fsm_rollout.trajectory.trajectory import Trajectory

EPSILON = 1e-6  # added to a group's standard deviation, so that equal scores give 0


class SampleScore(NamedTuple):
    """The score of one sample of a group; ``None`` when it has none."""

    group_id: str
    sample: int
    score: float | None


def scores_of(trajectories: Iterable[Trajectory]) -> tuple[SampleScore, ...]:
    """Return the scores of the samples; a sub-agent's trajectory has that of the sample it serves."""
    scores: dict[tuple[str, int], float | None] = {}
    for trajectory in trajectories:
        key = trajectory.group_id, trajectory.sample
        if trajectory.parent_id is None or key not in scores:
            scores[key] = trajectory.score
    return tuple(SampleScore(*key, score) for key, score in scores.items())


def sample_advantages(scores: Iterable[SampleScore], *, scale: bool) -> Mapping[tuple[str, int], float]:
    """Return the advantage of each scored sample: its score less its group's mean (as GRPO has it).

    With ``scale``, divided by the group's standard deviation (of a sample, so over ``n - 1``) plus :data:`EPSILON`.
    A sample alone in its group has nothing to compare with: 0.
    """
    by_group: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for group_id, sample, score in scores:
        if score is not None:
            by_group[group_id][sample] = score
    advantages: dict[tuple[str, int], float] = {}
    for group_id, of_sample in by_group.items():
        values = list(of_sample.values())
        mean = fmean(values)
        spread = stdev(values, mean) + EPSILON if scale and len(values) > 1 else 1.0
        advantages |= {(group_id, sample): (score - mean) / spread for sample, score in of_sample.items()}
    return advantages
