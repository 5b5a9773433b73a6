"""The samples of a run: groups are opened in order, and their samples run, attempt after attempt.

Invariant: at most ``concurrency`` samples run at a time. Whatever stops a sample, it has then ended or is suspended; it
is begun anew only where its failure's class or its age says so, and only as often.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import count, repeat

from fsm_rollout.concurrency.cancellation import runs_in
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.scheduler.failure_policy import Failures
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.scheduler.run_state import GroupTable, PromptQueue, RunState
from fsm_rollout.scheduler.scoring import Scoring
from fsm_rollout.scheduler.staleness import Staleness
from fsm_rollout.scheduler.tail import CHOICE, Tail
from fsm_rollout.scheduler.trajectory_runner import TrajectoryStarter, run_trajectory
from fsm_rollout.states.active_trajectory import CARRIED, ActiveTrajectory, Stop
from fsm_rollout.states.restoring import begins_anew
from fsm_rollout.trajectory.enums import StopReason
from fsm_rollout.trajectory.settings import Concurrency, most_at_once
from fsm_rollout.trajectory.trajectory import Trajectory

STARTED_AT_ONCE = 64  # samples, 0.2 ms each: then all else that is due has its turn


class SampleRunner:
    """Runs the samples of a scheduler."""

    def __init__(
        self,
        starter: TrajectoryStarter,
        groups: GroupTable,
        scoring: Scoring,
        staleness: Staleness,
        failures: Failures,
        concurrency: Concurrency,
        policy: EngineClient,
    ) -> None:
        self.running: dict[str, ActiveTrajectory] = {}  # the trajectories of samples that run, by id
        self.stopping: Stop | None = None  # how `stop` has all trajectories stopped, until the next run
        # Groups in whose hands a process may have died. Until they are finished, samples run one at a time: if another
        # dies, it is known of which.
        self.alone: set[str] = set()
        # The samples of open groups that have still to begin, or to go on.
        self.to_start: deque[tuple[Group, int]] = deque()
        self.tail = Tail()  # says which sample is next
        self._starter = starter
        self._groups = groups
        self._scoring = scoring
        self._staleness = staleness
        self._failures = failures
        self._concurrency, self._most = concurrency, most_at_once(concurrency)  # samples under way
        self._policy = policy

    async def feed(self, run: RunState) -> None:
        """Open groups in order and start their samples, ``concurrency`` at once, until the run is over."""
        pool, task = self._policy.pool, asyncio.current_task()
        if self._concurrency == "auto" and pool.placing.residency is not None:
            # When requests go out, there may be room for more.
            pool.before_dispatch[self] = lambda: (
                run.changed.set() if self.to_start and run.running < pool.placing.worth_having else None
            )
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    for turn in count(1):
                        if run.stopped_by is not None and run.stop is None:
                            raise run.stopped_by
                        if run.stop is not None or (run.exhausted and not self._groups):
                            return
                        if not self._start_next(run, tasks):
                            await run.change()
                        elif turn % STARTED_AT_ONCE == 0:
                            await asyncio.sleep(0)
                except BaseException as error:  # here, because the task group then cancels the samples at once
                    self.stop_run(run, keep=run.target is not None and isinstance(error, Exception))
                    raise
        except BaseException:
            run.failed = True
            raise
        finally:
            try:
                if self._scoring.teachers is not None and runs_in(task):
                    await self._scoring.teachers.drain()
            finally:
                pool.before_dispatch.pop(self, None)
                run.feeding = False
                run.changed.set()

    def _start_next(self, run: RunState, tasks: asyncio.TaskGroup) -> bool:
        """Start the next sample, or open the next group; return whether anything was to be done, and could be."""
        # 1. A sample of a group that is open; where probes say which, once there are some to choose from.
        looks_ahead = self.tail.probes and len(self.to_start) < CHOICE and self._can_open(run)
        if self.to_start and not looks_ahead:
            most, placing = self._most, self._policy.pool.placing
            if self._concurrency == "auto" and placing.residency is not None:
                most = placing.worth_having  # as many as fit into the policy's memory
            if run.running >= (most if self.alone.isdisjoint(self._groups) else 1):
                return False
            run.running += 1
            found = self.tail.next_sample(self.to_start) if self.tail.probes else self.to_start.popleft()
            tasks.create_task(self._run_sample(run, *found))
            return True
        # 2. The next group: one that waits, else that of the next prompt.
        if not self._can_open(run):
            return False
        group = next(iter(self._groups.by_state[GroupState.WAITING].values()), None)
        # After :meth:`stop`, a run with a target takes no further prompts. A run without one still takes them all, and
        # their samples are stopped as they begin: every prompt comes back.
        takes_prompts = run.target is None or self.stopping is None
        if group is None and takes_prompts and (taken := run.next_prompt(self._groups)) is not None:
            group = Group(*taken, self._starter.agents.of_prompt(taken[2]), run.n)
        if group is None:
            run.exhausted = True
            if not self._groups.under_way:  # else their ends are what others wait for
                run.changed.set()
            return True
        # 3. Its samples, as far as they have not ended for good.
        if group.trajectories:
            self._staleness.restart_stale(group)
            for ended in [t for t in group.trajectories if t.ended]:
                if begins_anew(ended) or self.pause_before_repeat(group, ended) is not None:
                    group.restart(ended.sample)  # an interruption came before it could be repeated
        samples = group.to_start() if group.trajectories else list(range(group.n))
        group.unfinished = len(samples)
        self._groups.put(group, GroupState.RUNNING)
        self.to_start += zip(repeat(group), samples)
        if not samples:
            tasks.create_task(self._finish(run, group))
        return True

    def _can_open(self, run: RunState) -> bool:
        """Whether there is a next group, or may be one, and it may be opened."""
        waiting = self._groups.by_state[GroupState.WAITING]
        if run.exhausted and not waiting:
            return False
        if run.target is not None and not run.has_room(self._groups):
            return False
        return bool(waiting) or not isinstance(run.prompts, PromptQueue) or run.prompts.ready

    async def _run_sample(self, run: RunState, group: Group, sample: int) -> None:
        """Run one sample to its end, as many attempts as it takes; the last one to end finishes the group."""
        task = asyncio.current_task()
        assert task is not None
        try:
            while run.stop is None:
                # 1. An attempt, to its end, or until everything is being stopped.
                began = group.latest(sample) if group.trajectories else None
                live = self._starter.begin_sample(group, sample) if began is None else await self._go_on(group, began)
                trajectory = live.trajectory
                self.running[trajectory.trajectory_id] = live
                live.task, live.stop = task, run.stop or self.stopping
                try:
                    await run_trajectory(live, group, group.agent.handlers)
                except asyncio.CancelledError:
                    if live.stop is None:
                        raise
                    while task.cancelling():
                        task.uncancel()
                finally:
                    live.task = None
                    del self.running[trajectory.trajectory_id]
                    if group.children:
                        await self._starter.end_unread(group, trajectory)
                # 2. Too far behind the weights, it begins anew at once; else perhaps because it has failed, after a
                #    pause.
                if trajectory.stop_reason != StopReason.CANCELLED or not (live.restart or begins_anew(trajectory)):
                    if trajectory.stop_reason is not None:
                        run.stopped_by = run.stopped_by or run.watch.note(trajectory)
                    if trajectory.failure is None:
                        break
                    pause = self.pause_before_repeat(group, trajectory)
                    if pause is None or not await self._goes_on_after(run, pause):
                        break
                group.restart(sample)
        finally:
            run.running -= 1
            group.unfinished -= 1
            run.changed.set()
        if group.unfinished == 0:
            await self._finish(run, group)

    async def _finish(self, run: RunState, group: Group) -> None:
        """Score a group whose samples are finished, unless the run is over: then it is carried, scored or not."""
        self.alone.discard(group.group_id)
        if run.stop is not None:
            return
        scoring = self._scoring
        judged = scoring.reward is not None or scoring.group_filter is not None or scoring.teachers is not None
        if judged or group.active:
            self._groups.put(group, GroupState.SCORING)
            if not await scoring.score(run, group):
                return
        self._groups.put(group, GroupState.DONE)
        if scoring.group_filter is not None:
            name, scores = scoring.group_filter.name, scoring.group_filter.last_scores
            run.stopped_by = run.stopped_by or run.not_reached(name, self._groups, scores)
        run.changed.set()

    # -- one sample -----------------------------------------------------------------------------------------------

    def pause_before_repeat(self, group: Group, trajectory: Trajectory) -> float | None:
        """Return the seconds before a failed sample is begun anew; ``None``: it is not (the policy failed, say)."""
        if trajectory.failure is None or group.dropped:
            return None
        return self._failures.pause_before_repeat(trajectory.failure, group.repeats(trajectory.sample))

    async def _goes_on_after(self, run: RunState, seconds: float) -> bool:
        """Wait, and return whether the run has not been stopped by then."""
        run.changed.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while run.stop is None and self.stopping is None:
                    await run.change()
        return run.stop is None and self.stopping is None

    async def _go_on(self, group: Group, trajectory: Trajectory) -> ActiveTrajectory:
        """Let a sample go on, or begin it anew where it has fallen too far behind the weights meanwhile."""
        live = self._starter.go_on(group, trajectory)
        if await self._end_if_stale(group, live):
            return self._starter.begin_sample(group, trajectory.sample)
        return live

    def stop_stale(self, groups: Mapping[str, Group], under_way: Mapping[tuple[str, str], int]) -> None:
        """Stop what runs and is too old; ``under_way``: :meth:`EngineClient.sampling_since`."""
        for live in list(self.running.values()):
            group, sample = groups[live.trajectory.group_id], live.trajectory.sample
            outcome = self._staleness.end_of(group, live.trajectory, under_way)
            if outcome is not None and live.stop is None:
                live.restart = self._staleness.may_restart(group, sample)
                live.request_stop(outcome)

    async def end_stale(self, group: Group) -> None:
        """End what is too old in a group that waits for the next run."""
        self._staleness.restart_stale(group)
        for live in list(group.active.values()):
            if not live.trajectory.ended:
                await self._end_if_stale(group, live)

    async def _end_if_stale(self, group: Group, live: ActiveTrajectory) -> bool:
        """End what is set aside and too old; return whether it shall begin anew."""
        trajectory = live.trajectory
        outcome = self._staleness.end_of(group, trajectory)
        if outcome is None:
            return False
        live.stop_now(outcome)
        await self._starter.end_unread(group, trajectory)
        if restarts := self._staleness.may_restart(group, trajectory.sample):
            group.restart(trajectory.sample)
        group.active.pop(trajectory.trajectory_id, None)
        await live.close()
        return restarts

    def stop_one(self, trajectory_id: str, stop: Stop) -> bool:
        """Stop one trajectory soon; False when it is not running."""
        if trajectory_id not in self.running:
            return False
        self.running[trajectory_id].request_stop(stop)
        return True

    def stop(self, stop: Stop) -> None:
        """Stop all that run, and each that is begun from now on, until the next run."""
        self.stopping = stop
        self.request_stop(stop)

    def stop_run(self, run: RunState, *, keep: bool) -> None:
        """Start nothing more, and have what runs stopped: kept for the next run, or not; the first call decides."""
        if run.stop is None:
            run.stop = CARRIED if keep else run.cut_off
            self.request_stop(run.stop, again=not keep)
            for task in run.scoring:
                task.cancel()
            run.changed.set()

    def request_stop(self, stop: Stop, *, again: bool = False) -> None:
        """Stop all that run; ``again``: also those whose handlers may have swallowed an earlier cancellation."""
        for live in list(self.running.values()):
            if again and live.stop is not None and live.task is not None:
                live.task.cancel()
            live.request_stop(stop)
