"""What is asked of a scheduler beside its runs: of its engines, its tools, and whether prompts fit.

Invariant: a scheduler whose trajectories run in shards is asked the same, and passes it on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.concurrency.loop_lag import LoopLag
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.scheduler.recorder import Recorder
from fsm_rollout.scheduler.resume import History
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.run_state import GroupTable, RunState
from fsm_rollout.scheduler.sample_runner import SampleRunner
from fsm_rollout.scheduler.scoring import Scoring
from fsm_rollout.states.active_trajectory import Suspension
from fsm_rollout.trajectory.enums import Trigger
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trace_ids import TraceIds

Listens = Callable[[], AbstractContextManager[TraceIds]]  # sends the spans of a run, and says how they are called


class SchedulerOrders(ABC):
    """See the module."""

    agents: RunAgents
    clients: Mapping[str, EngineClient]
    scoring: Scoring
    samples: SampleRunner
    groups: GroupTable
    recorder: Recorder
    _run: RunState | None

    @abstractmethod
    def _resume(self, run: RunState, histories: list[History]) -> None:
        """Let the groups of some histories wait for their turn."""

    @abstractmethod
    def _renew(self, group: Group) -> bool:
        """Have a group run again where it is too old by now; return whether it is."""

    @property
    def rewarded(self) -> bool:
        """Whether it has a reward of its own, whose events its listeners hear."""
        return self.scoring.reward is not None

    @property
    def under_way(self) -> bool:
        """Whether there is a run."""
        return self._run is not None

    lag: LoopLag | None = None
    """How late the event loop was while runs were under way; ``None``: nobody looks."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError, all problems at once, for prompts that do not fit the run's agents and its reward."""
        self.agents.check(prompts, self.scoring.reward)

    def engine_stats(self) -> dict[str, dict[str, int]]:
        """Return what engines have done, by name; of shards as of their last run.

        ``requests``, ``dispatches``, ``weight_version`` (how many updates the weights have had), ``tokens`` that were
        sampled, and ``wire_bytes``: those of requests and answers that went to other processes and came back.
        """
        return {
            name: {
                "requests": client.pool.requests, "dispatches": client.pool.dispatches,
                "weight_version": client.weight_version,
                "tokens": sum(replica.tokens for replica in client.pool.replicas),
                "wire_bytes": sum(replica.wire_bytes for replica in client.pool.replicas),
            }
            for name, client in self.clients.items()
        }  # fmt: skip

    def update_times(self) -> dict[str, dict[str, float]]:
        """Return seconds that updates of the policy's weights took, by phase: ``count``, ``p50``, ``p99``, ``max``.

        ``check`` goes before; ``hold``, ``load`` and ``release`` follow each other, ``paused`` is the three together.
        """
        times = self.clients[POLICY].pool.update_times if POLICY in self.clients else {}
        return {phase: {"count": seen.count} | seen.figures() for phase, seen in times.items()}

    @property
    def link_bytes(self) -> int:
        """How many bytes of messages shards and their driver have exchanged."""
        return 0

    def loop_lag(self) -> dict[str, dict[str, float]]:
        """Return seconds by which event loops were late, ``p50``, ``p99`` and ``max``, by process: this one, shards."""
        found = {} if self.lag is None else self.lag.figures()
        return {"run": found} if found else {}

    async def send_to_sleep(self) -> None:
        """Let all engines give their memory back."""
        for client in self.clients.values():
            await client.sleep()

    async def wake_up(self) -> None:
        """Make the engines ready again, and let what waits for them go on."""
        for client in self.clients.values():
            await client.wake()

    async def hold(self, reason: str) -> None:
        """Have the policy sample nothing until every reason is taken back; timeouts of what waits stand still."""
        await self.clients[POLICY].pause(reason)

    async def release(self, reason: str) -> None:
        """Take a reason for :meth:`hold` back."""
        await self.clients[POLICY].resume(reason)

    def take_up(self, histories: Sequence[History]) -> None:
        """Let groups go on in the present run, as those do that it began with; asked of a shard's."""
        assert self._run is not None
        self._resume(self._run, list(histories))
        self._run.resumed.clear()  # no prompt of theirs comes here
        self._run.changed.set()

    def set_aside(self) -> None:
        """Come to the end of the present run soon; what is open goes on in the next one."""
        if self._run is not None:
            self.samples.stop_run(self._run, keep=True)

    def take_back(self, group: Group) -> None:
        """Let a group that was delivered run again, as far as it is too old by now, and deliver it again."""
        self.groups.put(group, GroupState.DONE)
        self._renew(group)

    def cancel(self, trajectory_id: str) -> bool:
        """End one trajectory soon with stop reason ``cancelled``; False when it is not running."""
        return self.samples.stop_one(trajectory_id, Outcome(Trigger.CANCELLED))

    async def acancel(self, trajectory_id: str) -> bool:
        """Do what :meth:`cancel` does, wherever the trajectory runs."""
        return self.cancel(trajectory_id)

    def suspend(self, trajectory_id: str, reason: str = "asked") -> bool:
        """Set one trajectory aside unfinished, keeping all it has; False when it is not running."""
        return self.samples.stop_one(trajectory_id, Suspension(reason))
