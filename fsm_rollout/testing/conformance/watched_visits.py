"""Visits of a handler, seen from outside: what it returned, kept, started, swallowed.

Invariant: watching changes nothing. A watched class is a subclass whose ``run`` and ``timed_out`` do what the handler's
do; notes of a run are in its :class:`Watch`, which contexts hand down, so runs do not see one another's.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import pickle
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing.conformance.promises import Stepped
from fsm_rollout.testing.simulation.virtual_time import described
from fsm_rollout.trajectory.events import AnyEvent, Ended, Prompted, Resumed, Suspended, Transitioned
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory


@dataclass(frozen=True)
class Story:
    """One run: what the engine says, how often what, and where the handler is interrupted."""

    says: tuple[Turn, ...]
    cancel_at: int | None = None
    """The number of the await, of the first visit, at which it is cancelled."""
    suspend: bool = False
    """Set aside there, and resumed, instead of cancelled."""
    turns: int = 12
    """The limit ``assistant_turns``."""
    tokens: int | None = None
    """The limit ``response_tokens``."""
    hurry: bool = False
    """The state's timeout is shorter than the engine takes for anything."""

    def __str__(self) -> str:
        """Say it as the last lines of a message."""
        says = ", ".join(repr(turn.model_dump(exclude_defaults=True)) for turn in self.says)
        said = [f"the engine says {says}"]
        said += [f"assistant_turns is {self.turns}"] if self.turns < 12 else []
        said += [f"response_tokens is {self.tokens}"] if self.tokens is not None else []
        said += ["the state's timeout is 0.125 s"] if self.hurry else []
        return "; ".join(said)


_visiting: contextvars.ContextVar[Visited | None] = contextvars.ContextVar("visiting", default=None)


@dataclass(slots=True, eq=False)
class Visited:
    """One visit of the handler, seen from outside."""

    stepped: Stepped[Any]
    outcome: Any = None
    awaited: bool = True
    """Whether what `run` gave could be awaited."""
    limit: str | None = None
    """The limit that the visit said was reached."""
    changed: str | None = None
    """What the handler kept on itself."""
    timed_out: BaseException | None = None
    """What `timed_out` raised."""
    forbidden: str | None = None
    """The event that it emitted in the scheduler's place."""
    tasks: WeakSet[asyncio.Task[Any]] = field(default_factory=WeakSet)
    """Those that it started; not kept alive, so that asyncio complains about those that fail unheard."""
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0


_SCHEDULERS_OWN = (Prompted, Transitioned, Suspended, Resumed, Ended)
"""The events that no handler may emit."""


class Watch:
    """What a run does with the visits of the handler under check."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.visits: list[Visited] = []
        self.interrupt: Callable[[str], object] = lambda trajectory_id: None
        self.events: dict[str, list[AnyEvent]] = defaultdict(list)


current_watch: contextvars.ContextVar[Watch] = contextvars.ContextVar("watch")


def watched_class(cls: type[State]) -> type[State]:
    """Return the handler class with its visits watched."""

    async def run(self: State, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        watch, before = current_watch.get(), _kept(self)
        work: Any = cls.run(self, trajectory, ctx)
        name = trajectory.trajectory_id
        first = not watch.visits
        stepped: Stepped[Any] = Stepped(
            work,
            cancel_at=watch.story.cancel_at if first else None,
            cancel=lambda: watch.interrupt(name),
        )
        seen = Visited(stepped)
        watch.visits.append(seen)
        if not inspect.isawaitable(work):
            seen.outcome, seen.awaited = work, False
            raise TypeError("run() cannot be awaited")
        _listen(ctx, seen)
        token, began = _visiting.set(seen), asyncio.get_running_loop().time()
        try:
            outcome: Outcome = await stepped
            seen.outcome = outcome
        finally:
            _visiting.reset(token)
            seen.seconds = asyncio.get_running_loop().time() - began
            seen.left = sorted(described(task) for task in seen.tasks if not task.done())
            after = _kept(self)
            keys = [key for key in after.keys() | before.keys() if after.get(key) != before.get(key)]
            seen.changed = ", ".join(sorted(keys)) or None
        return outcome

    def timed_out(self: State, trajectory: Trajectory, ctx: HandlerContext) -> None:
        try:
            cls.timed_out(self, trajectory, ctx)
        except BaseException as error:
            current_watch.get().visits[-1].timed_out = error
            raise

    declared = {"triggers": cls.triggers, "spends": cls.spends, "__doc__": cls.__doc__, "__module__": __name__}
    return type(f"Watched{cls.__name__}", (cls,), {**declared, "run": run, "timed_out": timed_out})


def _listen(ctx: HandlerContext, seen: Visited) -> None:
    """Take note of the limits that the visit says are reached, and of what is emitted through it."""

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def plain(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except LimitReached as error:
                seen.limit = error.limit
                raise

        return plain

    def noted_async(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def waiting(*args: Any, **kwargs: Any) -> Any:
            try:
                return await method(*args, **kwargs)
            except LimitReached as error:
                seen.limit = error.limit
                raise

        return waiting

    emit = ctx.emit

    def emitting(event: AnyEvent) -> None:
        if isinstance(event, _SCHEDULERS_OWN):
            seen.forbidden = seen.forbidden or type(event).__name__
        emit(event)

    ctx.emit = emitting  # type: ignore[method-assign]
    for name in ("charge", "check"):
        setattr(ctx, name, noted(getattr(ctx, name)))
    for name in ("generate", "call_tool"):
        setattr(ctx, name, noted_async(getattr(ctx, name)))


def _kept(handler: State) -> dict[str, Any]:
    """Return what a handler holds, on itself and on its class, by value where that can be had."""
    own = {f"self.{key}": value for key, value in vars(handler).items()}
    shared = {f"{type(handler).__mro__[1].__name__}.{key}": v for key, v in vars(type(handler).__mro__[1]).items()
              if not key.startswith("__") and not callable(v)}  # fmt: skip
    kept: dict[str, Any] = {}
    for key, value in {**own, **shared}.items():
        try:
            kept[key] = pickle.dumps(value)
        except Exception:  # a client, a lock: only its identity can be told
            kept[key] = id(value)
    return kept


def task_factory(loop: asyncio.AbstractEventLoop, work: Any, **kwargs: Any) -> asyncio.Task[Any]:
    """Make tasks as asyncio does, and note whose visit started them (not those that the dispatcher starts for it)."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **kwargs)
    seen, code = _visiting.get(), getattr(work, "cr_code", None)
    if seen is not None and code is not None and not any(f in code.co_filename for f in _ENGINE_SIDE):
        seen.tasks.add(task)
    return task


_ENGINE_SIDE = ("fsm_rollout/engines/", "fsm_rollout/tools/", "fsm_rollout/concurrency/")
"""Where tasks are started that serve several visits."""
