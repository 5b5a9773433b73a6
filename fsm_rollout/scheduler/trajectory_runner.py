"""Running one trajectory: visit after visit, until a row leads to a final state.

Invariant: a visit only has an outcome, and the machine alone says which state comes next. However a trajectory is
stopped, it either has its one stop reason afterwards or is suspended, and what it holds open is closed (unless it is
kept open, to go on in this process).

The order in which limits and timeouts are checked is that of :mod:`fsm_rollout.agent.limits`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

from fsm_rollout.agent.limits import LimitReached, reached_on_entry, remaining
from fsm_rollout.concurrency.cancellation import being_cancelled, runs_in
from fsm_rollout.concurrency.deadline import PATIENCE, Deadline
from fsm_rollout.concurrency.steps import watch_steps
from fsm_rollout.errors import EngineError, GlueMismatchError, describe, single
from fsm_rollout.states.base import Program, State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.states.resources import Record, TrajectoryResources
from fsm_rollout.tools import RunAgent
from fsm_rollout.trajectory.events import Ended, Suspended, TimedOut
from fsm_rollout.trajectory.reasons import LimitName, Trigger
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory

logger = logging.getLogger(__name__)

CUT_OFF = "the run was interrupted"
"""The detail of a sub-agent's trajectory that ended with its caller's interruption, so that its call is made again."""

_logged: WeakSet[type[State]] = WeakSet()
"""Handlers of which a warning was logged."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """A stop after which the trajectory can go on."""

    reason: str


Stop = Outcome | Suspension
"""How a trajectory is stopped from outside: it ends with an outcome, or is suspended."""
CARRIED = Suspension("carried")
"""How one is stopped when its run has reached its target; its tools and interactions stay open."""
INTERRUPTED = Suspension("interrupted")
"""How one is stopped when its run is closed or fails, and there is a journal from which it can go on."""


class ActiveTrajectory(TrajectoryResources):
    """A trajectory that runs or can go on at once, with what it holds open and how it is to be stopped."""

    program: Program

    __slots__ = ("caller", "restart", "stop", "task")

    def __init__(
        self,
        trajectory: Trajectory,
        program: Program,
        run_agent: RunAgent,
        record: Record,
        report_mismatch: Callable[[GlueMismatchError], None],
        caller: ActiveTrajectory | None = None,
    ) -> None:
        super().__init__(trajectory, program, run_agent, record, report_mismatch)
        self.caller = caller
        """Whom it serves, if it is a sub-agent's."""
        self.task: asyncio.Task[None] | None = None
        """What runs it."""
        self.stop: Stop | None = None
        """How it is being stopped."""
        self.restart = False
        """Whether a new attempt takes its place when it has been stopped."""

    @property
    def stays_open(self) -> bool:
        """Whether its tools and interactions stay open, because it is to go on in this process."""
        return self.stop is CARRIED and not self.trajectory.ended

    def request_stop(self, stop: Stop) -> None:
        """Have it stopped soon, unless it is being stopped already or has ended."""
        if self.stop is None and not self.trajectory.ended:
            self.stop = stop
            if self.task is not None:
                self.task.cancel()

    def halt(self, stop: Stop) -> None:
        """End or suspend it now, unless it has ended; nothing of it may run."""
        if self.trajectory.ended:
            return
        now = asyncio.get_running_loop().time()
        if isinstance(stop, Suspension):
            self.emit(Suspended(at=now, reason=stop.reason))
        else:
            self.program.machine.fire(self.trajectory, stop, at=now, emit=self.emit, routed=False)
            self.end_if_final()

    def fail(self, outcome: Outcome) -> None:
        """End it as failed, however else it is being stopped, and also if it has ended."""
        if self.trajectory.ended:
            now = asyncio.get_running_loop().time()
            self.emit(Ended(at=now, stop_reason=outcome.stop_reason, detail=outcome.detail))
            return
        root = self
        root.stop = outcome
        while root.caller is not None:
            root = root.caller
            root.stop = outcome
        if root.task is None:
            root.halt(outcome)
        else:
            root.task.cancel()

    def end_if_final(self) -> None:
        """Give it its stop reason if it stands in a final state."""
        trajectory = self.trajectory
        if trajectory.exit is not None and not trajectory.ended:
            now = asyncio.get_running_loop().time()
            self.emit(Ended(at=now, stop_reason=trajectory.exit.stop_reason or "", detail=trajectory.exit.detail))

    @property
    def stop_when_cancelled(self) -> Stop:
        """What a cancellation means: its own stop; else it comes from its caller, who may have been interrupted."""
        caller = self.caller
        while caller is not None and caller.stop is None:
            caller = caller.caller
        return self.stop or Outcome(Trigger.CANCELLED, detail=None if caller is None else CUT_OFF)


