"""Trajectories run: they begin, or go on where they stand, and visit states until a transition leads to a final one.

Those of samples do, and those of the sub-agents that they call.

Invariant: a trajectory's first event, :class:`Prompted`, holds all that it depends on (its seed, limits, sampling and
date); a visit only has an outcome, and the machine alone says which state comes next; a call of a sub-agent that is
made again after an interruption goes on with the trajectory that had begun to answer it. What a trajectory holds open
is closed when it stops, unless it stays open to go on in this process.

The order in which limits and timeouts are checked is that of :mod:`fsm_rollout.agent.limits`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from weakref import WeakSet

from fsm_rollout.agent.graph import MAIN, AgentGraph
from fsm_rollout.agent.limits import LimitReached, on_entry
from fsm_rollout.concurrency.cancellation import being_cancelled, runs_in
from fsm_rollout.concurrency.deadline import PATIENCE, Deadline
from fsm_rollout.concurrency.seeds import derive_seed
from fsm_rollout.concurrency.step_timing import watch_steps
from fsm_rollout.errors import EngineError, describe, single
from fsm_rollout.scheduler.failure_policy import class_of, class_of_timeout
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.run_agents import RunAgents, RunnableAgent
from fsm_rollout.states import built_in
from fsm_rollout.states.active_trajectory import CARRIED, ActiveTrajectory, RunServices
from fsm_rollout.states.base import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.states.restoring import restore
from fsm_rollout.tools import AgentAnswer, AgentCall
from fsm_rollout.tools.bounded_call import Expired, ToolDied
from fsm_rollout.trajectory.enums import IMPLICIT_TRIGGERS, FailureClass, LimitName, StopReason, Trigger
from fsm_rollout.trajectory.events import UNREAD, Ended, Prompted, Refused, TimedOut
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.stream import pictures_of, root_of
from fsm_rollout.trajectory.trace_ids import tries_before, visit_key, within
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

_logged: WeakSet[type[State]] = WeakSet()  # handlers of which a warning was logged


@dataclass(eq=False, kw_only=True)
class TrajectoryStarter(RunServices):
    """Makes trajectories that run, for a scheduler."""

    agents: RunAgents
    version: Callable[[], int]  # returns the version of the policy's weights
    seed: int = 0
    validate: bool = False  # whether trajectories are marked as validation
    run_number: int = -1  # the number of the present or latest run, from 0
    # Why trajectories are given up when they are to go on, by id: the process died in their hands, and not only once.
    given_up: dict[str, str] = field(default_factory=dict)

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
        called_by: str = "",
    ) -> ActiveTrajectory:
        """Create a trajectory by its first event, and return what runs it; a sub-agent's has a ``caller``."""
        graph = agent.graph
        spends = agent.machine.spends[graph.initial]
        limits = graph.limits if prompt.limits is None else graph.limits.lowered(prompt.limits)
        now = asyncio.get_running_loop().time()
        prompted = Prompted(
            at=now,
            trajectory_id=trajectory_id,
            group_id=group.group_id,
            sample=sample,
            agent=graph.agent,
            initial=graph.initial,
            messages=list(map(dict, prompt.messages)),
            extra=dict(prompt.model_extra or {}),
            limits=limits.model_dump(),
            seed=seed,
            date=datetime.now().isoformat(timespec="seconds"),
            epoch=self.run.epoch + now,
            step=self.run.step,
            validate=self.validate,
            parent_id=None if caller is None else caller.trajectory.trajectory_id,
            called_by=called_by,
            sampling=prompt.sampling.model_dump(exclude_none=True) if prompt.sampling is not None else {},
            spent={} if spends is None else {spends: 1},  # an entry like any other
        )
        trajectory = Trajectory.fold([prompted])
        if self.recorder.hears or self.recorder.journal is not None:
            self.recorder.record(trajectory, prompted)
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
        live = ActiveTrajectory(trajectory, agent, self, partial(self._run_agent, group, trajectory_id), caller)
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
        live.emit(self.run.resumed(now, now - trajectory.latest_at, version))
        if (why := self.given_up.pop(trajectory.trajectory_id, None)) is not None:
            logger.error("trajectory %s is given up: %s", trajectory.trajectory_id, why)
            died = ToolDied.__name__
            live.stop_now(Outcome(Trigger.FAILED, error=died, detail=why, blame=FailureClass.TOOL))
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
            called_by = f"{call.call_id}/{tries_before(caller.trajectory.called, call.call_id) + call.number}"
            live = self._begin(
                group, agent, prompt, child_id, sample, seed=call.seed, caller=caller, called_by=called_by
            )
            child = live.trajectory
            group.add_child(child)
        elif child.stop_reason == StopReason.CANCELLED:
            raise Expired
        elif not child.ended:
            live = self.go_on(group, child, agent, caller)
        # 2. Its end.
        if child.ended:
            group.active.pop(child_id, None)
        else:
            await run_trajectory(live, group, agent.handlers)
        # 3. Its answer.
        texts = list(child.assistant_texts())
        answered = child.exit is not None and child.exit.trigger not in IMPLICIT_TRIGGERS and texts
        failure = None if answered else child.stop_reason
        shown = pictures_of(stream for stream in child.streams if root_of(stream.context) == MAIN)
        return AgentAnswer(texts[-1] if texts else "", failure, child_id, shown)

    async def end_unread(self, group: Group, trajectory: Trajectory) -> None:
        """End the sub-agents' trajectories that nobody reads: they were set aside, and their caller has ended."""
        if not trajectory.ended:
            return
        now = asyncio.get_running_loop().time()
        for child in group.sub_agents_of(trajectory):
            if not child.ended:
                for event in (
                    self.run.resumed(now, now - child.latest_at),
                    Ended(at=now, stop_reason=StopReason.CANCELLED, detail=UNREAD),
                ):
                    child.apply(event)
                    self.recorder.record(child, event)
                live = group.active.pop(child.trajectory_id, None)
                if live is not None:
                    await live.close()
        group.discard_unread()


