"""Whether a state handler keeps what :mod:`fsm_rollout.states.base` asks of it.

Invariant: the handler runs in a real agent, on the real scheduler and a scripted engine, in virtual time. Only its
``run`` and ``timed_out`` are wrapped, to look at them from outside, so what passes here behaves the same in a rollout.
What was seen in a run is in its :class:`_Run`, which contexts hand down, so runs do not see one another's.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import pickle
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn, cast
from weakref import WeakSet

from hypothesis import strategies as st

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.handlers import BUILT_IN_HANDLERS, HandlerSpec, handler_spec, load_handler, load_object
from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.errors import ConfigError, RolloutError
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing.conformance.runner import (
    HOW_TIME_PASSES,
    Check,
    Checked,
    ConformanceError,
    Promise,
    Stepped,
    Subject,
    called,
    demand,
    documented,
    importable,
    run_checks,
    search,
)
from fsm_rollout.testing.simulation.one_engine import OneEngine
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.testing.simulation.virtual_time import described
from fsm_rollout.trajectory.events import (
    AnyEvent,
    Ended,
    Generated,
    Prompted,
    Resumed,
    Suspended,
    Transitioned,
    decode,
    encode,
)
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.reasons import LimitName, StopReason
from fsm_rollout.trajectory.settings import FrozenMap
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory

CHECKED = "CHECKED"
"""The state whose handler is under check."""
MOST_WAITS = 25
"""A visit is interrupted at each of its awaits, up to this many."""
AWAY_SECONDS = 100.0
"""How long a trajectory is set aside before it goes on."""

PROMISES: Mapping[int, Promise] = {
    1: Promise("declared", "It can be named in a YAML: a `State` that declares its triggers, and no other's."),
    2: Promise("outcomes", "`run` returns an `Outcome` with a declared trigger, and raises nothing of its own."),
    3: Promise("no state", "It keeps nothing on itself: trajectories come out the same alone and together."),
    4: Promise("ends", "A visit takes at most `patience` seconds with an engine that answers, and ends when it fails."),
    5: Promise("cancellation", "Cancellation passes, at every await; `timed_out` raises nothing."),
    6: Promise("event loop", "The event loop is never blocked."),
    7: Promise("tasks", "No task outlives its visit."),
    8: Promise("events", "It changes a trajectory through `ctx` alone, and what it spends is charged."),
    9: Promise("limits", "A limit that is reached ends the visit: `LimitReached` passes."),
    10: Promise("randomness", "Its randomness is the visit's: the same run gives the same trajectory, whenever made."),
    11: Promise("resumed", "Interrupted at any await and resumed, it comes to the same end (`resumable`)."),
}


@documented(PROMISES)
def check_state(
    handler: type[State] | str,
    *,
    state: Mapping[str, Any] | None = None,
    agent: Mapping[str, Any] | None = None,
    prompt: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    patience: float = 600.0,
    resumable: bool = True,
    examples: int = 30,
) -> Checked:
    """Hold a state handler to its promises, in generated runs.

    (promises)

    Example::

        check_state("my_states:Search", state={"options": {"depth": 2}}, agent={"tools": {"find": {...}}})

    Args:
        handler: the class, its ``module:Class``, or the word for a built-in one.
        state: further YAML keys of its state (``options``, ``context``, ``prompt``, …). One that spends
            ``assistant_turns`` has a ``prompt``, unless it is given, so that there is something to answer.
        agent: further YAML keys of its agent. It has a calculator as a tool and a scripted user if they name no other.
        prompt: the prompt's further fields.
        tokenizer: default: the embedded model's.
        patience: virtual seconds.
        resumable: whether promise 11 is made.
        examples: how many runs each promise is tried on.

    Raises:
        ConformanceError: a promise does not hold; with the simplest run that shows it.
        ConfigError: ``state`` or ``agent`` are no YAML keys.
    """
    with ExitStack() as names:
        make = partial(_Handler, handler, names, dict(state or {}), dict(agent or {}), dict(prompt or {}),
                       tokenizer or embedded_tokenizer(), patience, examples)  # fmt: skip
        return run_checks(make, PROMISES, CHECKS if resumable else CHECKS[:-1])


# -- what is run --------------------------------------------------------------------------------------------------

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
_says = st.lists(_turns, min_size=1, max_size=4).map(tuple)
_says_or_fails = st.lists(_turns | _failures, min_size=1, max_size=4).map(tuple)


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
        parts = [f"the engine says {says}"]
        parts += [f"assistant_turns is {self.turns}"] if self.turns < 12 else []
        parts += [f"response_tokens is {self.tokens}"] if self.tokens is not None else []
        parts += ["the state's timeout is 0.125 s"] if self.hurry else []
        return "; ".join(parts)


def _agent(path: str, spec: HandlerSpec, state: dict[str, Any], agent: dict[str, Any], patience: float) -> AgentGraph:
    """Return an agent that answers, visits the handler, and does so again."""
    limits = {"assistant_turns": 12, "tool_calls": 64, "user_turns": 12, "wall_seconds": 100 * patience}
    rows = [
        {"trigger": "prompted", "source": "PENDING", "dest": "ANSWERING"},
        {"trigger": "generated", "source": "ANSWERING", "dest": CHECKED},
        {"trigger": "truncated", "source": "ANSWERING", "dest": CHECKED},
        *({"trigger": trigger, "source": CHECKED, "dest": "GOING_ON"} for trigger in spec.triggers),
        {"trigger": "written", "source": "GOING_ON", "dest": "ANSWERING"},
    ]
    if spec.spends == LimitName.ASSISTANT_TURNS:  # a turn answers something
        state.setdefault("prompt", "Think about it.")
    states = {
        "PENDING": {},
        "ANSWERING": {"handler": "generate", "timeout": patience, "max_visits": 3, "sampling": {"max_tokens": 64}},
        "GOING_ON": {"handler": "write", "prompt": "Go on.", "max_visits": 3},
        CHECKED: {"timeout": patience, "max_visits": 3, **state, "handler": path},
    }
    agent.setdefault("tools", {"calculate": {"use": "fsm_rollout.tools.calculator:calculate", "timeout": patience}})
    turns = {"turns": ["And now?", "Are you sure?"]}
    agent.setdefault("interaction", {"use": "fsm_rollout.interactions:ScriptedUser", "kwargs": turns})
    try:
        return AgentGraph(
            **{"agent": "check", "states": states | agent.pop("states", {}), "limits": limits | agent.pop("limits", {}),
               "transitions": [*agent.pop("transitions", []), *rows], **agent}
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"the agent around the handler cannot be made: {error}") from error


# -- how a visit is seen ------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Seen:
    """One visit of the handler, seen from outside."""

    stepped: Stepped[Any]
    outcome: object = None
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
    unfinished: list[str] = field(default_factory=list)
    """Tasks that were running when it returned."""
    seconds: float = 0.0


@dataclass(slots=True)
class _Run:
    """What was seen in one run."""

    story: Story
    visits: list[_Seen] = field(default_factory=list)
    interrupt: Callable[[str], object] = lambda trajectory_id: None
    """Cancels a trajectory, or sets it aside."""
    events: dict[str, list[AnyEvent]] = field(default_factory=lambda: defaultdict(list))


_current_run: contextvars.ContextVar[_Run] = contextvars.ContextVar("run")
_current_visit: contextvars.ContextVar[_Seen | None] = contextvars.ContextVar("visit", default=None)
_SCHEDULERS_OWN = (Prompted, Transitioned, Suspended, Resumed, Ended)
"""The events that no handler may emit."""
_SHARED_WORK = ("fsm_rollout/engines/", "fsm_rollout/tools/", "fsm_rollout/concurrency/")
"""Where tasks are started that serve several visits."""


def _watched(cls: type[State]) -> type[State]:
    """Return the handler class with its visits watched."""

    async def run(self: State, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        # 1. Before: what it keeps, and whether this visit is to be interrupted.
        current, before = _current_run.get(), _kept(self)
        work: Any = cls.run(self, trajectory, ctx)
        name = trajectory.trajectory_id
        cancel_at = None if current.visits else current.story.cancel_at
        seen = _Seen(Stepped(work, cancel_at=cancel_at, cancel=lambda: current.interrupt(name)))
        current.visits.append(seen)
        if not inspect.isawaitable(work):
            seen.outcome, seen.awaited = work, False
            raise TypeError("run() cannot be awaited")
        _listen(ctx, seen)
        # 2. The visit.
        token, began = _current_visit.set(seen), asyncio.get_running_loop().time()
        try:
            outcome: Outcome = await seen.stepped
            seen.outcome = outcome
        finally:
            # 3. After: how long it took, what still runs, and what it keeps now.
            _current_visit.reset(token)
            seen.seconds = asyncio.get_running_loop().time() - began
            seen.unfinished = sorted(described(task) for task in seen.tasks if not task.done())
            after = _kept(self)
            keys = [key for key in after.keys() | before.keys() if after.get(key) != before.get(key)]
            seen.changed = ", ".join(sorted(keys)) or None
        return outcome

    def timed_out(self: State, trajectory: Trajectory, ctx: HandlerContext) -> None:
        try:
            cls.timed_out(self, trajectory, ctx)
        except BaseException as error:
            _current_run.get().visits[-1].timed_out = error
            raise

    declared = {"triggers": cls.triggers, "spends": cls.spends, "__doc__": cls.__doc__, "__module__": __name__}
    return type(f"Watched{cls.__name__}", (cls,), {**declared, "run": run, "timed_out": timed_out})


def _listen(ctx: HandlerContext, seen: _Seen) -> None:
    """Take note of the limits that the visit says are reached, and of what is emitted through it."""

    def noted(method: Callable[..., object]) -> Callable[..., object]:
        def plain(*args: object, **kwargs: object) -> object:
            try:
                return method(*args, **kwargs)
            except LimitReached as error:
                seen.limit = error.limit
                raise

        async def waiting(*args: object, **kwargs: object) -> object:
            try:
                return await cast(Awaitable[object], method(*args, **kwargs))
            except LimitReached as error:
                seen.limit = error.limit
                raise

        return waiting if inspect.iscoroutinefunction(method) else plain

    emit = ctx.emit

    def emitting(event: AnyEvent) -> None:
        if isinstance(event, _SCHEDULERS_OWN):
            seen.forbidden = seen.forbidden or type(event).__name__
        emit(event)

    ctx.emit = emitting  # type: ignore[method-assign]
    for name in ("charge", "check", "generate", "call_tool"):
        setattr(ctx, name, noted(getattr(ctx, name)))


def _kept(handler: State) -> dict[str, object]:
    """Return what a handler holds, on itself and on its class, by value where that can be had."""
    cls = type(handler).__mro__[1]
    held = {f"self.{key}": value for key, value in vars(handler).items()}
    shared = vars(cls).items()
    held |= {f"{cls.__name__}.{key}": v for key, v in shared if not key.startswith("__") and not callable(v)}
    kept: dict[str, object] = {}
    for key, value in held.items():
        try:
            kept[key] = pickle.dumps(value)
        except Exception:  # a client, a lock: only its identity can be told
            kept[key] = id(value)
    return kept


def _task_factory(loop: asyncio.AbstractEventLoop, work: Any, **kwargs: Any) -> asyncio.Task[Any]:
    """Make tasks as asyncio does, and note whose visit started them (not those that serve several visits)."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **kwargs)
    seen, code = _current_visit.get(), getattr(work, "cr_code", None)
    if seen is not None and code is not None and not any(folder in code.co_filename for folder in _SHARED_WORK):
        seen.tasks.add(task)
    return task


