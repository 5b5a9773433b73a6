"""The batch of one training step: the rows of its groups, and its figures: what the groups cost and scored.

Invariant: every sample and every sampled token of the groups is counted, once: under ``dropped_…`` when its group is
dropped and in no row, under ``discarded_…`` when its attempt was given up, else without a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.scheduler.group import Group
from fsm_rollout.trajectory.enums import DropReason, FailureClass
from fsm_rollout.trajectory.trajectory import Trajectory

_OF_GROUPS = ("groups", "samples", "unscored", "score_mean", "sampled_tokens")
_NAMES = (
    *(f"{prefix}{name}" for prefix in ("", "dropped_") for name in _OF_GROUPS),
    *(f"dropped_{reason}" for reason in DropReason),
    *(f"failed_{failure}" for failure in FailureClass),
    *("discarded_samples", "repeated_samples", "discarded_sampled_tokens"),
)


def batch_of(groups: Iterable[Group], **options: Any) -> TrajectoryBatch:
    """Return the batch of some groups, in the order of their prompts' first appearance, without dropped ones.

    ``options`` are those of :meth:`TrajectoryBatch.from_trajectories`.
    """
    ordered = sorted(groups, key=attrgetter("index"))
    trajectories: list[Trajectory] = []
    dropped: dict[str, str] = {}
    for group in ordered:
        if group.drop_reason is None:
            trajectories += group.trajectories
            trajectories += group.children
        else:
            dropped[group.group_id] = group.drop_reason
    batch = TrajectoryBatch.from_trajectories(trajectories, **options)
    batch.dropped, batch.figures = dropped, step_figures(ordered)
    return batch


def step_figures(groups: Iterable[Group]) -> dict[str, float]:
    """Return the figures of a step, by name.

    ``groups``, ``samples``, ``unscored`` (samples without a score), ``score_mean`` (of those with one; NaN if none),
    ``sampled_tokens`` (of all engines and contexts); the same with ``dropped_`` before the name, of groups that are in
    no batch, and ``dropped_filtered``, ``dropped_stale``, ``dropped_wrong_tokens``: how many groups for which reason;
    ``failed_policy``, ``failed_engine`` and so on (:class:`~fsm_rollout.trajectory.enums.FailureClass`): how many
    samples, of all groups, failed for which reason; all but the policy's are unscored. ``discarded_samples`` and
    ``discarded_sampled_tokens`` of attempts that were given up and began anew, ``repeated_samples`` of those that were
    because they had failed.
    """
    figures: dict[str, float] = dict.fromkeys(_NAMES, 0)
    scores: dict[str, list[float]] = {"": [], "dropped_": []}
    for group in groups:
        prefix = ""
        if group.drop_reason is not None:
            prefix = "dropped_"
            figures[f"dropped_{group.drop_reason}"] += 1
        figures[f"{prefix}groups"] += 1
        figures[f"{prefix}sampled_tokens"] += sampled_tokens([*group.trajectories, *group.children])
        for trajectory in group.trajectories:
            figures[f"{prefix}samples"] += 1
            if trajectory.score is None:
                figures[f"{prefix}unscored"] += 1
            else:
                scores[prefix].append(trajectory.score)
            if trajectory.failure is not None:
                figures[f"failed_{trajectory.failure}"] += 1
        for attempt in group.discarded:
            if attempt.parent_id is None:
                figures["discarded_samples"] += 1
                figures["repeated_samples"] += attempt.failure is not None
        figures["discarded_sampled_tokens"] += sampled_tokens(group.discarded)
    for prefix, values in scores.items():
        figures[f"{prefix}score_mean"] = math.fsum(values) / len(values) if values else math.nan
    return figures


def sampled_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Return how many tokens engines have sampled in the streams of some trajectories, trained or not."""
    total = 0
    for trajectory in trajectories:
        total += sum(map(attrgetter("tokens.sampled_length"), trajectory.streams))
    return total