async def run_trajectory(live: ActiveTrajectory) -> None:
    """Visit state after state until a row leads to a final one; cancellation ends (or suspends) the trajectory."""
    trajectory, machine = live.trajectory, live.program.machine
    loop = asyncio.get_running_loop()
    try:
        live.end_if_final()  # an interruption may have come between the last row and the end
        while not trajectory.ended and live.stop is None:
            outcome = await _visit(live)
            if live.stop is None:  # else the handler swallowed the cancellation
                machine.fire(trajectory, outcome, at=loop.time(), emit=live.emit)
                live.end_if_final()
        if live.stop is not None:
            live.halt(live.stop)
    except asyncio.CancelledError:
        live.halt(live.stop_when_cancelled)
        raise
    finally:
        if not live.stays_open:
            await live.close()


async def _visit(live: ActiveTrajectory) -> Outcome:
    """Run the present state's handler under its limits and timeouts, and return how it came out."""
    # 1. Limits that are reached on entry; a visit whose time was up before an interruption has passed them.
    trajectory, program = live.trajectory, live.program
    state, now, task = trajectory.state, asyncio.get_running_loop().time(), asyncio.current_task()
    limit = reached_on_entry(program.graph, trajectory, program.machine.spends[state], now)
    if limit is not None and trajectory.time_up is None:
        return Outcome(Trigger.LIMIT_REACHED, limit=limit)
    # 2. The handler, until its outcome or its deadline.
    handler = program.handlers[state]
    wall = remaining(program.graph, trajectory, LimitName.WALL_SECONDS, trajectory.elapsed(now))
    timeout = program.graph.states[state].timeout
    ignored = partial(_warn_of_ignored_cancellation, trajectory)
    deadline = Deadline(timeout, None if wall == float("inf") else wall, unheard=ignored)
    ctx = HandlerContext(live, deadline)
    try:
        try:
            outcome = await _run_handler(live, ctx, deadline) if trajectory.time_up is None else None
            if (up := trajectory.time_up) is not None:  # just now, or before an interruption
                handler.timed_out(trajectory, ctx)
                if up.walled:
                    return Outcome(Trigger.LIMIT_REACHED, limit=LimitName.WALL_SECONDS)
                return Outcome(Trigger.TIMED_OUT)
        finally:
            await ctx.close()
    # 3. What it raised fails this trajectory alone; only a cancellation from outside goes on.
    except Exception as error:
        return _outcome_of(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a handler that ends itself, or calls sys.exit, ends its own trajectory alone
        cancelled = isinstance(error, asyncio.CancelledError) and being_cancelled()
        if cancelled or (isinstance(error, GeneratorExit) and not runs_in(task)):
            raise
        return _outcome_of(error)
    if not isinstance(outcome, Outcome) or outcome.trigger not in handler.triggers:
        declared = ", ".join(handler.triggers)
        return Outcome(Trigger.FAILED, error="UndeclaredOutcome", detail=f"{outcome!r} is not one of: {declared}")
    return outcome


async def _run_handler(live: ActiveTrajectory, ctx: HandlerContext, deadline: Deadline) -> Outcome | None:
    """Run the present state's handler; its outcome is ``None`` when its time is up."""
    try:
        async with deadline:
            ctx.enter()
            handler = live.program.handlers[ctx.state]
            work = handler.run(live.trajectory, ctx)
            if ":" not in live.program.graph.handler_of(ctx.state):
                return await work
            return await watch_steps(work, partial(_warn_of_blocking, type(handler), live.trajectory))
    except TimeoutError:
        if not deadline.expired:
            raise  # the handler's own
        live.emit(TimedOut(at=ctx.clock(), walled=deadline.walled))
        return None


def _warn_of_blocking(handler: type[State], trajectory: Trajectory, seconds: float) -> None:
    level = logging.INFO if handler in _logged else logging.WARNING  # of a thousand alike, the first
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
    """Return the outcome of a visit that raised."""
    error = single(error)
    if isinstance(error, LimitReached):
        return Outcome(Trigger.LIMIT_REACHED, limit=error.limit)
    if type(error) is RuntimeError and isinstance(error.__cause__, SystemExit | GeneratorExit | KeyboardInterrupt):
        error = error.__cause__  # what an interaction raised, as `invoke` hands it on
    kind = error.kind if isinstance(error, EngineError) else None
    return Outcome(Trigger.FAILED, error=kind or type(error).__name__, detail=describe(error))