async def run_trajectory(live: ActiveTrajectory, group: Group, handlers: Mapping[str, State]) -> None:
    """Visit states until a transition leads to a final one; cancellation ends (or suspends) the trajectory.

    Then it is closed, unless its tools and interactions stay open, because it is to go on in this process.
    """
    trajectory, machine = live.trajectory, live.agent.machine
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    try:
        if trajectory.exit is not None:
            live.end_if_final()  # an interruption may have come between the last transition and the end
        if trajectory.resumptions and trajectory.stop_reason is None and live.stop is None:
            await restore(live)
        now = loop.time()
        while trajectory.stop_reason is None and live.stop is None:
            outcome = await _visit(live, handlers[trajectory.state], now, task)
            now = loop.time()
            if live.stop is None:  # else the handler swallowed the cancellation
                if trajectory.state in machine.scores:
                    outcome = machine.scored(trajectory, outcome)
                machine.fire(trajectory, outcome, at=now, emit=live.emit)
                if trajectory.exit is not None:
                    live.end_if_final()
        if live.stop is not None:
            live.stop_now(live.stop)
    except asyncio.CancelledError:
        live.stop_cancelled()
        raise
    finally:
        if live.stop is not CARRIED or trajectory.stop_reason is not None:
            try:
                await live.close()
            finally:
                group.active.pop(trajectory.trajectory_id, None)


