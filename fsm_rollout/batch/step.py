"""The batch of one training step: the rows of its groups, and what is true of groups that are in no row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.batch.step_figures import step_figures
from fsm_rollout.scheduler.group import Group


def batch_of(groups: Iterable[Group], **options: Any) -> TrajectoryBatch:
    """Return the batch of some groups, in the order of their prompts' first appearance, without dropped ones.

    ``options`` are those of :meth:`TrajectoryBatch.from_trajectories`.
    """
    ordered = sorted(groups, key=lambda group: group.index)
    kept = [group for group in ordered if not group.dropped]
    batch = TrajectoryBatch.from_trajectories([trajectory for group in kept for trajectory in group.all], **options)
    batch.dropped = {group.group_id: group.drop_reason for group in ordered if group.drop_reason is not None}
    batch.figures = step_figures(ordered)
    return batch
