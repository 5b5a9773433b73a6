"""Groups under way: what is there of them, what is still to do, and their scores.

Invariant: one attempt stands for each sample that has begun; earlier ones were given up and are in no batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from fsm_rollout.environment.rewards import Reward
from fsm_rollout.scheduler.live import ActiveTrajectory, Group
from fsm_rollout.scheduler.program import Program
from fsm_rollout.trajectory.events import REWARD, AnyEvent, Scored
from fsm_rollout.trajectory.trajectory import Trajectory


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that has not been handed over."""

    group: Group
    program: Program
    n: int
    live: dict[int, ActiveTrajectory] = field(default_factory=dict)
    """What has begun, by sample."""
    attempts: dict[int, int] = field(default_factory=dict)
    """How many attempts of a sample were given up."""
    due: list[int] = field(default_factory=list)
    """The samples that the present run has still to begin, or to let go on."""
    left: int = 0
    """How many samples of the present run are not done."""
    carried: bool = False
    """Whether a run with a target has left it over."""

    @property
    def counts(self) -> bool:
        """Whether it counts towards a target: it was not dropped, and nobody suspended a part of it."""
        return not self.group.dropped and self.group.ended

    def begun(self, live: ActiveTrajectory) -> None:
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

    def give_up(self, sample: int) -> None:
        """Count an attempt out, so that the sample is begun anew."""
        self.attempts[sample] = self.attempts.get(sample, 0) + 1

    def stands(self, sample: int) -> ActiveTrajectory | None:
        """Return the attempt that stands for a sample, if one has begun and was not given up."""
        live = self.live.get(sample)
        return live if live is not None and live.trajectory.trajectory_id == self.next_id(sample) else None

    @property
    def todo(self) -> list[int]:
        """The samples that are not done: not begun, set aside, or given up."""
        standing = map(self.stands, range(self.n))
        return [sample for sample, live in enumerate(standing) if live is None or not live.trajectory.ended]


async def score_group(group: Group, reward: Reward | None, tell: Callable[[Trajectory, AnyEvent], None]) -> None:
    """Score a group's ended samples; a sub-agent's trajectory gets the score of the sample that it served.

    Who was scored before an interruption, or before another sample began anew, is judged again only with its group.
    """
    ended = [trajectory for trajectory in group.trajectories if trajectory.ended]
    scores = {trajectory.sample: trajectory.score for trajectory in ended if trajectory.rewarded}
    due = [trajectory for trajectory in ended if not trajectory.rewarded]
    if reward is None or not ended:
        return
    if due:
        judged = ended if reward.of_group else due
        values = await reward.score(judged)
        group.reward_errors.clear()
        for trajectory, value in zip(judged, values, strict=True):
            if isinstance(value, Exception):
                group.reward_errors.append(f"{trajectory.trajectory_id}: {type(value).__name__}: {value}")
            elif value is not None:
                scores[trajectory.sample] = value
    now = asyncio.get_running_loop().time()
    for trajectory in group.all:
        score = scores.get(trajectory.sample)
        if trajectory.ended and score is not None and not (trajectory.rewarded and trajectory.score == score):
            event = Scored(at=now, value=score, source=REWARD)
            trajectory.apply(event)
            tell(trajectory, event)
