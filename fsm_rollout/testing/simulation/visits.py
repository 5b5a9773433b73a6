"""The visits of a handler under test, seen from outside: step by step, and what each came to.

Invariant: a watched handler does exactly what it does unwatched.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakSet

from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.concurrency.cancellation import being_cancelled
from fsm_rollout.concurrency.step_timing import watch_steps
from fsm_rollout.errors import place_of
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing.simulation.source_lines import described, tasks_of_visit
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory

T = TypeVar("T")

# The events that no handler may emit.
_SCHEDULERS_OWN = (events.Prompted, events.Transitioned, events.Suspended, events.Resumed, events.Ended)


class Stepped(Generic[T]):
    """Awaits a coroutine step by step, and calls ``cancel`` when it has waited for the ``cancel_at``-th time, from 1.

    ``ended_by`` is the exception that the coroutine let out, ``None`` when it returned.
    """

    def __init__(
        self,
        coroutine: Coroutine[object, object, T],
        cancel_at: int | None = None,
        cancel: Callable[[], object] = lambda: None,
    ) -> None:
        self._coroutine, self.cancel_at, self._cancel, self._waited = coroutine, cancel_at, cancel, 0
        self.cancelled = False
        self.busiest = 0.0  # the CPU seconds of the longest step
        self.seconds = 0.0  # the loop's seconds that it took
        self.ended_by: BaseException | None = None

    def __await__(self) -> Generator[object, None, T]:
        return self._run().__await__()

    async def _run(self) -> T:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            return await watch_steps(
                self._coroutine, self._took, seconds=0.0, clock=time.thread_time, waits=self._waits
            )
        except BaseException as error:
            self.ended_by = error
            raise
        finally:
            self.seconds = clock() - started

    def _took(self, seconds: float) -> None:
        self.busiest = max(self.busiest, seconds)

    def _waits(self) -> None:
        self._waited += 1
        if self._waited == self.cancel_at:
            self.cancelled = True
            self._cancel()

    @property
    def let_cancellation_out(self) -> bool:
        """Whether the coroutine let its cancellation out, where there was one."""
        return not self.cancelled or isinstance(self.ended_by, asyncio.CancelledError)


@dataclass(slots=True)
class HandlerVisit:
    """One visit of a handler: how it came out."""

    trajectory_id: str
    state: str
    handler: str
    declared: tuple[str, ...]
    steps: Stepped[Outcome]
    outcome: object = None  # what it returned, or the exception that it raised
    where: str = ""  # where it was when it was stopped, or where it raised: `file:line, in function`
    cancelled: bool = False  # whether it had been told to stop: by a timeout, or because its trajectory was
    reached: list[str] = field(default_factory=list)  # the limits that it was told are reached
    forbidden: list[str] = field(default_factory=list)  # the scheduler's events that it has emitted
    running: list[str] = field(default_factory=list)  # the tasks that it started, and that had not ended with it
    changed: list[str] = field(default_factory=list)  # what it has changed of what it keeps for all trajectories

    @property
    def stopped(self) -> bool:
        """Whether it was told to stop, and did."""
        return self.cancelled and isinstance(self.outcome, asyncio.CancelledError)

    def faults(self) -> Iterator[tuple[int, str]]:
        """Yield what it did wrong, each with the number of the promise in ``check_state``."""
        outcome, returned = self.outcome, not isinstance(self.outcome, BaseException)
        if self.running:
            yield 7, f"returned while this task was running: {self.running[0]}; await it"
        if not self.steps.let_cancellation_out or (self.cancelled and returned):
            at = f" at its await number {self.steps.cancel_at}" if self.steps.cancelled else ""
            went_on = f"and went on{f': it returned {outcome!r}' if returned else ''}"
            yield 5, f"was cancelled{at}, {went_on}; catch Exception, not CancelledError, or raise it again"
        if self.forbidden:
            yield 8, f"emitted {', '.join(self.forbidden)}, which the scheduler emits; return an outcome"
        if self.reached and returned:
            yield 9, f"swallowed LimitReached ('{', '.join(self.reached)}') and returned {outcome}; let it pass"
        if returned and not (isinstance(outcome, Outcome) and outcome.trigger in self.declared):
            yield 2, f"returned {outcome!r}, which it does not declare; it declares: {', '.join(self.declared)}"
        if self.changed:
            all_share = f"changed {', '.join(self.changed)}, which all trajectories share"
            yield 3, f"{all_share}; keep it in the trajectory, as events"


Steps = Callable[[Coroutine[object, object, Outcome], Trajectory], Stepped[Outcome]]


def watch_visits(
    handler: State,
    visits: list[HandlerVisit],
    step: Steps = lambda visit, trajectory: Stepped(visit),
    kept: Callable[[State], Mapping[str, object]] = lambda handler: {},
) -> None:
    """Note each visit of a handler in a list; ``step`` makes its steps, ``kept`` says what it keeps beside them."""
    run = handler.run
    name = f"{type(handler).__module__}:{type(handler).__qualname__}"

    async def watched(trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        # 1. Before: what it keeps.
        before, tasks = kept(handler), WeakSet[asyncio.Task[object]]()
        steps = step(run(trajectory, ctx), trajectory)
        visit = HandlerVisit(trajectory.trajectory_id, handler.name, name, tuple(handler.triggers), steps)
        _listen(ctx, visit)
        # 2. The visit.
        token = tasks_of_visit.set(tasks)
        try:
            visit.outcome = outcome = await steps
            return outcome
        except BaseException as error:
            visit.outcome, visit.where = error, place_of(error)
            raise
        finally:
            # 3. After: what still runs, and what it keeps now.
            tasks_of_visit.reset(token)
            after, visit.cancelled = kept(handler), being_cancelled()
            visit.running = sorted(described(task) for task in tasks if not task.done())
            visit.changed = sorted(key for key in after.keys() | before.keys() if after.get(key) != before.get(key))
            visits.append(visit)

    handler.run = watched  # type: ignore[method-assign]


def _listen(ctx: HandlerContext, visit: HandlerVisit) -> None:
    """Note the limits that a visit is told are reached, and the scheduler's events that it emits."""

    @contextmanager
    def noting() -> Iterator[None]:
        try:
            yield
        except LimitReached as error:
            visit.reached.append(error.limit)
            raise

    generate, emit = ctx.generate, ctx.emit

    async def generating(context: str, sampling: Sampling | None = None) -> events.Generated:
        with noting():
            return await generate(context, sampling)

    def emitting(event: AnyEvent) -> None:
        if isinstance(event, _SCHEDULERS_OWN):
            visit.forbidden.append(type(event).__name__)
        emit(event)

    ctx.generate, ctx.emit = generating, emitting  # type: ignore[method-assign]
    ctx.check, ctx.charge = noting()(ctx.check), noting()(ctx.charge)  # type: ignore[method-assign]


def held_by(handler: State) -> Mapping[str, object]:
    """Return what a handler holds, on itself and on its class, by value where that can be had."""
    cls = type(handler)
    attributes = {f"self.{key}": value for key, value in vars(handler).items()}
    shared = vars(cls).items()
    attributes |= {f"{cls.__name__}.{key}": v for key, v in shared if not key.startswith("__") and not callable(v)}
    state: dict[str, object] = {}
    for key, value in attributes.items():
        try:
            state[key] = pickle.dumps(value)
        except Exception:  # a client, a lock: only its identity can be told
            state[key] = id(value)
    return state