async def _visit(live: ActiveTrajectory, handler: State, now: float, task: asyncio.Task[object] | None) -> Outcome:
    """Run the present state's handler under its limits and timeouts, and return its outcome.

    ``now`` is the loop's time, and ``task`` the present task.
    """
    # 1. Limits that are reached on entry. (A visit that timed out before an interruption has passed them.)
    trajectory, agent = live.trajectory, live.agent
    graph, state = agent.graph, trajectory.state
    limit, wall = on_entry(graph, trajectory, agent.machine.spends[state], now)
    if limit is not None and trajectory.time_up is None:
        if not trajectory.visit_events:  # else its handler had begun before an interruption, or this is said already
            live.emit(Refused(at=now))
        return Outcome(Trigger.LIMIT_REACHED, limit=limit)
    # 2. The handler, until its outcome or its deadline.
    ctx, outcome = HandlerContext(live), None
    spec, warn = ctx.spec, partial(_warn_of_ignored_cancellation, trajectory)
    try:
        try:
            if trajectory.time_up is None:
                with Deadline(spec.timeout, None if wall == float("inf") else wall, unheard=warn) as ctx.deadline:
                    if spec.prompt is not None or spec.reset:
                        await ctx.enter()
                    work = handler.run(trajectory, ctx)
                    outcome = await (
                        work if type(handler).__module__ == built_in.__name__ else _watched(live, handler, work)
                    )
                if outcome is None and ctx.deadline.expired:
                    live.emit(TimedOut(at=ctx.clock(), walled=ctx.deadline.walled))
            if (expiry := trajectory.time_up) is not None:  # just now, or before an interruption
                handler.timed_out(trajectory, ctx)
                if expiry.walled:
                    return Outcome(Trigger.LIMIT_REACHED, limit=LimitName.WALL_SECONDS)
                return Outcome(Trigger.TIMED_OUT, blame=class_of_timeout(agent.machine.spends[state]))
        finally:
            await ctx.close()
    # 3. What it raised fails this trajectory alone; only a cancellation from outside is raised again.
    except Exception as error:
        return _outcome_of(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a handler that ends itself, or calls sys.exit, ends its own trajectory alone
        cancelled = isinstance(error, asyncio.CancelledError) and being_cancelled()
        if cancelled or (isinstance(error, GeneratorExit) and not runs_in(task)):  # or the task is thrown away
            raise
        return _outcome_of(error)
    if not isinstance(outcome, Outcome) or outcome.trigger not in handler.triggers:
        declared = ", ".join(handler.triggers)
        return Outcome(Trigger.FAILED, error="UndeclaredOutcome", detail=f"{outcome!r} is not one of: {declared}")
    return outcome


def _watched(live: ActiveTrajectory, handler: State, work: Coroutine[object, object, Outcome]) -> Awaitable[Outcome]:
    """Return the work of a user's own handler, traced, and watched: it may block the loop."""
    if live.trace is not None:
        key = visit_key(live.trajectory.transitions, live.trajectory.resumptions)
        work = within(live.trace.parent(key), work)
    return watch_steps(work, partial(_warn_of_blocking, type(handler), live.trajectory))


def _warn_of_blocking(handler: type[State], trajectory: Trajectory, seconds: float) -> None:
    level = logging.INFO if handler in _logged else logging.WARNING  # only the first of a kind is a warning
    _logged.add(handler)
    logger.log(
        level,
        "the handler of '%s' kept the event loop for %.1f s (trajectory %s), and all else waited; use a thread",
        trajectory.state, seconds, trajectory.trajectory_id,
    )  # fmt: skip


def _warn_of_ignored_cancellation(trajectory: Trajectory) -> None:
    logger.warning(
        "the handler of '%s' ignores its cancellation (trajectory %s, %g s so far), so it cannot be ended",
        trajectory.state, trajectory.trajectory_id, PATIENCE,
    )  # fmt: skip


def _outcome_of(error: BaseException) -> Outcome:
    error = single(error)
    if isinstance(error, LimitReached):
        return Outcome(Trigger.LIMIT_REACHED, limit=error.limit, detail=error.detail)
    if type(error) is RuntimeError and isinstance(error.__cause__, SystemExit | GeneratorExit | KeyboardInterrupt):
        error = error.__cause__  # what an interaction raised, as `invoke` hands it on
    kind = error.kind if isinstance(error, EngineError) else None
    name = kind or type(error).__name__
    return Outcome(Trigger.FAILED, error=name, detail=describe(error), blame=class_of(error))
