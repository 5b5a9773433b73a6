"""How far a run is: which of its samples have ended, in which states the others are, and what was sampled.

Invariant: a sample counts once, whatever became of it before: where it begins anew, it has not ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fsm_rollout.trajectory.events import AnyEvent, Ended, Generated, Prompted, Resumed, Suspended, Transitioned
from fsm_rollout.trajectory.trajectory import Trajectory

SampleKey = tuple[str, int]
"""Its group, and which sample of that it is."""


class RunCounts:
    """A listener that counts; ``ended``: the samples that had ended before."""

    def __init__(self, ended: Iterable[SampleKey] = ()) -> None:
        self.ended = set(ended)
        self.open: dict[str, Trajectory] = {}  # the prompts' own trajectories that are under way, by id
        self.states: Counter[str] = Counter()  # where they are, and where those that have ended did so
        self.sub_agents: set[str] = set()  # the ids of sub-agents' trajectories that are under way
        self.tokens = 0

    def __call__(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Count an event."""
        name, is_sample = trajectory.trajectory_id, trajectory.parent_id is None
        match event:
            case Generated():
                self.tokens += event.tokens
            case Transitioned() if is_sample:
                self.states[event.source] -= 1
                self.states[event.dest] += 1
            case Prompted() | Resumed() if is_sample:
                self.ended.discard((trajectory.group_id, trajectory.sample))
                self.open[name] = trajectory
                self.states[trajectory.state] += 1
            case Prompted() | Resumed():
                self.sub_agents.add(name)
            case Ended() | Suspended() if is_sample and self.open.pop(name, None) is not None:
                if isinstance(event, Ended):
                    self.ended.add((trajectory.group_id, trajectory.sample))
                else:
                    self.states[trajectory.state] -= 1
            case Ended() | Suspended():  # an end may be reported twice
                self.sub_agents.discard(name)
