"""The trajectories of a journal that count: those that the run's batch is made of.

Invariant: of each sample the latest attempt stands, with the sub-agents that it called; what was given up, and what
sub-agents had begun to answer to callers that ended without it, does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from fsm_rollout.trajectory.events import UNREAD
from fsm_rollout.trajectory.journal import Recorded, Report, recordings, trajectory_ids

_SAMPLE = re.compile(r"(.*/\d+)(?:~(\d+))?")


class _Begun(Protocol):
    """A trajectory, or what is kept of one."""

    trajectory_id: str
    group_id: str
    detail: str | None


B = TypeVar("B", bound=_Begun)


def latest_attempts(run: Path, report: Report) -> Iterator[Recorded]:
    """Yield them with their events, in the order in which they began, whether they have ended or not."""
    stands = _standing(trajectory_ids(run, report))
    return (recorded for recorded in recordings(run, report=report) if stands(recorded[0]))


def latest_of(trajectories: Sequence[B]) -> Iterator[B]:
    """Yield those of all trajectories of a run, in the order in which they began."""
    return filter(_standing([each.trajectory_id for each in trajectories]), trajectories)


def _standing(ids: Iterable[str]) -> Callable[[_Begun], bool]:
    """Return what says of each trajectory, asked in the order in which they began, whether it counts."""
    latest: dict[str, int] = {}
    for trajectory_id in ids:
        if found := _SAMPLE.fullmatch(trajectory_id):
            latest[found[1]] = max(latest.get(found[1], 0), int(found[2] or 0))
    unread: dict[str, tuple[str, ...]] = {}

    def stands(trajectory: _Begun) -> bool:
        trajectory_id = trajectory.trajectory_id
        if trajectory.detail == UNREAD:
            unread[trajectory.group_id] = (*unread.get(trajectory.group_id, ()), f"{trajectory_id}/")
            return False
        given_up = trajectory_id.startswith(unread.get(trajectory.group_id, ()))
        return not given_up and _attempt_stands(trajectory, latest)

    return stands


def _attempt_stands(trajectory: _Begun, latest: dict[str, int]) -> bool:
    """Whether no later attempt at its sample, or at that of its callers, was begun."""
    parts = trajectory.trajectory_id.split("/")
    sample = trajectory.group_id.count("/") + 2  # a group's id may look like that of a sample of another group
    for end in range(sample, len(parts) + 1):
        found = _SAMPLE.fullmatch("/".join(parts[:end]))
        if found and int(found[2] or 0) < latest.get(found[1], 0):
            return False
    return True
