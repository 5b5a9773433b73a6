"""Driving one trajectory: visit after visit, until a row leads to a final state.

Invariant: a visit only has an outcome, and the machine alone says which state comes next. However a trajectory is
stopped, it either has its one stop reason afterwards or is suspended, and what it holds open is closed (unless it is
set aside to go on in this process).

The order in which limits and timeouts are checked is that of :mod:`fsm_rollout.limits`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fsm_rollout.deadlines import Deadline, being_cancelled
from fsm_rollout.errors import EngineError, single
from fsm_rollout.events import Ended, Suspended
from fsm_rollout.limits import LimitReached, reached_on_entry, remaining
from fsm_rollout.trajectory import Outcome
from fsm_rollout.visit import Visit

if TYPE_CHECKING:
    from fsm_rollout.live import LiveTrajectory


async def drive(live: LiveTrajectory) -> None:
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
        halt(live, live.stop if live.stop is not None else Outcome("cancelled"))
        raise
    finally:
        if trajectory.ended or not live.keep:
            await live.close()


def halt(live: LiveTrajectory, stop: Outcome | str) -> None:
    """End a trajectory with an outcome, or set it aside for a reason."""
    if live.trajectory.ended:
        return
    now = asyncio.get_running_loop().time()
    if isinstance(stop, str):
        live.emit(Suspended(at=now, reason=stop))
    else:
        live.program.machine.fire(live.trajectory, stop, at=now, emit=live.emit)
        _end_if_final(live)


def _end_if_final(live: LiveTrajectory) -> None:
    trajectory = live.trajectory
    if trajectory.exit is not None and not trajectory.ended:
        now = asyncio.get_running_loop().time()
        live.emit(Ended(at=now, stop_reason=trajectory.exit.stop_reason or "", detail=trajectory.exit.detail))


async def _visit(live: LiveTrajectory) -> Outcome:
    """Run the present state's handler under its limits and timeouts, and return how it came out."""
    trajectory, program = live.trajectory, live.program
    state, now = trajectory.state, asyncio.get_running_loop().time()
    limit = reached_on_entry(program.graph, trajectory, program.machine.spends[state], now)
    if limit is not None:
        return Outcome("limit_reached", limit=limit)
    handler = program.handlers[state]
    wall = remaining(program.graph, trajectory, "wall_seconds", trajectory.elapsed(now))
    deadline = Deadline(program.graph.states[state].timeout, None if wall == float("inf") else wall)
    visit = Visit(live, deadline)
    try:
        try:
            async with deadline:
                visit.enter()
                outcome = await handler.run(trajectory, visit)
        except TimeoutError:
            if not deadline.expired:
                raise  # the handler's own
            handler.timed_out(trajectory, visit)
            return Outcome("limit_reached", limit="wall_seconds") if deadline.walled else Outcome("timed_out")
        finally:
            await visit.close()
    except Exception as error:
        return _outcome_of(error)
    except asyncio.CancelledError as error:
        if being_cancelled():
            raise
        return _outcome_of(error)  # raised by the handler itself, or by something that it waited for
    if not isinstance(outcome, Outcome) or outcome.trigger not in handler.triggers:
        declared = ", ".join(handler.triggers)
        return Outcome("failed", error="UndeclaredOutcome", detail=f"{outcome!r} is not one of: {declared}")
    return outcome


def _outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a visit that raised."""
    error = single(error)
    if isinstance(error, LimitReached):
        return Outcome("limit_reached", limit=error.limit)
    kind = error.kind if isinstance(error, EngineError) else None
    return Outcome("failed", error=kind or type(error).__name__, detail=str(error))
