"""How far a run is: which of its samples have ended, in which states the others are, and what was sampled.

Invariant: a sample counts once, whatever became of it before: where it begins anew, it has not ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fsm_rollout.trajectory.events import AnyEvent, Ended, Generated, Prompted, Resumed, Suspended
from fsm_rollout.trajectory.trajectory import Trajectory

SampleKey = tuple[str, int]
"""Its group, and which sample of that it is."""


class RunCounts:
    """A listener that counts; ``ended``: the samples that had ended before."""

    def __init__(self, ended: Iterable[SampleKey] = ()) -> None:
        self.ended: dict[SampleKey, str] = dict.fromkeys(ended, "")  # and the states in which they are, where known
        self.open: dict[str, Trajectory] = {}  # the prompts' own trajectories that are under way, by id
        self.sub_agents: set[str] = set()  # the ids of sub-agents' trajectories that are under way
        self.tokens = 0
        self._count: Mapping[type[AnyEvent], Callable[[Trajectory, Any], None]] = {
            Generated: self._generated, Prompted: self._began, Resumed: self._began, Suspended: self._set_aside,
            Ended: self._ended,
        }  # fmt: skip

    @property
    def states(self) -> Counter[str]:
        """In which states samples are, or have ended."""
        return Counter([*(each.state for each in self.open.values()), *filter(None, self.ended.values())])

    def hearer(self, kind: type[AnyEvent]) -> Callable[[Trajectory, Any], None] | None:
        """Return what counts events of a kind."""
        return self._count.get(kind)

    def __call__(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Count an event."""
        if (count := self.hearer(type(event))) is not None:
            count(trajectory, event)

    def _generated(self, _: Trajectory, event: Generated) -> None:
        self.tokens += event.tokens

    def _began(self, trajectory: Trajectory, _: Prompted | Resumed) -> None:
        if trajectory.parent_id is not None:
            self.sub_agents.add(trajectory.trajectory_id)
            return
        self.ended.pop((trajectory.group_id, trajectory.sample), None)
        self.open[trajectory.trajectory_id] = trajectory

    def _set_aside(self, trajectory: Trajectory, _: Suspended) -> None:
        self.sub_agents.discard(trajectory.trajectory_id)
        self.open.pop(trajectory.trajectory_id, None)

    def _ended(self, trajectory: Trajectory, _: Ended) -> None:
        self.sub_agents.discard(trajectory.trajectory_id)
        if self.open.pop(trajectory.trajectory_id, None) is not None:  # an end may be reported twice
            self.ended[trajectory.group_id, trajectory.sample] = trajectory.state
