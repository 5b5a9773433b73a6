"""One run of a state handler under check: what is drawn for it, and how its visits are seen from outside.

Invariant: a handler that is watched does exactly what it does unwatched.
"""

from __future__ import annotations

import asyncio
import contextvars
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from hypothesis import strategies as st

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing.conformance.runner import ConformanceError, Stepped, Subject, demand_all
from fsm_rollout.testing.simulation.laws import Outline, outline
from fsm_rollout.testing.simulation.source_lines import described
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.settings import FrozenMap, Sampling
from fsm_rollout.trajectory.trajectory import Trajectory

CHECKED = "CHECKED"  # the state whose handler is under check
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": 2, "operator": "+", "right": 2}}\n</tool_call>'
_turns = st.builds(
    Turn,
    text=st.sampled_from(["The answer is 4.", "ACCEPT", "é 漢字 🙂", "", CALL, f"{CALL}\n{CALL}", CALL[:40]]),
    delay=st.sampled_from([0.0, 0.25, 2.0]),
    chunks=st.integers(1, 3),
)
_failures = st.sampled_from(
    [Turn(text="half", error="Overload: try later"), Turn(text="half", crash="gone"), Turn(text="half", hang=True)]
)
Says = st.SearchStrategy[tuple[Turn, ...]]
SAYS: Says = st.lists(_turns, min_size=1, max_size=4).map(tuple)
SAYS_OR_FAILS: Says = st.lists(_turns | _failures, min_size=1, max_size=4).map(tuple)


@dataclass(frozen=True)
class Story:
    """One run: what the engine says, how often what, and where the handler is interrupted."""

    says: tuple[Turn, ...]
    cancel_at: int | None = None  # the number of the await, of the first visit, at which it is cancelled
    suspend: bool = False  # set aside there, and resumed, instead of cancelled
    turns: int = 12  # the limit `assistant_turns`
    tokens: int | None = None  # the limit `response_tokens`
    hurry: bool = False  # the state's timeout is shorter than the engine takes for anything

    def __str__(self) -> str:
        parts = [f"the engine says {', '.join(repr(turn.model_dump(exclude_defaults=True)) for turn in self.says)}"]
        parts += [f"assistant_turns is {self.turns}"] if self.turns < 12 else []
        parts += [f"response_tokens is {self.tokens}"] if self.tokens is not None else []
        parts += ["the state's timeout is 0.125 s"] if self.hurry else []
        return "; ".join(parts)

    def changed(self, graph: AgentGraph) -> AgentGraph:
        """Return the agent with this run's limits and timeout."""
        update = {"assistant_turns": self.turns} | ({} if self.tokens is None else {"response_tokens": self.tokens})
        states = dict(graph.states)
        if self.hurry:
            states[CHECKED] = states[CHECKED].model_copy(update={"timeout": 0.125})
        limits = graph.limits.model_copy(update=update)
        return graph.model_copy(update={"limits": limits, "states": FrozenMap(states)})


# -- how a visit is seen ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """What was seen in one run."""

    story: Story
    visits: list[Stepped[Outcome]] = field(default_factory=list)
    broken: list[ConformanceError] = field(default_factory=list)  # what the visits broke, in order
    interrupt: Callable[[str], object] = lambda trajectory_id: None  # cancels a trajectory, or sets it aside
    events: dict[str, list[AnyEvent]] = field(default_factory=lambda: defaultdict(list))

    def outline(self, trajectory: Trajectory) -> Outline:
        """Return what must not depend on when things happened."""
        return outline(trajectory, self.events[trajectory.trajectory_id])


# The tasks that a visit started; not kept alive, so that asyncio complains about those that fail unheard.
_tasks_of_visit: contextvars.ContextVar[WeakSet[asyncio.Task[object]] | None]
_tasks_of_visit = contextvars.ContextVar("tasks of a visit", default=None)
# The events that no handler may emit.
_SCHEDULERS_OWN = (events.Prompted, events.Transitioned, events.Suspended, events.Resumed, events.Ended)
# Where tasks are started that serve several visits.
_SHARED_WORK = ("fsm_rollout/engines/", "fsm_rollout/tools/", "fsm_rollout/concurrency/")


