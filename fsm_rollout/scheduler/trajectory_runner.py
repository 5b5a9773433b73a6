"""Driving one trajectory: visit after visit, until a row leads to a final state.

Invariant: a visit only has an outcome, and the machine alone says which state comes next. However a trajectory is
stopped, it either has its one stop reason afterwards or is suspended, and what it holds open is closed (unless it is
set aside to go on in this process).

The order in which limits and timeouts are checked is that of :mod:`fsm_rollout.agent.limits`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from time import monotonic
from types import coroutine
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from fsm_rollout.agent.limits import LimitReached, reached_on_entry, remaining
from fsm_rollout.concurrency.deadline import PATIENCE, Deadline, being_cancelled, runs_in
from fsm_rollout.errors import EngineError, describe, single
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.trajectory.events import Ended, Suspended, TimedOut
from fsm_rollout.trajectory.trajectory import Outcome

if TYPE_CHECKING:
    from fsm_rollout.scheduler.live import ActiveTrajectory
    from fsm_rollout.states import State

logger = logging.getLogger(__name__)
T = TypeVar("T")

BLOCKING_SECONDS = 2.0
"""How long one step of a handler may keep the event loop before that is worth a word."""

_told: WeakSet[type[State]] = WeakSet()
"""Handlers that the log has named."""


async def drive(live: ActiveTrajectory) -> None:
    """Visit state after state until a row leads to a final one; cancellation ends (or suspends) the trajectory."""
    trajectory, machine = live.trajectory, live.program.machine
    loop = asyncio.get_running_loop()
    try:
        _end_if_final(live)  # an interruption may have come between the last row and the end
        while not trajectory.ended:
            outcome = await _visit(live)
            if live.stop is not None:  # the handler let the cancellation pass unheard
                halt(live, live.stop)
                break
            machine.fire(trajectory, outcome, at=loop.time(), emit=live.emit)
            _end_if_final(live)
    except asyncio.CancelledError:
        halt(live, live.cancelled_as)
        raise
    finally:
        if trajectory.ended or not live.keep:
            await live.close()


def halt(live: ActiveTrajectory, stop: Outcome | str) -> None:
    """End a trajectory with an outcome, or set it aside for a reason."""
    if live.trajectory.ended:
        return
    now = asyncio.get_running_loop().time()
    if isinstance(stop, str):
        live.emit(Suspended(at=now, reason=stop))
    else:
        live.program.machine.fire(live.trajectory, stop, at=now, emit=live.emit)
        _end_if_final(live)


def _end_if_final(live: ActiveTrajectory) -> None:
    trajectory = live.trajectory
    if trajectory.exit is not None and not trajectory.ended:
        now = asyncio.get_running_loop().time()
        live.emit(Ended(at=now, stop_reason=trajectory.exit.stop_reason or "", detail=trajectory.exit.detail))


async def _visit(live: ActiveTrajectory) -> Outcome:
    """Run the present state's handler under its limits and timeouts, and return how it came out."""
    trajectory, program = live.trajectory, live.program
    state, now, task = trajectory.state, asyncio.get_running_loop().time(), asyncio.current_task()
    limit = reached_on_entry(program.graph, trajectory, program.machine.spends[state], now)
    if limit is not None and trajectory.time_up is None:
        return Outcome("limit_reached", limit=limit)
    handler = program.handlers[state]
    wall = remaining(program.graph, trajectory, "wall_seconds", trajectory.elapsed(now))
    timeout = program.graph.states[state].timeout
    deadline = Deadline(timeout, None if wall == float("inf") else wall, unheard=partial(_unheard, live))
    ctx = HandlerContext(live, deadline)
    try:
        try:
            outcome = await _run(live, ctx, deadline) if trajectory.time_up is None else None
            if (up := trajectory.time_up) is not None:  # just now, or before an interruption
                handler.timed_out(trajectory, ctx)
                return Outcome("limit_reached", limit="wall_seconds") if up.walled else Outcome("timed_out")
        finally:
            await ctx.close()
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
        return Outcome("failed", error="UndeclaredOutcome", detail=f"{outcome!r} is not one of: {declared}")
    return outcome


async def _run(live: ActiveTrajectory, ctx: HandlerContext, deadline: Deadline) -> Outcome | None:
    """Run the present state's handler; its outcome is ``None`` when its time is up."""
    try:
        async with deadline:
            ctx.enter()
            work = live.program.handlers[ctx.state].run(live.trajectory, ctx)
            own = ":" in live.program.graph.handler_of(ctx.state)
            return await (_in_steps(work, partial(_blocked, live)) if own else work)
    except TimeoutError:
        if not deadline.expired:
            raise  # the handler's own
        live.emit(TimedOut(at=ctx.clock(), walled=deadline.walled))
        return None


@coroutine
def _in_steps(work: Coroutine[Any, Any, T], blocked: Callable[[float], None]) -> Generator[Any, Any, T]:
    """Await ``work``, and tell of a step in which it kept the event loop to itself for long."""
    step: Callable[[], Any] = partial(work.send, None)
    while True:
        began = monotonic()
        try:
            waits_for = step()
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            if (seconds := monotonic() - began) > BLOCKING_SECONDS:
                blocked(seconds)
        try:
            step = partial(work.send, (yield waits_for))
        except BaseException as error:
            step = partial(work.throw, error)


def _blocked(live: ActiveTrajectory, seconds: float) -> None:
    handler = type(live.program.handlers[live.trajectory.state])
    level = logging.INFO if handler in _told else logging.WARNING  # of a thousand alike, the first
    _told.add(handler)
    logger.log(
        level,
        "the handler of '%s' kept the event loop for %.1f s (trajectory %s), and all else waited; use a thread",
        live.trajectory.state, seconds, live.trajectory.trajectory_id,
    )  # fmt: skip


def _unheard(live: ActiveTrajectory) -> None:
    logger.warning(
        "the handler of '%s' ignores its cancellation (trajectory %s, %g s so far), so it cannot be ended",
        live.trajectory.state, live.trajectory.trajectory_id, PATIENCE,
    )  # fmt: skip


def _outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a visit that raised."""
    error = single(error)
    if isinstance(error, LimitReached):
        return Outcome("limit_reached", limit=error.limit)
    if type(error) is RuntimeError and isinstance(error.__cause__, SystemExit | GeneratorExit | KeyboardInterrupt):
        error = error.__cause__  # what an interaction raised, as `invoke` hands it on
    kind = error.kind if isinstance(error, EngineError) else None
    return Outcome("failed", error=kind or type(error).__name__, detail=describe(error))
