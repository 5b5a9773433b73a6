"""The scheduler: drives any number of trajectories on one event loop.

Invariants: every prompt taken comes back exactly once, ended or suspended, whatever fails (one that a run with a target
carries over, with the next run); no trajectory waits for another's generation; and when :meth:`Scheduler.run` is over,
however it ended, nothing that it started is still running. One run's way is :mod:`fsm_rollout.scheduler.run`', one trajectory's
:mod:`fsm_rollout.scheduler.trajectory_runner`'s.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from fsm_rollout.agent.graph import POLICY, AgentGraph
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.environment.rewards import GroupFilter, Reward
from fsm_rollout.errors import ConfigError, GlueMismatchError, did_you_mean
from fsm_rollout.scheduler.group import OpenGroup
from fsm_rollout.scheduler.live import ActiveTrajectory, Group
from fsm_rollout.scheduler.program import Program, problems_of
from fsm_rollout.scheduler.resume import History, reopen
from fsm_rollout.scheduler.run import Run
from fsm_rollout.scheduler.staleness import Staleness
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from fsm_rollout.engines.client import Weights

logger = logging.getLogger(__name__)

Listener = Callable[[Trajectory, AnyEvent], None]
OnToolFailure = Literal["tell_model", "end"]
OVER_SAMPLE = 1.5
MAX_RESTARTS = 3


class Scheduler:
    """Runs prompts through agents on engines.

    Args:
        agents: agents by name; a prompt chooses by its ``agent`` field (which may be left out when there is one).
        dispatchers: engines by name, among them ``policy``.
        seed: the run's seed.
        concurrency: trajectories that run at once; the others wait to be admitted.
        sampling: the run's sampling, laid over the agents' in the policy's contexts.
        validate: marks the trajectories as validation.
        reward: scores each group as it ends.
        journal: where events are kept.
        listeners: called with every event, after it has been applied; they must not block.
        on_tool_failure: ``tell_model``, or ``end`` to fail the trajectory.
        group_filter: asked of each group that has ended and been scored; what it turns down is handed over as
            ``dropped``, and does not count towards a target.
        max_staleness: how many weight versions a trained token may be behind when its group is handed over; a sample
            with an older one (if it still runs, it ends as ``cancelled``) is begun anew in its place.
        max_restarts: how often a sample is begun anew; a group with one that falls behind once more is handed over as
            ``dropped``.

    Raises:
        ConfigError: an agent does not fit the engines; all problems at once.
    """

    def __init__(
        self,
        agents: Mapping[str, AgentGraph],
        dispatchers: Mapping[str, EngineClient],
        *,
        seed: int = 0,
        concurrency: int = 1024,
        sampling: Sampling | None = None,
        validate: bool = False,
        reward: Reward | None = None,
        journal: Journal | None = None,
        listeners: Sequence[Listener] = (),
        on_tool_failure: OnToolFailure = "tell_model",
        group_filter: GroupFilter | None = None,
        max_staleness: int | None = None,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        if concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1 trajectory, got {concurrency}")
        if POLICY not in dispatchers:
            raise ConfigError(f"a run needs an engine named '{POLICY}', got {sorted(dispatchers)}")
        self.dispatchers = dispatchers
        self.seed = seed
        self.concurrency = concurrency
        self.sampling = sampling or Sampling()
        self.validate = validate
        self.reward = reward
        self.journal = journal
        self.listeners = tuple(listeners)
        self.on_tool_failure = on_tool_failure
        self.group_filter = group_filter
        policy = dispatchers[POLICY]
        self.staleness = Staleness(max_staleness, max_restarts, lambda: policy.engine.weight_version)
        self.programs: dict[int, Program] = {}
        """Those of all agents, sub-agents among them, by the identity of their graphs."""
        self.agents: Mapping[str, Program] = {name: self._compile(graph) for name, graph in agents.items()}
        self.running: dict[str, tuple[ActiveTrajectory, asyncio.Task[None], Run]] = {}
        self.under_way: set[str] = set()
        """The ids of the groups that have not come back yet."""
        self.waiting: deque[OpenGroup] = deque()
        """Groups set aside by a run that had reached its target."""
        self.ready: deque[OpenGroup] = deque()
        """Groups that came to their end beyond a run's target."""
        self.changing = asyncio.Lock()
        """Held while weights change, and while it is seen whether what is handed over is too old for them."""
        self.stopping: Outcome | str | None = None
        self._active: list[Run] = []
        self._runs = self._prompts = 0
        self._given: list[str] = []
        """Groups handed over by runs that are over; with the next run, the caller comes back for more."""

    def _compile(self, graph: AgentGraph) -> Program:
        """Compile an agent and, so that every mistake shows now, its sub-agents."""
        for tool in graph.tools.values():
            if tool.agent is not None:
                self._compile(tool.agent)
        return self.program(graph)

    def program(self, graph: AgentGraph) -> Program:
        """Return the program of a graph, compiled once (by identity: graphs are immutable and outlive the run)."""
        if id(graph) not in self.programs:
            self.programs[id(graph)] = Program(graph, self.dispatchers, sampling=self.sampling)
        return self.programs[id(graph)]

    # -- the run ------------------------------------------------------------------------------------------------

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Check what prompts ask of their agents: that they exist, and take their tools' and interactions' kwargs.

        Raises:
            ConfigError: all that is wrong, each with its prompt.
        """
        problems = problems_of(prompts, self.program_of)
        if problems:
            raise ConfigError(problems)

    async def run(
        self,
        prompts: Iterable[Prompt],
        n: int = 1,
        *,
        target_groups: int | None = None,
        over_sample: float = OVER_SAMPLE,
        resume: Iterable[History] = (),
        together: bool = False,
    ) -> AsyncGenerator[Group, None]:
        """Run every prompt ``n`` times and yield each group as its last trajectory ends and is scored.

        Groups that an earlier run with a target has carried over go on first, then those of ``resume`` (set aside, or
        read from a journal; a prompt of the same id and messages is theirs and not begun again), then the prompts.

        With ``target_groups``, that many groups (not counting those that the group filter drops) are enough, and at
        most ``over_sample`` times as many are under way or kept at a time. What is still under way at the end is set
        aside and goes on in the next run; prompts that have not begun are not taken from the iterable.

        ``together`` hands all groups over at the end: whatever weights have changed until then, none of them is older
        than ``max_staleness`` allows. Where the run fails or is cancelled before, it has handed over none.

        Closing the iterator, or cancelling the task that iterates, cancels what still runs (stop reason ``cancelled``;
        with a journal it is suspended as ``interrupted``) and waits for it; what was carried and has not been touched,
        and what a run with a target has done, stays. Several runs may go on at once; each has ``concurrency``
        trajectories. A prompt id that is under way already, or in the journal, gets a number (``7#2``). Where a run
        with a target fails to get its next prompt, it sets aside what it has before it raises.

        The journal is told that a group was handed over when the caller comes back: for the next group, or (at a run's
        end, and ``together``) with the next run. So each group is given at least once: what the caller was at work on
        when the process died is given again by a run that resumes the journal's unfinished groups.

        Raises:
            ConfigError: ``n`` or ``target_groups`` is not positive, ``over_sample`` is less than 1, a prompt names no
                agent of the run, or (without a target) two prompts have one id.
        """
        if n < 1:
            raise ConfigError(f"n must be at least 1 trajectory per prompt, got {n}")
        if target_groups is not None and target_groups < 1:
            raise ConfigError(f"target_groups must be at least 1 group, got {target_groups}")
        if not over_sample >= 1:
            raise ConfigError(f"over_sample must be at least 1 (no group more than the target), got {over_sample}")
        if not self.running:
            self.stopping = None
        most = math.inf if target_groups is None else math.ceil(target_groups * over_sample)
        run = Run(self, self._runs, iter(prompts), n, target=target_groups, most=most, together=together)
        self._runs += 1
        self._settle(self._given)
        reopened = reopen(self, resume, n)
        for one in reopened:
            self.under_way.add(one.group.group_id)
            run.reopened[one.group.group_id] = one.group
        run.pending.extend([*self.waiting, *reopened])
        run.done.extend(self.ready)
        self.waiting.clear()
        self.ready.clear()
        self._active.append(run)
        try:
            while taken := await run.take():
                for one in taken:
                    run.given.append(one.group.group_id)
                    yield one.group
                    if not together:
                        self._settle(run.given)
                if run.over and run.failure is None:
                    return
            if run.failure is not None:
                await run.set_aside()
                raise run.failure
            await run.unwrapped()
        finally:
            self._given += run.given
            await run.abandon()
            self._active.remove(run)
            if not self.running:
                for dispatcher in self.dispatchers.values():
                    await dispatcher.drain()

    def _settle(self, given: list[str]) -> None:
        """Write down that the caller has had some groups, and has come back."""
        if self.journal is not None:
            for group_id in given:
                self.journal.handed_over(group_id)
        given.clear()

    def next_index(self) -> int:
        """Return the place of the next prompt among those of all runs."""
        self._prompts += 1
        return self._prompts - 1

    def free_id(self, group_id: str) -> str:
        """Take an id; one that is under way, or in the journal already, gets a number: the next epoch's ``7#2``."""
        journalled = set() if self.journal is None else self.journal.groups
        names = (group_id if number == 1 else f"{group_id}#{number}" for number in itertools.count(1))
        free = next(name for name in names if name not in self.under_way and name not in journalled)
        self.under_way.add(free)
        return free

    def program_of(self, prompt: Prompt) -> Program:
        """Return the program of the agent that a prompt chooses.

        Raises:
            ConfigError: it is not one of the run's.
        """
        if prompt.agent is None and len(self.agents) == 1:
            return next(iter(self.agents.values()))
        if prompt.agent is None or prompt.agent not in self.agents:
            hint = did_you_mean(prompt.agent or "", self.agents)
            raise ConfigError(f"prompt '{prompt.prompt_id}': agent {prompt.agent!r} is not one of the run's{hint}")
        return self.agents[prompt.agent]

    @property
    def carried(self) -> list[Group]:
        """The groups that wait for the next run: ended beyond the target, or set aside unfinished."""
        return [one.group for one in (*self.ready, *self.waiting)]

    async def let_go(self) -> list[Group]:
        """Give up what waits for the next run and return it, as it stands; its tools are released."""
        left = [*self.ready, *self.waiting]
        self.ready.clear()
        self.waiting.clear()
        for one in left:
            self.under_way.discard(one.group.group_id)
            for live in one.live.values():
                await live.close()
        return [one.group for one in left]

    def tell(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Journal an event and tell the listeners; a listener that raises is the listener's problem."""
        if self.journal is not None:
            self.journal.append(trajectory.trajectory_id, event)
        for listener in self.listeners:
            try:
                listener(trajectory, event)
            except Exception:
                logger.exception("an event listener failed on %s of %s", type(event).__name__, trajectory.trajectory_id)

    # -- groups, stopping ---------------------------------------------------------------------------------------

    async def update_weights(self, weights: Weights, version: int | None = None) -> int:
        """Load new policy weights and return their version; see :meth:`EngineClient.update_weights`.

        Samples that are then more than ``max_staleness`` versions behind, run they or have they ended, are given up.
        """
        async with self.changing:
            version = await self.dispatchers[POLICY].update_weights(weights, version)
            if self.staleness.most is not None:
                await self._give_up_stale()
        return version

    async def _give_up_stale(self) -> None:
        """Let nothing that is there be too far behind: what runs, what has ended, what waits for the next run."""
        under_way = self.dispatchers[POLICY].sampling_since()
        for trajectory_id, (live, _, run) in list(self.running.items()):
            outcome = self.staleness.end_of(live, under_way)
            if outcome is not None and live.stop is None:
                one = run.open[live.group.group_id]
                live.requeue = self.staleness.may_restart(one, live.trajectory.sample)
                self.stop_one(trajectory_id, outcome)
        for run in self._active:
            run.renew_all()
        for one in list(self.ready):
            if self.staleness.give_up(one):
                self.ready.remove(one)
                self.waiting.append(one)
        for one in list(self.waiting):
            self.staleness.give_up(one)
            for live in list(one.live.values()):
                if not live.trajectory.ended:
                    await self.staleness.end_if_stale(one, live)

    def cancel(self, trajectory_id: str) -> bool:
        """End one trajectory soon with stop reason ``cancelled``; False when it is not running."""
        return self.stop_one(trajectory_id, Outcome("cancelled"))

    def suspend(self, trajectory_id: str, reason: str = "asked") -> bool:
        """Set one trajectory aside unfinished, keeping all it has; False when it is not running."""
        return self.stop_one(trajectory_id, reason)

    def stop(self, suspend: str | None = None) -> None:
        """Stop everything: running and waiting trajectories end as ``cancelled``, or are suspended for a reason.

        Their groups still come back from :meth:`run`; with a target, it takes no further prompts.
        """
        self.stopping = Outcome("cancelled") if suspend is None else suspend
        for trajectory_id in list(self.running):
            self.stop_one(trajectory_id, self.stopping)

    def glue_mismatch(self, mismatch: GlueMismatchError) -> None:
        """End every running trajectory whose glue came from the cache entry that was found wrong."""
        outcome = Outcome("failed", error=type(mismatch).__name__, detail=str(mismatch))
        for trajectory_id, (live, _, _) in list(self.running.items()):
            if mismatch.entry in live.glue_entries:
                self.stop_one(trajectory_id, outcome)

    def stop_one(self, trajectory_id: str, stop: Outcome | str) -> bool:
        """Stop one trajectory with an outcome, or suspend it for a reason, unless it is being stopped already."""
        if trajectory_id not in self.running:
            return False
        live, task, _ = self.running[trajectory_id]
        if live.stop is None and not live.trajectory.ended:
            live.stop = stop
            task.cancel()
        return True
