"""The scheduler of a run whose samples run in shards.

Invariant: it is asked what every scheduler is asked. New weights come while no shard samples anything: all hold, and
say so; they are loaded; all go on. Servers that all shards share are loaded once, from here.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.concurrency.cancellation import to_its_end
from fsm_rollout.concurrency.durations import Durations, Phases
from fsm_rollout.engines.adapters import Adapter
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Weights, WeightSource
from fsm_rollout.errors import ConfigError, EngineError, check_at_least
from fsm_rollout.scheduler.failure_policy import Failures
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.scheduler.leased_group import LeasedGroup
from fsm_rollout.scheduler.leases import Leases
from fsm_rollout.scheduler.recorder import Recorder
from fsm_rollout.scheduler.resume import History, prompt_of
from fsm_rollout.scheduler.run_state import GroupTable, RunState
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.scheduler.sharded_engines import check_weights
from fsm_rollout.scheduler.shards import Shards
from fsm_rollout.scheduler.staleness import Staleness, trained_versions
from fsm_rollout.scheduler.tail import tail_of
from fsm_rollout.scheduler.trajectory_runner import TrajectoryStarter
from fsm_rollout.trajectory.enums import DropReason
from fsm_rollout.trajectory.event_bytes import encode
from fsm_rollout.trajectory.events import AnyEvent, Prompted
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trace_ids import NO_RUN
from fsm_rollout.trajectory.trajectory import Trajectory

UPDATE = "weights change in all shards"  # why shards hold


class LeasedScheduler(Scheduler):
    """A scheduler of the same runs, whose samples run in shards.

    Args:
        shards: where they run.
        concurrency: trajectories under way at once, in all shards together.
        failures, max_staleness, max_restarts: as for :class:`Scheduler`.
        filter_name: what errors call the group filter.
        evaluation: the sampling of an evaluation beside the training; ``None``: this is the training.
    """

    def __init__(
        self, shards: Shards, *, concurrency: int, failures: Failures, max_staleness: int | None = None,
        max_restarts: int = 0, filter_name: str = "", evaluation: Sampling | None = None, tail: str = "carry",
    ) -> None:  # fmt: skip
        check_at_least(1, "trajectory", "concurrency", concurrency)
        self.shards = shards
        self.evaluation = evaluation
        self.filter_name = filter_name
        self.concurrency = self._most_at_once = concurrency
        self.toolboxes = ()
        self.failures = failures.model_copy(update={"stall_seconds": None})  # shards watch what they wait for
        self.clients = {} if shards.servers is None else {POLICY: EngineClient(shards.servers.pool)}
        self._client = self.clients.get(POLICY)
        self.capacity = math.ceil(concurrency / shards.count)
        """How many trajectories may be under way in each shard."""
        self.recorder = Recorder(None, ())
        self.groups = GroupTable(lambda: self.shards.version)
        self.staleness = Staleness(max_staleness, max_restarts, lambda: self.shards.version)
        self.starter = cast(TrajectoryStarter, _RunNumber())
        self.samples = cast(Any, Leases(self))
        self.samples.tail = tail_of(tail, max_staleness)
        if self.samples.tail.probes:
            raise ConfigError(f"tail: {tail}: with workers, each shard begins what it has by itself; leave out longest")
        self.histories = False
        """Whether the events of trajectories come back with their groups."""
        self.batch_options: dict[str, Any] = {}
        """How rows are to be made."""
        self._delivered: list[str] = []
        self.marks = True
        self.changing = asyncio.Lock()
        self._update_times: defaultdict[str, Durations] = defaultdict(Durations)
        self._run: RunState | None = None

    @property
    def rewarded(self) -> bool:
        """See there; shards judge what they run."""
        return False

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Leave it to the shards, which check what they are given."""

    async def acheck(self, prompts: Sequence[Prompt]) -> None:
        """See there."""
        await self.shards.call_one("check", list(prompts))

    def come_back(self, *, histories: bool, batch_options: Mapping[str, object]) -> None:
        """Say how the next run's groups come back: whether with their events, and with which rows."""
        self.histories, self.batch_options = histories, dict(batch_options)

    def engine_stats(self) -> dict[str, dict[str, int]]:
        """See there."""
        return self.shards.engine_stats()

    def loop_lag(self) -> dict[str, dict[str, float]]:
        """See there; of shards as of their last run."""
        shards = {f"shard {shard.number}": shard.lag for shard in self.shards.all if shard.lag}
        return super().loop_lag() | shards

    def update_times(self) -> dict[str, dict[str, float]]:
        """See there: until all shards hold, have the weights, and go on."""
        return {phase: {"count": seen.count} | seen.figures() for phase, seen in self._update_times.items()}

    @property
    def link_bytes(self) -> int:
        """See there."""
        return self.shards.wire_bytes

    async def send_to_sleep(self) -> None:
        """See there."""
        await self.shards.order("sleep")
        if self._client is not None:
            await self._client.sleep()

    async def wake_up(self) -> None:
        """See there."""
        if self._client is not None:
            await self._client.wake()
        await self.shards.undo("sleep")

    async def hold(self, reason: str) -> None:
        """See there."""
        await self.shards.order("hold", reason)

    async def release(self, reason: str) -> None:
        """See there."""
        await self.shards.undo("hold", reason)

    async def acancel(self, trajectory_id: str) -> bool:
        """See there."""
        return any(await self.shards.call_all("cancel", trajectory_id))

    def _resume(self, run: RunState, histories: list[History]) -> None:
        """Let the groups of some histories wait for their turn."""
        by_group: dict[str, list[Sequence[AnyEvent]]] = {}
        for history in histories:
            if isinstance(history, Trajectory):
                raise ConfigError(
                    f"resume: trajectory {history.trajectory_id} was given as an object, and shards go on from events; "
                    "give those of its journal: fsm_rollout.journal.histories(path)"
                )
            first = history[0]
            assert isinstance(first, Prompted)
            by_group.setdefault(first.group_id, []).append(history)
        for number, (group_id, members) in enumerate(by_group.items()):
            if group_id in self.groups:
                raise ConfigError(f"group '{group_id}' is under way already; give its trajectories once")
            samples = [t for t in (Trajectory.fold(events[:1]) for events in members) if t.parent_id is None]
            if not samples:
                raise ConfigError(f"group '{group_id}' has trajectories of sub-agents only; give all of its histories")
            n = max(run.n, *(trajectory.sample + 1 for trajectory in samples))
            group = LeasedGroup.of(group_id, number, prompt_of(group_id, samples[0]), n)
            group.histories = [list(map(encode, events)) for events in members]
            if self.samples.tail.orders:
                group.version = min(trained_versions(map(Trajectory.fold, members)), default=group.version)
            run.resumed[group_id] = group
            if self.recorder.journal is not None:
                self.recorder.journal.delivered(group_id, False)
            self.groups.put(group, GroupState.WAITING)

    async def _drop(self, group: Group) -> None:
        """Give a group up, and close what it holds open."""
        self.groups.take(group)
        shard = cast(LeasedGroup, group).shard
        if shard is not None and shard.alive and self._run is None:
            with suppress(EngineError):
                await self.shards.call(shard, "drop", group.group_id)

    def _renew(self, group: Group) -> bool:
        """Have a group that came back run again where it is too old by now; return whether it is."""
        leased, run = cast(LeasedGroup, group), self._run
        most, oldest = self.staleness.most, leased.oldest
        if most is None or oldest is None or self.shards.version - oldest <= most or group.dropped or run is None:
            return False
        if not cast(Leases, self.samples).renew(leased):
            group.drop_reason = DropReason.STALE
        run.changed.set()
        return True

    async def update_weights(self, weights: Weights | WeightSource, version: int | None = None) -> int:
        """Load new policy weights, while no shard samples anything, and return their version.

        Servers that all share are loaded from here, once each. Other replicas are loaded by the shard that has them.
        """
        if self._client is None:
            check_weights(weights)
        # One that is given up half-way would leave shards with different weights.
        return await to_its_end(self._update(weights, version))

    async def _update(self, weights: Weights | WeightSource, version: int | None) -> int:
        async with self.changing:
            phases = Phases(self._update_times)
            try:
                await self.shards.order("hold", UPDATE)
                phases.end("hold")
                if self._client is None:
                    version = self.shards.version + 1 if version is None else version
                    await self.shards.take_weights("load", weights, version)
                else:
                    version = await self._load_servers(self._client, weights, version)
                phases.end("load")
            finally:
                await self.shards.undo("hold", UPDATE)
            phases.end("release", whole="paused")
            self.shards.version = version
            for group in list(self.groups.by_state[GroupState.DONE].values()):
                self._renew(group)
        return version

    async def _load_servers(self, client: EngineClient, weights: Weights | WeightSource, version: int | None) -> int:
        try:
            version = await client.update_weights(weights, version)
        finally:
            await self.shards.keep_apart()
        await self.shards.take_weights("take", version, isinstance(weights, Adapter))
        return version


class _RunNumber:
    """Which run it is: all that a driver knows of how trajectories begin."""

    run, run_number = NO_RUN, -1
