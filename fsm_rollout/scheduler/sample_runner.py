"""One sample of a group, attempt after attempt: begun, run here or in a worker, stopped, begun anew.

Invariant: whatever stops a sample, it has then ended or is suspended; it is begun anew only where its failure's class
or its age says so, and only as often.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from fsm_rollout.scheduler.failure_policy import Failures
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.run_state import RunState
from fsm_rollout.scheduler.staleness import Staleness
from fsm_rollout.scheduler.trajectory_runner import run_trajectory
from fsm_rollout.scheduler.trajectory_starter import TrajectoryStarter
from fsm_rollout.states.active_trajectory import ActiveTrajectory, Stop
from fsm_rollout.trajectory.enums import StopReason
from fsm_rollout.trajectory.trajectory import Trajectory


class Workers(Protocol):
    """Runs trajectories elsewhere (:mod:`fsm_rollout.scheduler.worker_pool`)."""

    async def run(self, group: Group, live: ActiveTrajectory) -> None:
        """Do what :func:`run_trajectory` does."""

    def sampling_since(self) -> dict[tuple[str, str], int]:
        """Return what :meth:`EngineClient.sampling_since` does, of requests made elsewhere."""


class SampleRunner:
    """Runs the samples of a scheduler."""

    def __init__(self, starter: TrajectoryStarter, staleness: Staleness, failures: Failures) -> None:
        self.workers: Workers | None = None  # who runs trajectories, if that is not to be done here
        self.running: dict[str, ActiveTrajectory] = {}  # the trajectories of samples that run, by id
        self.stopping: Stop | None = None  # how `stop` has all trajectories stopped, until the next run
        self._starter = starter
        self._staleness = staleness
        self._failures = failures

    async def run(self, run: RunState, group: Group, sample: int) -> None:
        """Run one sample, as many attempts as it takes."""
        while run.stop is None:
            live = await self._start(group, sample)
            await self._run_active(run, group, live)
            # Too far behind the weights, it begins anew at once; else perhaps because it has failed, after a pause.
            if not live.restart or live.trajectory.stop_reason != StopReason.CANCELLED:
                if live.trajectory.ended:
                    run.stopped_by = run.stopped_by or run.watch.note(live.trajectory)
                pause = self.pause_before_repeat(group, live.trajectory)
                if pause is None or not await self._goes_on_after(run, pause):
                    break
            group.restart(sample)

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
                await run.until(lambda: run.stop is not None or self.stopping is not None)
        return run.stop is None and self.stopping is None

    async def _start(self, group: Group, sample: int) -> ActiveTrajectory:
        """Begin a sample, or let it go on (unless it has fallen too far behind the weights meanwhile)."""
        trajectory = group.latest(sample)
        if trajectory is not None:
            live = self._starter.go_on(group, trajectory)
            if not await self.end_if_stale(group, live):
                return live
        return self._starter.begin_sample(group, sample)

    async def _run_active(self, run: RunState, group: Group, live: ActiveTrajectory) -> None:
        """Run a trajectory that has begun, unless everything is being stopped."""
        task = asyncio.current_task()
        assert task is not None
        trajectory_id = live.trajectory.trajectory_id
        self.running[trajectory_id] = live
        live.task, live.stop = task, run.stop or self.stopping
        try:
            if self.workers is None or self._starter.replayed is not None:
                await run_trajectory(live, group.agent.handlers)
            else:
                await self.workers.run(group, live)
        except asyncio.CancelledError:
            if live.stop is None:
                raise
            while task.cancelling():
                task.uncancel()
        finally:
            live.task = None
            del self.running[trajectory_id]
            if not live.stays_open:
                group.active.pop(trajectory_id, None)
            await self._starter.end_unread(group, live.trajectory)

    async def end_if_stale(self, group: Group, live: ActiveTrajectory) -> bool:
        """End what is set aside and too old, and say whether it shall begin anew."""
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

    def request_stop(self, stop: Stop, *, again: bool = False) -> None:
        """Stop all that run; ``again``: also those whose handlers may have swallowed an earlier cancellation."""
        for live in list(self.running.values()):
            if again and live.stop is not None and live.task is not None:
                live.task.cancel()
            live.request_stop(stop)
