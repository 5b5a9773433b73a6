"""What users' handlers and predicates are held to in drawn runs; law 0, as the fault is their own.

Invariant: a handler is blamed only for what it did itself. What the drawn world did to it (failures of the engine,
tools and users; being cancelled) is no fault, so what may be the world's doing is looked at again in a calm one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.errors import PromptTooLong, RolloutError
from fsm_rollout.testing.simulation.laws import LawBroken
from fsm_rollout.testing.simulation.simulate import Simulation
from fsm_rollout.testing.simulation.visits import Visit
from fsm_rollout.trajectory.events import Transitioned
from fsm_rollout.trajectory.reasons import Trigger

DRAWN_FAILURES = frozenset({"Overload", "EngineError", "RuntimeError"})
"""What plans let engines and users raise."""


def handlers_stay(run: Simulation) -> None:
    """Hold handlers to this: they do not try to end the program."""
    for visit in run.visits:
        if isinstance(visit.outcome, SystemExit):
            raise _blame(visit, f"raised SystemExit, which fails its trajectory alone\n  at {visit.where}")


def handlers_behave(run: Simulation) -> None:
    """Hold handlers to this: they return what they declare, let cancellation pass, and fail only where a row is."""
    for visit in run.visits:
        if visit.cancelled and not isinstance(visit.outcome, BaseException):
            went_on = f"was told to stop and went on: it returned {_trigger(visit)!r}"
            advice = "instead of letting the cancellation pass; catch Exception, not CancelledError, or raise it again"
            raise _blame(visit, f"{went_on} {advice}")
        if visit.undeclared:
            undeclared = f"returned {_trigger(visit)!r}, an undeclared outcome"
            raise _blame(visit, f"{undeclared}; it declares triggers = {visit.declared!r}")
    for visit in _raised(run):
        if not isinstance(visit.outcome, RolloutError | TimeoutError):
            raise _failed(visit)
    for name, events in run.events.items():
        for event in events:
            if isinstance(event, Transitioned) and str(event.detail).startswith("predicate '"):
                raise LawBroken(0, f"a predicate raised: {event.detail}", trajectory_id=name)


def may_be_the_worlds(run: Simulation) -> bool:
    """Say whether a handler was stopped, or raised what a failing world would make it raise."""
    return any(visit.stopped for visit in run.visits) or any(_raised(run))


def handlers_manage(calm: Simulation) -> None:
    """Hold handlers to this in a world where nothing fails and all is at once: they return, by themselves."""
    for visit in calm.visits:
        if visit.stopped:
            raise _blame(
                visit,
                "never returns by itself: it was stopped by its timeout, though the engine, the tools and the users "
                f"answered at once{f'{chr(10)}  it waits at {visit.where}' if visit.where else ''}",
            )
    for visit in _raised(calm):
        raise _failed(visit)


def fails_as_drawn(run: Simulation) -> None:
    """Hold agents to this: a trajectory fails only by what the plan, or a handler that may, has raised."""
    raised = {type(visit.outcome).__name__ for visit in run.visits}
    for trajectory in run.trajectories:
        failed, _, kind = str(trajectory.stop_reason).partition(":")
        if failed == "failed" and kind not in DRAWN_FAILURES | raised:
            raise LawBroken(
                0,
                f"it failed, though nothing was drawn to fail: {kind}: {trajectory.detail}",
                trajectory_id=trajectory.trajectory_id,
            )


def _raised(run: Simulation) -> Iterator[Visit]:
    """Yield the visits that raised something of their own where no row takes ``failed``."""
    for visit in run.visits:
        error = visit.outcome
        own = isinstance(error, asyncio.CancelledError) and not visit.cancelled
        its_own = own or (isinstance(error, Exception) and not isinstance(error, PromptTooLong))
        if its_own and not _routes_failures(run.graph, visit.state):
            yield visit


def _routes_failures(graph: AgentGraph, state: str) -> bool:
    return state in graph.states and any(graph.rows_of(state, Trigger.FAILED))


def _failed(visit: Visit) -> LawBroken:
    error = visit.outcome
    said = f": {error}" if str(error) else ""
    return _blame(
        visit,
        f"raised {type(error).__name__}{said}\n  at {visit.where}\n"
        "  no row takes 'failed' there: handle it in the handler, or write a row",
    )


def _trigger(visit: Visit) -> object:
    return getattr(visit.outcome, "trigger", visit.outcome)


def _blame(visit: Visit, what: str) -> LawBroken:
    return LawBroken(0, f"the handler of '{visit.state}' ({visit.handler}) {what}", trajectory_id=visit.trajectory_id)
