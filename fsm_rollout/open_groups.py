"""Groups under way, and the runs they belong to: what is there, what is still to do.

Invariant: a group belongs to one run at a time. It leaves a run once: handed over when all its samples are done, or
carried when the run has reached its target before that.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fsm_rollout.events import REWARD, AnyEvent, Scored
from fsm_rollout.live import Group, LiveTrajectory
from fsm_rollout.program import Program
from fsm_rollout.rewards import Reward
from fsm_rollout.trajectory import Trajectory


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that has not been handed over."""

    group: Group
    program: Program
    n: int
    live: dict[int, LiveTrajectory] = field(default_factory=dict)
    """What has begun, by sample."""
    attempts: dict[int, int] = field(default_factory=dict)
    """How many attempts of a sample were given up."""
    left: int = 0
    """How many samples of the present run are not done."""

    def begun(self, live: LiveTrajectory) -> None:
        """Take a sample in; the groups' trajectories are in the order of samples."""
        old = self.live.get(live.trajectory.sample)
        self.live[live.trajectory.sample] = live
        if old is not None:
            self.group.replace(old.trajectory, live.trajectory)
        else:
            self.group.trajectories.append(live.trajectory)
            self.group.trajectories.sort(key=lambda trajectory: trajectory.sample)

    def next_id(self, sample: int) -> str:
        """Return the id of the next attempt at a sample: ``group/sample``, then ``group/sample~1`` and so on."""
        attempt = self.attempts.get(sample, 0)
        return f"{self.group.group_id}/{sample}" + (f"~{attempt}" if attempt else "")

    def give_up(self, live: LiveTrajectory) -> None:
        """Count an attempt out, so that the sample is begun anew."""
        sample = live.trajectory.sample
        self.attempts[sample] = self.attempts.get(sample, 0) + 1
        live.requeue = False

    @property
    def todo(self) -> list[int]:
        """The samples that are not done: not begun, set aside, or given up."""
        return [
            sample
            for sample in range(self.n)
            if sample not in self.live
            or not self.live[sample].trajectory.ended
            or self.live[sample].trajectory.trajectory_id != self.next_id(sample)
        ]


@dataclass(slots=True, eq=False)
class Run:
    """One call of :meth:`fsm_rollout.scheduler.Scheduler.run`."""

    number: int
    ended: asyncio.Queue[Group | None] = field(default_factory=asyncio.Queue)
    """The groups to hand over, then ``None``."""
    open: dict[str, OpenGroup] = field(default_factory=dict)
    over: bool = False
    """Whether it has reached its target: nothing begins any more, and what runs is set aside."""
    closing: bool = False
    """Whether nobody listens any more."""
    most: float = math.inf
    """How many groups may be under way or done and kept, before the next one begins."""
    pending: deque[OpenGroup] = field(default_factory=deque)
    """What goes on in this run and has not come up yet: carried over from an earlier run, or reopened."""
    reopened: dict[str, Group] = field(default_factory=dict)
    """Groups reopened in this run whose prompt has not come up."""
    ids: set[str] = field(default_factory=set)
    """The ids of the prompts that have come up, and of their groups."""
    scoring: set[asyncio.Task[None]] = field(default_factory=set)
    failure: Exception | None = None
    """Why there are no further prompts, if that is a mistake."""
    kept: int = 0
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a group is done, or all is over."""

    @property
    def has_target(self) -> bool:
        """Whether it ends when enough groups have."""
        return self.most != math.inf

    async def room(self) -> None:
        """Wait until another group may begin."""
        while len(self.open) + self.kept >= self.most and not self.over:
            self.moved.clear()
            await self.moved.wait()


async def score(group: Group, reward: Reward | None, tell: Callable[[Trajectory, AnyEvent], None]) -> None:
    """Score a group's ended samples; a sub-agent's trajectory gets the score of the sample that it served."""
    ended = [trajectory for trajectory in group.trajectories if trajectory.ended]
    if reward is None or all(trajectory.rewarded for trajectory in ended):  # before an interruption
        return
    due = ended if reward.of_group else [trajectory for trajectory in ended if not trajectory.rewarded]
    values = await reward.score(due)
    now = asyncio.get_running_loop().time()
    scores: dict[int, float] = {}
    for trajectory, value in zip(due, values, strict=True):
        if isinstance(value, Exception):
            group.reward_errors.append(f"{trajectory.trajectory_id}: {type(value).__name__}: {value}")
        elif value is not None:
            scores[trajectory.sample] = value
    for trajectory in group.all:
        if trajectory.ended and trajectory.sample in scores and not trajectory.rewarded:
            event = Scored(at=now, value=scores[trajectory.sample], source=REWARD)
            trajectory.apply(event)
            tell(trajectory, event)