def _listen(ctx: HandlerContext) -> tuple[list[str], list[str]]:
    """Return lists of the limits that a visit will be told are reached, and of the scheduler's events that it emits."""
    reached: list[str] = []
    forbidden: list[str] = []

    @contextmanager
    def noting() -> Iterator[None]:
        try:
            yield
        except LimitReached as error:
            reached.append(error.limit)
            raise

    generate, emit = ctx.generate, ctx.emit

    async def generating(context: str, sampling: Sampling | None = None) -> events.Generated:
        with noting():
            return await generate(context, sampling)

    def emitting(event: AnyEvent) -> None:
        if isinstance(event, _SCHEDULERS_OWN):
            forbidden.append(type(event).__name__)
        emit(event)

    ctx.generate, ctx.emit = generating, emitting  # type: ignore[method-assign]
    ctx.check, ctx.charge = noting()(ctx.check), noting()(ctx.charge)  # type: ignore[method-assign]
    return reached, forbidden


def _kept(handler: State) -> dict[str, object]:
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


def task_factory(loop: asyncio.AbstractEventLoop, work: Any, **kwargs: Any) -> asyncio.Task[Any]:
    """Make tasks as asyncio does, and note whose visit started them (not those that serve several visits)."""
    task: asyncio.Task[object] = asyncio.Task(work, loop=loop, **kwargs)
    started, code = _tasks_of_visit.get(), getattr(work, "cr_code", None)
    if started is not None and code is not None and not any(folder in code.co_filename for folder in _SHARED_WORK):
        started.add(task)
    return task


def watch(handler: State, run: Run, subject: Subject) -> None:
    """Look at each visit of a handler from outside; what it breaks is in :attr:`Run.broken`."""
    real_run, real_timed_out = handler.run, handler.timed_out

    async def watched(trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        # 1. Before: what it keeps, and whether this visit is to be interrupted.
        before, tasks = _kept(handler), WeakSet[asyncio.Task[object]]()
        cancel_at, interrupt = None if run.visits else run.story.cancel_at, run.interrupt
        visit = Stepped(real_run(trajectory, ctx), cancel_at, lambda: interrupt(trajectory.trajectory_id))
        run.visits.append(visit)
        reached, forbidden = _listen(ctx)
        # 2. The visit.
        token, outcome = _tasks_of_visit.set(tasks), None
        try:
            outcome = await visit
            return outcome
        finally:
            # 3. After: what still runs, what it keeps now, and what it came to.
            _tasks_of_visit.reset(token)
            after, raised = _kept(handler), visit.ended_by is not None
            running = sorted(described(task) for task in tasks if not task.done())
            changed = sorted(key for key in after.keys() | before.keys() if after.get(key) != before.get(key))
            declared = raised or (isinstance(outcome, Outcome) and outcome.trigger in handler.triggers)
            facts = (
                (not running, 7, f"returned while this task was running: {', '.join(running[:1])}; await it"),
                (visit.let_cancellation_out, 5, f"was cancelled at its await number {cancel_at}, and went on; "
                                 "let CancelledError pass"),
                (not forbidden, 8, f"emitted {', '.join(forbidden)}, which the scheduler emits; return an outcome"),
                (not reached or raised, 9, f"swallowed LimitReached ('{', '.join(reached)}') "
                                           f"and returned {outcome}; let it pass"),
                (declared, 2, f"returned {outcome!r}; it declares: {', '.join(handler.triggers)}"),
                (not changed, 3, f"changed {', '.join(changed)}, which all trajectories share; "
                                 "keep it in the trajectory, as events"),
            )  # fmt: skip
            try:
                subject.check_busy(visit)
                demand_all(subject.name, *facts)
            except ConformanceError as error:
                run.broken.append(error)

    def timed_out(trajectory: Trajectory, ctx: HandlerContext) -> None:
        try:
            real_timed_out(trajectory, ctx)
        except BaseException as error:
            run.broken.append(ConformanceError(5, f"{type(handler).__name__}.timed_out raised {error!r}"))
            raise

    handler.run, handler.timed_out = watched, timed_out  # type: ignore[method-assign]
