"""The figures of one step: what its groups cost and scored, those that are in no batch among them.

Invariant: every sample and every sampled token of the groups given is counted, once: under ``dropped_…`` when its group
is dropped, under ``discarded_…`` when its attempt was given up, else without a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fsm_rollout.scheduler.group import Group
from fsm_rollout.trajectory.enums import DropReason, FailureClass
from fsm_rollout.trajectory.trajectory import Trajectory


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
    groups = list(groups)
    dropped = [group for group in groups if group.dropped]
    figures = _of_groups([group for group in groups if not group.dropped], "") | _of_groups(dropped, "dropped_")
    for reason in DropReason:
        figures[f"dropped_{reason}"] = sum(group.drop_reason is reason for group in dropped)
    failures = [trajectory.failure for group in groups for trajectory in group.trajectories]
    figures |= {f"failed_{failure}": failures.count(failure) for failure in FailureClass}
    discarded = [trajectory for group in groups for trajectory in group.discarded]
    figures["discarded_samples"] = sum(trajectory.parent_id is None for trajectory in discarded)
    figures["repeated_samples"] = sum(t.parent_id is None and t.failure is not None for t in discarded)
    figures["discarded_sampled_tokens"] = sampled_tokens(discarded)
    return figures


def _of_groups(groups: Sequence[Group], prefix: str) -> dict[str, float]:
    samples = [trajectory for group in groups for trajectory in group.trajectories]
    scores = [trajectory.score for trajectory in samples if trajectory.score is not None]
    return {
        f"{prefix}groups": len(groups),
        f"{prefix}samples": len(samples),
        f"{prefix}unscored": len(samples) - len(scores),
        f"{prefix}score_mean": math.fsum(scores) / len(scores) if scores else math.nan,
        f"{prefix}sampled_tokens": sampled_tokens(trajectory for group in groups for trajectory in group.all),
    }


def sampled_tokens(trajectories: Iterable[Trajectory]) -> int:
    """Return how many tokens engines have sampled in the streams of some trajectories, trained or not."""
    return sum(stream.tokens.sampled_length for trajectory in trajectories for stream in trajectory.streams)
