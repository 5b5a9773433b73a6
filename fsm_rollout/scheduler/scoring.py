"""What becomes of a group whose samples have ended: the reward scores it, and the filter keeps it or turns it down.

Invariant: a trajectory that failed by no fault of the policy's has no score; a reward or a filter that fails too often
stops the run, instead of filling its batch with groups that nobody judged.
"""

from __future__ import annotations

import asyncio

from fsm_rollout.environment.rewards import GroupFilter, Reward, Verdict
from fsm_rollout.errors import describe
from fsm_rollout.scheduler.failure_policy import is_the_policys
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.run_state import RunState
from fsm_rollout.scheduler.teachers import Teachers
from fsm_rollout.states.active_trajectory import EventSink
from fsm_rollout.trajectory.enums import DropReason
from fsm_rollout.trajectory.events import REWARD, NotScored, Scored


class Scoring:
    """A scheduler's reward, group filter and teachers; all may be missing."""

    def __init__(self, reward: Reward | None, group_filter: GroupFilter | None, recorder: EventSink) -> None:
        self.teachers: Teachers | None = None
        self.reward = reward
        self.group_filter = group_filter
        self._recorder = recorder

    async def score(self, run: RunState, group: Group) -> bool:
        """Score a group; return whether that came to its end, which it does not when the run is stopped."""
        task = asyncio.current_task()
        assert task is not None
        run.scoring.add(task)
        try:
            for live in [live for live in group.active.values() if live.trajectory.ended]:
                await live.close()  # it ended while it was suspended
            if not group.dropped:
                await _score(group, self.reward, self._recorder)
                scored = sum(trajectory.rewarded for trajectory in group.trajectories)
                run.stopped_by = run.stopped_by or run.watch.judged(scored, group.reward_errors)
                if self.group_filter is not None and group.ended:
                    keeps = await self.group_filter.keeps(group.trajectories)
                    if not keeps and not group.dropped:
                        group.drop_reason = DropReason.FILTERED
                    run.filtered += not keeps
            if self.teachers is not None:
                self.teachers.leave([*group.discarded, *(group.all if group.dropped else ())])
                if not group.dropped:
                    run.stopped_by = await self.teachers.settle(group.all) or run.stopped_by
        except asyncio.CancelledError:
            if run.stop is None:
                raise
            while task.cancelling():
                task.uncancel()
            return False
        finally:
            run.scoring.discard(task)
        return True


async def _score(group: Group, reward: Reward | None, recorder: EventSink) -> None:
    """Score a group's ended samples; a sub-agent's trajectory gets the score of the sample that it served.

    A trajectory that already has a reward is re-scored only by a group reward. One that failed by no fault of the
    policy's says nothing about it: the reward is not asked, and it has no score.
    """
    ended = [trajectory for trajectory in group.trajectories if trajectory.ended and is_the_policys(trajectory)]
    unscored = [trajectory for trajectory in ended if not trajectory.rewarded]
    if reward is None:
        return
    clock = asyncio.get_running_loop().time
    begun, verdicts = clock(), {t.sample: Verdict(t.score, t.reward_parts) for t in ended if t.rewarded}
    missing = {
        t.sample: f"it failed by no fault of the policy's ({t.failure}): the reward was not asked"
        for t in group.trajectories
        if not is_the_policys(t)
    }
    if unscored:
        judged = ended if reward.of_group else unscored
        group.reward_errors.clear()
        for trajectory, judgement in zip(judged, await reward.score(judged), strict=True):
            if isinstance(judgement, Exception):
                missing[trajectory.sample] = describe(judgement)
                group.reward_errors.append(f"{trajectory.trajectory_id}: {describe(judgement)}")
            elif judgement.score is None:
                missing[trajectory.sample] = "the reward gave none"
            else:
                verdicts[trajectory.sample] = judgement
    now = clock()
    took = now - begun if unscored else 0.0
    for trajectory in group.all:
        verdict, sample = verdicts.get(trajectory.sample), trajectory.sample
        event: Scored | NotScored | None = None
        if verdict is not None and verdict.score is not None:
            stands = trajectory.rewarded and trajectory.score == verdict.score
            if not (stands and trajectory.reward_parts == verdict.parts):
                event = Scored(at=now, value=verdict.score, source=REWARD, parts=dict(verdict.parts), seconds=took)
        elif sample in missing and trajectory.unscored != missing[sample]:
            event = NotScored(at=now, detail=missing[sample], seconds=took)
        if trajectory.ended and event is not None:
            trajectory.apply(event)
            recorder.record(trajectory, event)
