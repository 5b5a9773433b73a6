"""What is asked of a scheduler beside its runs: of its engines, its tools, and whether prompts fit.

Invariant: a scheduler whose trajectories run in shards is asked the same, and passes it on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import cached_property

from fsm_rollout.concurrency.loop_lag import LoopLag
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.run_state import RunState
from fsm_rollout.scheduler.sample_runner import SampleRunner
from fsm_rollout.scheduler.scoring import Scoring
from fsm_rollout.states.active_trajectory import Suspension
from fsm_rollout.trajectory.enums import Trigger
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trace_ids import TraceIds

Listens = Callable[[], AbstractContextManager[TraceIds]]  # sends the spans of a run, and says how they are called


class SchedulerOrders:
    """See the module."""

    agents: RunAgents
    clients: Mapping[str, EngineClient]
    scoring: Scoring
    samples: SampleRunner
    _run: RunState | None

    @property
    def under_way(self) -> bool:
        """Whether there is a run."""
        return self._run is not None

    @cached_property
    def lag(self) -> LoopLag:
        """How late the event loop was while runs were under way."""
        return LoopLag()

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError, all problems at once, for prompts that do not fit the run's agents and its reward."""
        self.agents.check(prompts, self.scoring.reward)

    async def acheck(self, prompts: Sequence[Prompt]) -> None:
        """Do what :meth:`check` does, wherever agents are bound to engines."""
        self.check(prompts)

    async def prepare(self, *, histories: bool, batch_options: Mapping[str, object]) -> None:
        """Belong to the present event loop; shards are told how groups come back: with events, with which rows."""
        for name, client in self.clients.items():
            client.check_loop(name)

    @asynccontextmanager
    async def opened(self, listens: Listens | None) -> AsyncIterator[TraceIds | None]:
        """Have tools ready for a run, and its spans sent; yields how these are called. Shards do so themselves."""
        await self.agents.prepare_tools()
        try:
            with self.lag.watched(), nullcontext() if listens is None else listens() as trace:
                yield trace
        finally:
            await self.agents.close_tools()

    def engine_stats(self) -> dict[str, dict[str, int]]:
        """Return per engine: requests, dispatches, and the version of its weights; of shards as of their last run."""
        return {
            name: {"requests": c.pool.requests, "dispatches": c.pool.dispatches, "weight_version": c.weight_version}
            for name, c in self.clients.items()
        }

    def loop_lag(self) -> dict[str, dict[str, float]]:
        """Return seconds by which event loops were late, ``p50``, ``p99`` and ``max``, by process: this one, shards."""
        return {"run": found} if (found := self.lag.figures()) else {}

    async def send_to_sleep(self) -> None:
        """Let all engines give their memory back."""
        for client in self.clients.values():
            await client.sleep()

    async def wake_up(self) -> None:
        """Make the engines ready again, and let what waits for them go on."""
        for client in self.clients.values():
            await client.wake()

    def cancel(self, trajectory_id: str) -> bool:
        """End one trajectory soon with stop reason ``cancelled``; False when it is not running."""
        return self.samples.stop_one(trajectory_id, Outcome(Trigger.CANCELLED))

    def suspend(self, trajectory_id: str, reason: str = "asked") -> bool:
        """Set one trajectory aside unfinished, keeping all it has; False when it is not running."""
        return self.samples.stop_one(trajectory_id, Suspension(reason))
