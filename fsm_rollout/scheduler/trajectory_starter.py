"""Trajectories begin, or go on where they stand: those of samples, and those of the sub-agents that they call.

Invariant: a trajectory's first event, :class:`Prompted`, holds all that it depends on (its seed, limits, sampling and
date); and a call of a sub-agent that is made again after an interruption goes on with the trajectory that had begun to
answer it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.concurrency.seeds import derive_seed
from fsm_rollout.errors import GlueMismatchError
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.trajectory_runner import RunnableAgent, run_trajectory
from fsm_rollout.states.active_trajectory import UNREAD, ActiveTrajectory, LiveUser, Record
from fsm_rollout.states.effect_log import Replayed
from fsm_rollout.tools import AgentAnswer, AgentCall
from fsm_rollout.tools.bounded_call import Expired
from fsm_rollout.trajectory.enums import IMPLICIT_TRIGGERS, StopReason
from fsm_rollout.trajectory.events import AnyEvent, Ended, Prompted, Resumed
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory


@dataclass(eq=False)
class TrajectoryStarter:
    """Makes trajectories that run, for a scheduler or in a worker."""

    agents: RunAgents
    record: Record
    report_mismatch: Callable[[GlueMismatchError], None]  # called when an entry of a template's cache is wrong
    version: Callable[[], int]  # returns the version of the policy's weights
    seed: int = 0
    validate: bool = False  # whether trajectories are marked as validation
    run_number: int = -1  # the number of the present or latest run, from 0
    # Recorded events by trajectory, from which tools, users and judges answer when a run is run again.
    replayed: Mapping[str, Sequence[AnyEvent]] | None = None
    live_user: LiveUser | None = None  # answers live, in place of interactions; not in the trajectories of workers

    def begin_sample(self, group: Group, sample: int) -> ActiveTrajectory:
        """Begin a sample of a group; its seed follows from its id, and from the second run on from the run's number."""
        trajectory_id = group.next_id(sample)
        seed = derive_seed(self.seed, trajectory_id, *([self.run_number] if self.run_number else []))
        live = self._begin(group, group.agent, group.prompt, trajectory_id, sample, seed=seed)
        group.add(live.trajectory)
        return live

    def _begin(
        self,
        group: Group,
        agent: RunnableAgent,
        prompt: Prompt,
        trajectory_id: str,
        sample: int,
        *,
        seed: int,
        caller: ActiveTrajectory | None = None,
    ) -> ActiveTrajectory:
        """Create a trajectory by its first event, and return what runs it; a sub-agent's has a ``caller``."""
        graph = agent.graph
        spends = agent.machine.spends[graph.initial]
        limits = graph.limits if prompt.limits is None else graph.limits.lowered(prompt.limits)
        prompted = Prompted(
            at=asyncio.get_running_loop().time(),
            trajectory_id=trajectory_id,
            group_id=group.group_id,
            sample=sample,
            agent=graph.agent,
            initial=graph.initial,
            messages=list(map(dict, prompt.messages)),
            extra=prompt.extra,
            limits=limits.model_dump(),
            seed=seed,
            date=datetime.now().isoformat(timespec="seconds"),
            epoch=time.time(),
            validate=self.validate,
            parent_id=None if caller is None else caller.trajectory.trajectory_id,
            sampling=prompt.sampling.model_dump(exclude_none=True) if prompt.sampling is not None else {},
            spent={} if spends is None else {spends: 1},  # an entry like any other
        )
        trajectory = Trajectory.fold([prompted])
        self.record(trajectory, prompted, None)
        return self.activate(group, trajectory, agent, caller)

    def activate(
        self,
        group: Group,
        trajectory: Trajectory,
        agent: RunnableAgent | None = None,
        caller: ActiveTrajectory | None = None,
    ) -> ActiveTrajectory:
        """Return what runs a trajectory of a group; its agent follows from its name if none is given."""
        trajectory_id = trajectory.trajectory_id
        if agent is None:
            agents = group.agent, *self.agents.all  # a sub-agent's is not the group's
            agent = next(agent for agent in agents if agent.graph.agent == trajectory.agent)
        run_agent = partial(self._run_agent, group, trajectory_id)
        live = ActiveTrajectory(
            trajectory, agent, run_agent, self.record, self.report_mismatch, caller,
            None if self.replayed is None else Replayed(self.replayed.get(trajectory_id, ())), self.live_user,
        )  # fmt: skip
        group.active[trajectory_id] = live
        group.glue_entries[trajectory_id] = live.glue_entries
        return live

    def go_on(
        self,
        group: Group,
        trajectory: Trajectory,
        agent: RunnableAgent | None = None,
        caller: ActiveTrajectory | None = None,
    ) -> ActiveTrajectory:
        """Let a trajectory go on that was set aside, or cut off by a crash."""
        live = group.active.get(trajectory.trajectory_id) or self.activate(group, trajectory, agent)
        live.stop, live.caller = None, caller
        now, version = asyncio.get_running_loop().time(), self.version()
        live.emit(Resumed(at=now, away=now - trajectory.latest_at, weight_version=version, epoch=time.time()))
        return live

    async def _run_agent(self, group: Group, parent_id: str, graph: AgentGraph, call: AgentCall) -> AgentAnswer:
        """Run a sub-agent to its end, as a child trajectory of the same group, in the calling task.

        A call that is made again after an interruption goes on with the trajectory that had begun to answer it.

        Raises:
            Expired: that one had been given up before the interruption.
        """
        # 1. The trajectory of the call: the one that has begun, or a new one.
        caller, agent = group.active[parent_id], self.agents.of_graph(graph)
        child_id = group.child_id(caller.trajectory, call)
        child = group.child(child_id)
        if child is None:
            prompt = Prompt(prompt_id=group.prompt.prompt_id, messages=({"role": "user", "content": call.task},))
            sample = caller.trajectory.sample
            live = self._begin(group, agent, prompt, child_id, sample, seed=call.seed, caller=caller)
            child = live.trajectory
            group.add_child(child)
        elif child.stop_reason == StopReason.CANCELLED:
            raise Expired
        elif not child.ended:
            live = self.go_on(group, child, agent, caller)
        # 2. Its end.
        if not child.ended:
            try:
                await run_trajectory(live, agent.handlers)
            finally:
                if not live.stays_open:
                    group.active.pop(child_id, None)
        # 3. Its answer.
        texts = list(child.assistant_texts())
        answered = child.exit is not None and child.exit.trigger not in IMPLICIT_TRIGGERS and texts
        failure = None if answered else child.stop_reason
        return AgentAnswer(text=texts[-1] if texts else "", failure=failure, child_id=child_id)

    async def end_unread(self, group: Group, trajectory: Trajectory) -> None:
        """End the sub-agents' trajectories that nobody reads: they were set aside, and their caller has ended."""
        if not trajectory.ended:
            return
        now = asyncio.get_running_loop().time()
        for child in group.sub_agents_of(trajectory):
            if not child.ended:
                for event in (
                    Resumed(at=now, away=now - child.latest_at, epoch=time.time()),
                    Ended(at=now, stop_reason=StopReason.CANCELLED, detail=UNREAD),
                ):
                    child.apply(event)
                    self.record(child, event, None)
                live = group.active.pop(child.trajectory_id, None)
                if live is not None:
                    await live.close()
        group.discard_unread()
