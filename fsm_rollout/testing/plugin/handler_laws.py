"""What users' handlers and predicates are held to in drawn runs. It is reported as law 0: the fault is the user's.

Invariant: a handler is blamed only for what it did itself, and not for drawn failures of the engine, tools and users,
or for being cancelled. So what these may have caused is checked again in a run without them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.errors import PromptTooLong, RolloutError
from fsm_rollout.testing.simulation.laws import LawBroken
from fsm_rollout.testing.simulation.simulate import Simulation
from fsm_rollout.testing.simulation.visits import HandlerVisit
from fsm_rollout.trajectory.enums import Trigger
from fsm_rollout.trajectory.events import Transitioned

DRAWN_FAILURES = frozenset({"Overload", "EngineError", "RuntimeError"})  # what plans let engines and users raise


def handlers_stay(run: Simulation) -> None:
    """Hold handlers to this: they do not try to end the program."""
    for visit in run.visits:
        if isinstance(visit.outcome, SystemExit):
            raise _blame(visit, f"raised SystemExit, which fails its trajectory alone\n  at {visit.where}")


def handlers_behave(run: Simulation) -> None:
    """Hold handlers to this: they return what they declare, let cancellation pass, fail only where that is routed."""
    for visit in run.visits:
        for promise, what in visit.faults():
            if promise != 3:  # what it may keep shows in whether the schedule matters
                raise _blame(visit, what)
    for visit in _raised(run):
        if not isinstance(visit.outcome, RolloutError | TimeoutError):
            raise _failed(visit)
    for name, history in run.events.items():
        for event in history:
            if isinstance(event, Transitioned) and str(event.detail).startswith("predicate '"):
                raise LawBroken(0, f"a predicate raised: {event.detail}", trajectory_id=name)


def may_be_the_worlds(run: Simulation) -> bool:
    """Say whether a handler was stopped, or raised what a failing world would make it raise."""
    return any(visit.stopped for visit in run.visits) or any(_raised(run))


def handlers_manage(calm: Simulation) -> None:
    """Hold handlers to this in a world where nothing fails and all is at once: they return, by themselves."""
    for visit in calm.visits:
        if visit.stopped:
            never = "never returns by itself: it was stopped by its timeout"
            waits = f"\n  it waits at {visit.where}" if visit.where else ""
            raise _blame(visit, f"{never}, though the engine, the tools and the users answered at once{waits}")
    for visit in _raised(calm):
        raise _failed(visit)


def fails_as_drawn(run: Simulation) -> None:
    """Hold agents to this: a trajectory fails only by what the plan, or a handler that may, has raised."""
    raised = {type(visit.outcome).__name__ for visit in run.visits}
    for trajectory in run.trajectories:
        failed, _, kind = str(trajectory.stop_reason).partition(":")
        if failed == "failed" and kind not in DRAWN_FAILURES | raised:
            what = f"it failed, though nothing was drawn to fail: {kind}: {trajectory.detail}"
            raise LawBroken(0, what, trajectory_id=trajectory.trajectory_id)


def _raised(run: Simulation) -> Iterator[HandlerVisit]:
    """Yield the visits that raised something of their own where no transition takes ``failed``."""
    for visit in run.visits:
        error, graph = visit.outcome, run.graph
        its_fault = isinstance(error, asyncio.CancelledError) and not visit.cancelled
        its_fault = its_fault or (isinstance(error, Exception) and not isinstance(error, PromptTooLong | LimitReached))
        if its_fault and not (visit.state in graph.states and any(graph.rows_of(visit.state, Trigger.FAILED))):
            yield visit


def _failed(visit: HandlerVisit) -> LawBroken:
    error = visit.outcome
    what = f"raised {type(error).__name__}{f': {error}' if str(error) else ''}\n  at {visit.where}"
    return _blame(
        visit, f"{what}\n  no transition takes 'failed' there: handle it in the handler, or write a transition"
    )


def _blame(visit: HandlerVisit, what: str) -> LawBroken:
    return LawBroken(0, f"the handler of '{visit.state}' ({visit.handler}) {what}", trajectory_id=visit.trajectory_id)