# -- the checks ---------------------------------------------------------------------------------------------------


def _load(handler: type[State] | str, name: str) -> type[State]:
    try:
        found: object = handler
        if isinstance(handler, str):
            found = load_handler(handler) if handler in BUILT_IN_HANDLERS else load_object(handler)
    except ConfigError as error:
        raise ConformanceError(1, f"{name} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, State)):
        raise ConformanceError(1, f"{name} is no subclass of fsm_rollout.states.State")
    abstract = sorted(getattr(found, "__abstractmethods__", ()))
    demand(not abstract, 1, f"{name} is abstract; it lacks {', '.join(abstract)}")
    unheard = inspect.iscoroutinefunction(found.timed_out)
    demand(not unheard, 1, f"{name}.timed_out is 'async def', and nobody awaits it; write 'def timed_out'")
    return found


class _Handler(Subject):
    BLOCKING, ENDLESS, LEAKY, CANCELLED = 6, 4, 7, 5

    def __init__(
        self, handler: type[State] | str, names: ExitStack, state: dict[str, Any], agent: dict[str, Any],
        prompt: dict[str, Any], tokenizer: Any, patience: float, examples: int,
    ) -> None:  # fmt: skip
        title = called(handler)
        super().__init__(f"{title}.run", f"a visit of {title}", examples)
        self.title, self.tokenizer, self.prompt, self.patience = title, tokenizer, prompt, patience
        self.cls = _watched(_load(handler, title))
        path = names.enter_context(importable(self.cls))
        try:
            spec = handler_spec(path)
        except ConfigError as error:
            raise ConformanceError(1, f"{title}: {error}".replace(path, title)) from None
        self.graph = _agent(path, spec, state, agent, patience)
        try:
            self.cls(CHECKED, self.graph.states[CHECKED])
        except Exception as error:
            raise ConformanceError(1, f"{title} cannot be made: {type(error).__name__}: {error}") from error
        self.first_outlines: dict[str, Outline] = {}
        """What a trajectory alone came to in each story when that was told for the first time."""

    # A story, run and looked at.

    def tell(self, story: Story, n: int = 1) -> tuple[list[Trajectory], _Run]:
        """Run a story in virtual time and look at everything that holds of any run."""
        seen, groups, failure = _Run(story), list[Group](), None
        try:
            groups = self.run(self._main(story, seen, n), case=f"; {story}")
        except Exception as error:
            if isinstance(error, ConformanceError) and error.invariant == self.BLOCKING:
                raise
            failure = error
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        for visit in seen.visits:
            self._look_at_visit(visit, story)
        if isinstance(failure, ConformanceError):  # a visit itself may have said it better
            raise failure
        if failure is not None:
            self._cannot_go_on(f"{type(failure).__name__}: {failure}; change it through ctx", story, failure)
        for trajectory in trajectories:
            self._look_at_record(trajectory, seen.events[trajectory.trajectory_id], story)
        return trajectories, seen

    def _cannot_go_on(self, why: str, story: Story, cause: BaseException | None = None) -> NoReturn:
        raise ConformanceError(8, f"{self.title} left a trajectory that cannot go on: {why}; {story}") from cause

    async def _main(self, story: Story, seen: _Run, n: int) -> list[Group]:
        asyncio.get_running_loop().set_task_factory(_task_factory)
        _current_run.set(seen)
        scheduler = self._scheduler(story, seen)
        seen.interrupt = scheduler.suspend if story.suspend else scheduler.cancel
        prompts = [Prompt(prompt_id="p", messages=({"role": "user", "content": "What is 2 + 2?"},), **self.prompt)]
        groups = [group async for group in scheduler.run(prompts, n)]
        aside = [t for group in groups for t in group.trajectories if t.suspended is not None]
        if aside and story.suspend:
            histories = [seen.events.pop(trajectory.trajectory_id) for trajectory in aside]  # they are told again
            await asyncio.sleep(AWAY_SECONDS)
            return [group async for group in self._scheduler(story, seen).run([], n, resume=histories)]
        return groups

    def _scheduler(self, story: Story, seen: _Run) -> Scheduler:
        def script(request: Request) -> Turn:
            return story.says[request.turn % len(story.says)]

        def keep(trajectory: Trajectory, event: AnyEvent) -> None:
            # A copy, as a journal keeps it: the trajectory holds the event's own lists and mappings.
            seen.events[trajectory.trajectory_id].append(decode(encode(event)))

        update = {"assistant_turns": story.turns} | ({} if story.tokens is None else {"response_tokens": story.tokens})
        states = dict(self.graph.states)
        if story.hurry:
            states[CHECKED] = states[CHECKED].model_copy(update={"timeout": 0.125})
        limits = self.graph.limits.model_copy(update=update)
        graph = self.graph.model_copy(update={"limits": limits, "states": FrozenMap(states)})
        engine = ScriptedEngine(script, tokenizer=self.tokenizer)
        return Scheduler({graph.agent: graph}, OneEngine(engine, queue_timeout=self.patience / 4), listeners=[keep])

    def _look_at_visit(self, visit: _Seen, story: Story) -> None:
        outcome, error, run = visit.outcome, visit.stepped.ended_by, self.name
        self.check_busy(visit.stepped)
        if visit.unfinished:
            task = visit.unfinished[0]
            raise ConformanceError(7, f"{run} returned while this task was running: {task}; await it; {story}")
        where = f"cancelled at its await number {story.cancel_at}"
        demand(visit.stepped.heard, 5, f"{run}, {where}, went on; let CancelledError pass; {story}")
        said = f"emitted {visit.forbidden}, which is the scheduler's to say"
        demand(visit.forbidden is None, 8, f"{run} {said}; return an outcome; {story}")
        demand(visit.timed_out is None, 5, f"{self.title}.timed_out raised {visit.timed_out!r}; {story}")
        swallowed = f"swallowed LimitReached ('{visit.limit}') and returned {outcome}"
        demand(visit.limit is None or error is not None, 9, f"{run} {swallowed}; let it pass; {story}")
        unawaitable = f"{outcome!r:.80}, which cannot be awaited"
        demand(visit.awaited, 2, f"{run} gave {unawaitable}; write 'async def run' without 'yield'")
        declared = error is not None or (isinstance(outcome, Outcome) and outcome.trigger in self.cls.triggers)
        demand(declared, 2, f"{run} returned {outcome!r}; it declares: {', '.join(self.cls.triggers)}; {story}")
        shared = f"changed {visit.changed}, which all trajectories share"
        demand(visit.changed is None, 3, f"{run} {shared}; keep it in the trajectory, as events; {story}")

    def _look_at_record(self, trajectory: Trajectory, events: list[AnyEvent], story: Story) -> None:
        demand(trajectory.ended, 4, f"a trajectory through {self.title} did not end; {story}")
        try:
            folded = Trajectory.fold(events)
        except RolloutError as error:
            raise ConformanceError(
                8, f"{self.title} left events that do not fit one another: {error}; {story}"
            ) from None
        if folded != trajectory:
            slots = [
                slot for slot in Trajectory.__struct_fields__ if getattr(folded, slot) != getattr(trajectory, slot)
            ]
            what = f"the trajectory's {', '.join(slots)} without an event"
            raise ConformanceError(8, f"{self.title} changed {what}; use ctx; {story}")
        generations = sum(isinstance(event, Generated) and not event.resumed for event in events)
        made = f"{self.title} made {generations} generations, and {trajectory.spent} was charged"
        charged = generations <= trajectory.spent.get(LimitName.ASSISTANT_TURNS, 0)
        demand(charged, 8, f"{made}; generate through ctx; {story}")

    def _outline(self, story: Story, n: int = 1) -> Outline:
        trajectories, seen = self.tell(story, n)
        return _outline(trajectories[0], seen)

    # What is told, and what must hold of it.

    def works_when_all_works(self) -> int:
        """Run with an engine that answers: nothing is raised, nothing takes for ever."""
        return search(st.builds(Story, _says), self._calm, self.examples)

    def _calm(self, story: Story) -> None:
        trajectories, seen = self.tell(story)
        for visit in seen.visits:
            took = f"a visit of {self.title} took {visit.seconds:g} s"
            demand(visit.seconds < self.patience, 4, f"{took}; {HOW_TIME_PASSES}; {story}")
            error = visit.stepped.ended_by
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            if error is not None and not isinstance(error, LimitReached | asyncio.CancelledError):
                raise ConformanceError(2, f"{self.name} raised {type(error).__name__}: {error}; {story}") from error
        self.first_outlines.setdefault(str(story), _outline(trajectories[0], seen))
        for trajectory in trajectories:
            reason = trajectory.stop_reason
            late = f"a visit of {self.title} did not end in {self.patience:g} s"
            demand(reason != StopReason.TIMED_OUT, 4, f"{late}; {story}")
            if StopReason.is_failure(reason):  # later: what it raises itself is told above
                self._cannot_go_on(f"{reason}: {trajectory.detail}", story)

    def works_whatever_comes(self) -> int:
        """Run with engines that fail, and with limits and timeouts that are reached."""
        ran = search(st.builds(Story, _says_or_fails), self.tell, self.examples)
        ran += search(st.builds(Story, _says, turns=st.integers(2, 6)), self.tell, self.share(4))
        ran += search(st.builds(Story, _says, tokens=st.integers(4, 60)), self.tell, self.share(2))
        return ran + search(st.builds(Story, _says, hurry=st.just(True)), self.tell, self.share(3))

    def repeats_itself(self) -> int:
        """Run twice alone, and once beside others."""

        def hold(story: Story) -> None:
            latest = self._outline(story)
            alone = self.first_outlines.setdefault(str(story), latest)
            came_out = f"a trajectory through {self.title} came out with"
            for again in (latest, self._outline(story)):
                if again != alone:
                    what = _difference(alone, again, "the second time")
                    advice = "take randomness from ctx.rng and keep nothing between visits"
                    raise ConformanceError(10, f"{came_out} {what}; {advice}; {story}")
            together = self._outline(story, n=3)
            if together != alone:
                what = _difference(alone, together, "beside others")
                raise ConformanceError(3, f"{came_out} {what}; keep nothing that they share; {story}")

        return search(st.builds(Story, _says), hold, self.share(3))

    def _interrupted(self, story: Story, look: Callable[[int, Trajectory, _Run], None]) -> None:
        """Interrupt the first visit at each of its awaits in turn, and look at what came of it."""
        for number in range(1, MOST_WAITS):
            (trajectory,), seen = self.tell(replace(story, cancel_at=number))
            if not seen.visits or seen.visits[0].stepped.cancelled_at is None:
                return
            look(number, trajectory, seen)

    def is_cancelled(self) -> int:
        """Cancel a visit anywhere: its trajectory is cancelled."""

        def hold(story: Story) -> None:
            def look(number: int, trajectory: Trajectory, seen: _Run) -> None:
                reason = trajectory.stop_reason
                came_to = f"was cancelled at its await number {number}, and the trajectory came to '{reason}'"
                demand(reason == StopReason.CANCELLED, 5, f"{self.title} {came_to}; {story}")

            self._interrupted(story, look)

        return search(st.builds(Story, _says), hold, self.share(5))

    def is_resumed(self) -> int:
        """Set a trajectory aside anywhere, and go on with it on a new scheduler."""

        def hold(story: Story) -> None:
            whole = self._outline(replace(story, suspend=False))

            def look(number: int, trajectory: Trajectory, seen: _Run) -> None:
                resumed = _outline(trajectory, seen)
                if resumed != whole:
                    what = _difference(resumed, whole, "uninterrupted")
                    raise ConformanceError(
                        11, f"{self.title} was set aside at its await number {number} and resumed, and came to {what}; "
                        f"what it does must follow from the trajectory and ctx.rng; {story}"
                    )  # fmt: skip

            self._interrupted(story, look)

        return search(st.builds(Story, _says, suspend=st.just(True)), hold, self.share(5))


CHECKS: Sequence[Check[_Handler]] = (
    Check((1, 2, 4, 6, 7, 8), _Handler.works_when_all_works),
    Check((9,), _Handler.works_whatever_comes),
    Check((3, 10), _Handler.repeats_itself),
    Check((5,), _Handler.is_cancelled),
    Check((11,), _Handler.is_resumed),
)

Outline = dict[str, Sequence[object]]
"""What must not depend on when things happened, by what one of it is called in a message."""


def _outline(trajectory: Trajectory, seen: _Run) -> Outline:
    events = seen.events[trajectory.trajectory_id]
    return {
        "trigger": [event.trigger for event in events if isinstance(event, Transitioned)],
        "message": [(stream.context, message) for stream in trajectory.streams for message in stream.messages],
        "stop reason": [trajectory.stop_reason],
        "count of visits": [trajectory.visits],
        "count of charges": [trajectory.spent],
        "score": list(trajectory.turn_scores),
        "reward": [trajectory.tool_rewards],
        "stream": [(stream.context, stream.tokens.ids.tolist()) for stream in trajectory.streams],
    }


def _difference(outline: Outline, other: Outline, when: str) -> str:
    """Say the first thing in which two outlines differ."""
    what = next(key for key in outline if outline[key] != other[key])
    pairs = enumerate(zip_longest(outline[what], other[what], fillvalue="nothing"), 1)
    number, (value, another) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"{what} {number} as {value!r}, and {when} as {another!r}"
