"""The trajectories of a journal that count: those that the run's batch is made of.

Invariant: of each sample the latest attempt stands, with the sub-agents that it called; what was given up, and what
sub-agents had begun to answer to callers that ended without it, does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from fsm_rollout.states.active_trajectory import UNREAD
from fsm_rollout.trajectory.journal import Recorded, Report, recordings, trajectory_ids
from fsm_rollout.trajectory.trajectory import Trajectory

_SAMPLE = re.compile(r"(.*/\d+)(?:~(\d+))?")


def latest_attempts(run: Path, report: Report) -> Iterator[Recorded]:
    """Yield them with their events, in the order in which they began, whether they have ended or not."""
    latest: dict[str, int] = {}
    for trajectory_id in trajectory_ids(run, report):
        if found := _SAMPLE.fullmatch(trajectory_id):
            latest[found[1]] = max(latest.get(found[1], 0), int(found[2] or 0))
    unread: dict[str, tuple[str, ...]] = {}
    for trajectory, history in recordings(run, report=report):
        trajectory_id = trajectory.trajectory_id
        if trajectory.detail == UNREAD:
            unread[trajectory.group_id] = (*unread.get(trajectory.group_id, ()), f"{trajectory_id}/")
        elif not trajectory_id.startswith(unread.get(trajectory.group_id, ())) and _attempt_stands(trajectory, latest):
            yield trajectory, history


def _attempt_stands(trajectory: Trajectory, latest: dict[str, int]) -> bool:
    """Whether no later attempt at its sample, or at that of its callers, was begun."""
    parts = trajectory.trajectory_id.split("/")
    sample = trajectory.group_id.count("/") + 2  # a group's id may look like that of a sample of another group
    for end in range(sample, len(parts) + 1):
        found = _SAMPLE.fullmatch("/".join(parts[:end]))
        if found and int(found[2] or 0) < latest.get(found[1], 0):
            return False
    return True
