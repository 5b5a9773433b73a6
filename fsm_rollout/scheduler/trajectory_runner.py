"""Running one trajectory: visit after visit, until a transition leads to a final state.

Invariant: a visit only has an outcome, and the machine alone says which state comes next. What the trajectory holds
open is closed when it stops, unless it stays open to go on in this process.

The order in which limits and timeouts are checked is that of :mod:`fsm_rollout.agent.limits`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from weakref import WeakSet

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.handlers import load_handler
from fsm_rollout.agent.limits import LimitReached, reached_on_entry, remaining
from fsm_rollout.concurrency.cancellation import being_cancelled, runs_in
from fsm_rollout.concurrency.deadline import PATIENCE, Deadline
from fsm_rollout.concurrency.step_timing import watch_steps
from fsm_rollout.engines.client import Client
from fsm_rollout.errors import ConfigError, EngineError, describe, single
from fsm_rollout.scheduler.failure_policy import Failures, class_of, class_of_timeout
from fsm_rollout.states import built_in
from fsm_rollout.states.active_trajectory import ActiveTrajectory
from fsm_rollout.states.base import State
from fsm_rollout.states.bound_agent import BoundAgent
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.trajectory.enums import LimitName, Trigger
from fsm_rollout.trajectory.events import TimedOut
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

_logged: WeakSet[type[State]] = WeakSet()  # handlers of which a warning was logged


class RunnableAgent(BoundAgent):
    """A bound agent with one handler per working state: all that the trajectories of one agent share.

    Raises:
        ConfigError: a handler cannot be built, or as :class:`BoundAgent`.
    """

    def __init__(
        self, graph: AgentGraph, clients: Mapping[str, Client], sampling: Sampling, failures: Failures
    ) -> None:
        self.handlers: dict[str, State] = {}
        for state in graph.working_states:
            name = graph.handler_of(state)
            handler = load_handler(name)
            try:
                self.handlers[state] = handler(state, graph.states[state])
            except Exception as error:  # a constructor of the user's
                raise ConfigError(
                    f"agent '{graph.agent}': the handler of '{state}' ({name}) cannot be built: "
                    f"{type(error).__name__}: {error}"
                ) from error
        ending = ("end", "stop")
        super().__init__(
            graph,
            clients,
            sampling,
            end_on_tool_failure=failures.tool.do in ending,
            end_on_bad_call=failures.policy.do == "end",
        )
        if failures.tool.do == "retry":
            self.toolbox.attempts, self.toolbox.first_pause = failures.tool.attempts, failures.tool.backoff


async def run_trajectory(live: ActiveTrajectory, handlers: Mapping[str, State]) -> None:
    """Visit states until a transition leads to a final one; cancellation ends (or suspends) the trajectory."""
    trajectory, machine = live.trajectory, live.agent.machine
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    try:
        if trajectory.exit is not None:
            live.end_if_final()  # an interruption may have come between the last transition and the end
        now = loop.time()
        while trajectory.stop_reason is None and live.stop is None:
            outcome = await _visit(live, handlers[trajectory.state], now, task)
            now = loop.time()
            if live.stop is None:  # else the handler swallowed the cancellation
                machine.fire(trajectory, outcome, at=now, emit=live.emit)
                if trajectory.exit is not None:
                    live.end_if_final()
        if live.stop is not None:
            live.stop_now(live.stop)
    except asyncio.CancelledError:
        live.stop_cancelled()
        raise
    finally:
        if not live.stays_open:
            await live.close()


async def _visit(live: ActiveTrajectory, handler: State, now: float, task: asyncio.Task[object] | None) -> Outcome:
    """Run the present state's handler under its limits and timeouts, and return its outcome.

    ``now`` is the loop's time, and ``task`` the present task.
    """
    # 1. Limits that are reached on entry. (A visit that timed out before an interruption has passed them.)
    trajectory, agent = live.trajectory, live.agent
    graph, state = agent.graph, trajectory.state
    wall = remaining(graph, trajectory, LimitName.WALL_SECONDS, trajectory.elapsed(now))
    limit = reached_on_entry(graph, trajectory, agent.machine.spends[state], wall)
    if limit is not None and trajectory.time_up is None:
        return Outcome(Trigger.LIMIT_REACHED, limit=limit)
    # 2. The handler, until its outcome or its deadline.
    warn = partial(_warn_of_ignored_cancellation, trajectory)
    deadline = Deadline(graph.states[state].timeout, None if wall == float("inf") else wall, unheard=warn)
    ctx = HandlerContext(live, deadline)
    try:
        try:
            outcome = await _run_handler(live, handler, ctx) if trajectory.time_up is None else None
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


async def _run_handler(live: ActiveTrajectory, handler: State, ctx: HandlerContext) -> Outcome | None:
    """Run a handler; its outcome is ``None`` when its time is up. A user's own is watched: it may block the loop."""
    try:
        async with ctx.deadline:
            if ctx.spec.prompt is not None or ctx.spec.reset:
                await ctx.enter()
            work = handler.run(live.trajectory, ctx)
            if type(handler).__module__ == built_in.__name__:
                return await work
            return await watch_steps(work, partial(_warn_of_blocking, type(handler), live.trajectory))
    except TimeoutError:
        if not ctx.deadline.expired:
            raise  # the handler's own
        live.emit(TimedOut(at=ctx.clock(), walled=ctx.deadline.walled))
        return None


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
