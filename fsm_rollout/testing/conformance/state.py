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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any
from weakref import WeakSet

from hypothesis import strategies as st

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.handlers import HandlerSpec, handler_spec, load_handler
from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.errors import ConfigError, RolloutError, single
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing.conformance.runner import (
    Checked,
    ConformanceError,
    Stepped,
    Subject,
    Suite,
    demand,
    demand_all,
    named,
)  # fmt: skip
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.testing.simulation.source_lines import described
from fsm_rollout.testing.simulation.stand_ins import OneEngine
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import LimitName, StopReason
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import FrozenMap, Sampling
from fsm_rollout.trajectory.trajectory import Trajectory

CHECKED = "CHECKED"  # the state whose handler is under check
MOST_WAITS = 25  # a visit is interrupted at each of its awaits, up to this many
AWAY_SECONDS = 100.0  # how long a trajectory is set aside before it goes on

SUITE = Suite[Callable[["_Handler"], "int | None"]]({
    1: ("declared", "It can be named in a YAML: a `State` that declares its triggers, and no other's."),
    2: ("outcomes", "`run` returns an `Outcome` with a declared trigger, and raises nothing of its own."),
    3: ("no state", "It keeps nothing on itself: trajectories come out the same alone and together."),
    4: ("ends", "A visit takes at most `patience` seconds with an engine that answers, and ends when it fails."),
    5: ("cancellation", "Cancellation passes, at every await; `timed_out` raises nothing."),
    6: ("event loop", "The event loop is never blocked."),
    7: ("tasks", "No task outlives its visit."),
    8: ("events", "It changes a trajectory through `ctx` alone, and what it spends is charged."),
    9: ("limits", "A limit that is reached ends the visit: `LimitReached` passes."),
    10: ("randomness", "Its randomness is the visit's: the same run gives the same trajectory, whenever made."),
    11: ("resumed", "Interrupted at any await and resumed, it comes to the same end (`resumable`)."),
})  # fmt: skip


@SUITE.documented
def check_state(
    handler: type[State] | str,
    *,
    state: Mapping[str, object] | None = None,
    agent: Mapping[str, object] | None = None,
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
    with SUITE.judging():
        path, title = named(handler)
        spec = _load(path, title)
        graph = _agent(path, spec, state or {}, agent or {}, patience)
        try:
            load_handler(path)(CHECKED, graph.states[CHECKED])
        except Exception as error:
            if state and isinstance(error, ConfigError):  # of the keys that the caller gave its state
                raise ConfigError(f"{title} cannot be made: {error}") from error
            raise ConformanceError(1, f"{title} cannot be made: {type(error).__name__}: {error}") from error
        opening_prompt = Prompt(
            prompt_id="p", messages=({"role": "user", "content": "What is 2 + 2?"},), **prompt or {}
        )
        tokenizer = tokenizer or embedded_tokenizer()
        return SUITE.hold(_Handler(title, spec, graph, opening_prompt, tokenizer, patience, resumable, examples))


def _load(path: str, title: str) -> HandlerSpec:
    """Return what the handler declares, if it can be used at all."""
    try:
        found = load_handler(path)
        demand(issubclass(found, State), 1, f"{title} is no subclass of fsm_rollout.states.State")
        yields = inspect.isasyncgenfunction(found.run)  # type: ignore[attr-defined]
        demand(not yields, 2, f"{title}.run is an async generator, which cannot be awaited; write it without 'yield'")
        unheard = inspect.iscoroutinefunction(found.timed_out)  # type: ignore[attr-defined]
        demand(not unheard, 1, f"{title}.timed_out is 'async def', and nobody awaits it; write 'def timed_out'")
        return handler_spec(path)
    except ConfigError as error:
        raise ConformanceError(1, f"{title} cannot be loaded: {error}".replace(path, title)) from None


def _agent(
    path: str, spec: HandlerSpec, state: Mapping[str, object], agent: Mapping[str, Any], patience: float
) -> AgentGraph:
    """Return an agent that answers, visits the handler, and does so again."""
    answers = {"prompt": "Think about it."} if spec.spends == LimitName.ASSISTANT_TURNS else {}
    states = {
        "PENDING": {},
        "ANSWERING": {"handler": "generate", "timeout": patience, "max_visits": 3, "sampling": {"max_tokens": 64}},
        "GOING_ON": {"handler": "write", "prompt": "Go on.", "max_visits": 3},
        CHECKED: {"timeout": patience, "max_visits": 3, **answers, **state, "handler": path},
    }
    rows = [
        {"trigger": "prompted", "source": "PENDING", "dest": "ANSWERING"},
        {"trigger": "generated", "source": "ANSWERING", "dest": CHECKED},
        {"trigger": "truncated", "source": "ANSWERING", "dest": CHECKED},
        *({"trigger": trigger, "source": CHECKED, "dest": "GOING_ON"} for trigger in spec.triggers),
        {"trigger": "written", "source": "GOING_ON", "dest": "ANSWERING"},
    ]
    limits = {"assistant_turns": 12, "tool_calls": 64, "user_turns": 12, "wall_seconds": 100 * patience}
    turns = {"turns": ["And now?", "Are you sure?"]}
    keys = {
        "agent": "check",
        "tools": {"calculate": {"use": "fsm_rollout.tools.calculator:calculate", "timeout": patience}},
        "interaction": {"use": "fsm_rollout.interactions:ScriptedUser", "kwargs": turns},
        **agent,
        "states": states | agent.get("states", {}),
        "limits": limits | agent.get("limits", {}),
        "transitions": [*agent.get("transitions", ()), *rows],
    }
    try:
        return AgentGraph(**keys)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"the agent around the handler cannot be made: {error}") from error


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
Says = st.SearchStrategy[tuple[Turn, ...]]
_says: Says = st.lists(_turns, min_size=1, max_size=4).map(tuple)
_says_or_fails: Says = st.lists(_turns | _failures, min_size=1, max_size=4).map(tuple)


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
class _Run:
    """What was seen in one run."""

    story: Story
    visits: list[Stepped[Outcome]] = field(default_factory=list)
    broken: list[ConformanceError] = field(default_factory=list)  # what the visits broke, in order
    interrupt: Callable[[str], object] = lambda trajectory_id: None  # cancels a trajectory, or sets it aside
    events: dict[str, list[AnyEvent]] = field(default_factory=lambda: defaultdict(list))


# The tasks that a visit started; not kept alive, so that asyncio complains about those that fail unheard.
_started: contextvars.ContextVar[WeakSet[asyncio.Task[object]] | None] = contextvars.ContextVar("started", default=None)
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


def _task_factory(loop: asyncio.AbstractEventLoop, work: Any, **kwargs: Any) -> asyncio.Task[Any]:
    """Make tasks as asyncio does, and note whose visit started them (not those that serve several visits)."""
    task: asyncio.Task[object] = asyncio.Task(work, loop=loop, **kwargs)
    started, code = _started.get(), getattr(work, "cr_code", None)
    if started is not None and code is not None and not any(folder in code.co_filename for folder in _SHARED_WORK):
        started.add(task)
    return task


# -- the checks ---------------------------------------------------------------------------------------------------


class _Handler(Subject):
    BLOCKING, ENDLESS, LEAKY, CANCELLED = 6, 4, 7, 5

    def __init__(
        self, title: str, spec: HandlerSpec, graph: AgentGraph, prompt: Prompt, tokenizer: Any, patience: float,
        resumable: bool, examples: int,
    ) -> None:  # fmt: skip
        super().__init__(f"{title}.run", f"a visit of {title}", patience, examples)
        self.title, self.triggers, self.graph, self.prompt = title, spec.triggers, graph, prompt
        self.tokenizer, self.unmade = tokenizer, set() if resumable else {11}
        # What the runs have learnt about the chat template, each for the next.
        self.chats: dict[object, ChatTemplate] = {}
        # The result of a trajectory alone in each story, when the story was first run.
        self.first_outlines: dict[Story, Outline] = {}

    # A story, run and looked at.

    def tell_all(
        self, hold: Callable[[Story], object], part: int = 1, says: Says = _says, **more: st.SearchStrategy[object]
    ) -> int:
        """Run ``hold`` on drawn stories, on one of ``part`` examples; what breaks is said with its story."""

        def hold_and_name(story: Story) -> None:
            try:
                hold(story)
            except ConformanceError as error:
                error.message += f"; {story}"
                raise

        return self.search(st.builds(Story, says, **more), hold_and_name, part)

    def tell(self, story: Story, n: int = 1) -> tuple[list[Trajectory], _Run]:
        """Run a story in virtual time and look at everything that holds of any run."""
        run, trajectories, failure = _Run(story), list[Trajectory](), None
        try:
            trajectories = self.run(self._main(run, n))
        except Exception as error:
            if isinstance(error, ConformanceError) and error.invariant == self.BLOCKING:
                raise
            failure = error
        if run.broken:  # the visit's own error is clearer than its consequences
            raise run.broken[0]
        if isinstance(failure, ConformanceError):
            raise failure
        if failure is not None:
            raise self._stuck(f"{type(failure).__name__}: {failure}; change it through ctx") from failure
        for trajectory in trajectories:
            self._look_at_record(trajectory, run.events[trajectory.trajectory_id])
        return trajectories, run

    def _stuck(self, why: str) -> ConformanceError:
        return ConformanceError(8, f"{self.title} left a trajectory that cannot go on: {why}")

    async def _main(self, run: _Run, n: int) -> list[Trajectory]:
        asyncio.get_running_loop().set_task_factory(_task_factory)
        scheduler = self._scheduler(run)
        run.interrupt = scheduler.suspend if run.story.suspend else scheduler.cancel
        ended = [t async for group in scheduler.run([self.prompt], n) for t in group.trajectories]
        if run.story.suspend and any(trajectory.suspended is not None for trajectory in ended):
            # The next scheduler records these histories again, from their beginning.
            histories = [run.events.pop(t.trajectory_id) for t in ended if t.suspended is not None]
            await asyncio.sleep(AWAY_SECONDS)
            again = self._scheduler(run).run([], n, resume=histories)
            return [trajectory async for group in again for trajectory in group.trajectories]
        return ended

    def _scheduler(self, run: _Run) -> Scheduler:
        def keep(trajectory: Trajectory, event: AnyEvent) -> None:
            # A copy, as a journal keeps it: the trajectory holds the event's own lists and mappings.
            run.events[trajectory.trajectory_id].append(events.decode(events.encode(event)))

        says, graph = run.story.says, run.story.changed(self.graph)
        engine = ScriptedEngine(lambda request: says[request.turn % len(says)], tokenizer=self.tokenizer)
        clients = OneEngine(engine, chats=self.chats, queue_timeout=self.patience / 4)
        scheduler = Scheduler({graph.agent: graph}, clients, listeners=[keep])
        self._watch(scheduler.agents.of_graph(graph).handlers[CHECKED], run)
        return scheduler

    def _watch(self, handler: State, run: _Run) -> None:
        """Look at each visit of the handler from outside."""
        real_run, real_timed_out = handler.run, handler.timed_out

        async def watched(trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
            # 1. Before: what it keeps, and whether this visit is to be interrupted.
            before, tasks = _kept(handler), WeakSet[asyncio.Task[object]]()
            cancel_at, interrupt = None if run.visits else run.story.cancel_at, run.interrupt
            visit = Stepped(real_run(trajectory, ctx), cancel_at, lambda: interrupt(trajectory.trajectory_id))
            run.visits.append(visit)
            reached, forbidden = _listen(ctx)
            # 2. The visit.
            token, outcome = _started.set(tasks), None
            try:
                outcome = await visit
                return outcome
            finally:
                # 3. After: what still runs, what it keeps now, and what it came to.
                _started.reset(token)
                after, raised = _kept(handler), visit.ended_by is not None
                running = sorted(described(task) for task in tasks if not task.done())
                changed = sorted(key for key in after.keys() | before.keys() if after.get(key) != before.get(key))
                declared = raised or (isinstance(outcome, Outcome) and outcome.trigger in self.triggers)
                facts = (
                    (not running, 7, f"returned while this task was running: {', '.join(running[:1])}; await it"),
                    (visit.let_cancellation_out, 5, f"was cancelled at its await number {cancel_at}, and went on; "
                                     "let CancelledError pass"),
                    (not forbidden, 8, f"emitted {', '.join(forbidden)}, which the scheduler emits; return an outcome"),
                    (not reached or raised, 9, f"swallowed LimitReached ('{', '.join(reached)}') "
                                               f"and returned {outcome}; let it pass"),
                    (declared, 2, f"returned {outcome!r}; it declares: {', '.join(self.triggers)}"),
                    (not changed, 3, f"changed {', '.join(changed)}, which all trajectories share; "
                                     "keep it in the trajectory, as events"),
                )  # fmt: skip
                try:
                    self.check_busy(visit)
                    demand_all(self.name, *facts)
                except ConformanceError as error:
                    run.broken.append(error)

        def timed_out(trajectory: Trajectory, ctx: HandlerContext) -> None:
            try:
                real_timed_out(trajectory, ctx)
            except BaseException as error:
                run.broken.append(ConformanceError(5, f"{self.title}.timed_out raised {error!r}"))
                raise

        handler.run, handler.timed_out = watched, timed_out  # type: ignore[method-assign]

    def _look_at_record(self, trajectory: Trajectory, history: list[AnyEvent]) -> None:
        demand(trajectory.ended, 4, f"a trajectory through {self.title} did not end")
        try:
            folded = Trajectory.fold(history)
        except RolloutError as error:
            raise ConformanceError(8, f"{self.title} left events that do not fit one another: {error}") from None
        slots = Trajectory.__struct_fields__ if folded != trajectory else ()
        changed = ", ".join(slot for slot in slots if getattr(folded, slot) != getattr(trajectory, slot))
        demand(folded == trajectory, 8, f"{self.title} changed the trajectory's {changed} without an event; use ctx")
        generations = sum(isinstance(event, events.Generated) and not event.resumed for event in history)
        comparison = f"{self.title} made {generations} generations, and {trajectory.spent} was charged"
        charged = generations <= trajectory.spent.get(LimitName.ASSISTANT_TURNS, 0)
        demand(charged, 8, f"{comparison}; generate through ctx")

    def _outline(self, story: Story, n: int = 1) -> Outline:
        trajectories, run = self.tell(story, n)
        return _outline(trajectories[0], run)

    # What is told, and what must hold of it.

    @SUITE.check(1, 2, 4, 6, 7, 8)
    def works_when_all_works(self) -> int:
        """Run with an engine that answers: nothing is raised, nothing takes for ever."""
        return self.tell_all(self._calm)

    def _calm(self, story: Story) -> None:
        trajectories, run = self.tell(story)
        for visit in run.visits:
            took = f"a visit of {self.title} took {visit.seconds:g} s"
            demand(visit.seconds < self.patience, 4, f"{took}; {self.HOW_TIME_PASSES}")
            error = visit.ended_by and single(visit.ended_by)
            if error is not None and not isinstance(error, LimitReached | asyncio.CancelledError):
                raise ConformanceError(2, f"{self.name} raised {type(error).__name__}: {error}") from error
        self.first_outlines.setdefault(story, _outline(trajectories[0], run))
        for trajectory in trajectories:
            reason = trajectory.stop_reason
            late = f"a visit of {self.title} did not end in {self.patience:g} s"
            demand(reason != StopReason.TIMED_OUT, 4, late)
            if StopReason.is_failure(reason):  # later: what it raises itself is told above
                raise self._stuck(f"{reason}: {trajectory.detail}")

    @SUITE.check(9)
    def works_whatever_comes(self) -> int:
        """Run with engines that fail, and with limits and timeouts that are reached."""
        ran = self.tell_all(self.tell, says=_says_or_fails)
        ran += self.tell_all(self.tell, 4, turns=st.integers(2, 6))
        ran += self.tell_all(self.tell, 2, tokens=st.integers(4, 60))
        return ran + self.tell_all(self.tell, 3, hurry=st.just(True))

    @SUITE.check(3, 10)
    def repeats_itself(self) -> int:
        """Run twice alone, and once beside others."""

        def hold(story: Story) -> None:
            latest = self._outline(story)
            alone = self.first_outlines.setdefault(story, latest)
            came_out = f"a trajectory through {self.title} came out with"
            for again in (latest, self._outline(story)):
                what = _difference(alone, again, "the second time")
                advice = "take randomness from ctx.rng and keep nothing between visits"
                demand(again == alone, 10, f"{came_out} {what}; {advice}")
            together = self._outline(story, n=3)
            what = _difference(alone, together, "beside others")
            demand(together == alone, 3, f"{came_out} {what}; keep nothing that they share")

        return self.tell_all(hold, 3)

    def _interrupted(self, story: Story) -> Iterator[tuple[str, Trajectory, _Run]]:
        """Interrupt the first visit at each of its awaits in turn; yield where, and what came of it."""
        for number in range(1, MOST_WAITS):
            (trajectory,), run = self.tell(replace(story, cancel_at=number))
            if not run.visits or not run.visits[0].cancelled:
                return
            yield f"at its await number {number}", trajectory, run

    @SUITE.check(5)
    def is_cancelled(self) -> int:
        """Cancel a visit anywhere: its trajectory is cancelled."""

        def hold(story: Story) -> None:
            for where, trajectory, _ in self._interrupted(story):
                came_to = f"was cancelled {where}, and the trajectory came to '{trajectory.stop_reason}'"
                demand(trajectory.stop_reason == StopReason.CANCELLED, 5, f"{self.title} {came_to}")

        return self.tell_all(hold, 5)

    @SUITE.check(11)
    def is_resumed(self) -> int:
        """Set a trajectory aside anywhere, and go on with it on a new scheduler."""

        def hold(story: Story) -> None:
            whole = self._outline(replace(story, suspend=False))
            for where, trajectory, run in self._interrupted(story):
                resumed = _outline(trajectory, run)
                came_to = (
                    f"was set aside {where} and resumed, and came to {_difference(resumed, whole, 'uninterrupted')}"
                )
                advice = "what it does must follow from the trajectory and ctx.rng"
                demand(resumed == whole, 11, f"{self.title} {came_to}; {advice}")

        return self.tell_all(hold, 5, suspend=st.just(True))


# What must not depend on when things happened, by what one of it is called in a message.
Outline = dict[str, Sequence[object]]


def _outline(trajectory: Trajectory, run: _Run) -> Outline:
    history = run.events[trajectory.trajectory_id]
    return {
        "trigger": [event.trigger for event in history if isinstance(event, events.Transitioned)],
        "message": [(stream.context, message) for stream in trajectory.streams for message in stream.messages],
        "stop reason": [trajectory.stop_reason],
        "count of visits": [trajectory.visits],
        "count of charges": [trajectory.spent],
        "score": list(trajectory.turn_scores),
        "reward": [trajectory.tool_rewards],
        "stream": [(stream.context, stream.tokens.ids.tolist()) for stream in trajectory.streams],
    }


def _difference(outline: Outline, other: Outline, when: str) -> str:
    """Say the first thing in which two outlines differ, if they do."""
    for what in outline:
        pairs = zip_longest(outline[what], other[what], fillvalue="nothing")
        for number, (value, another) in enumerate(pairs, 1):
            if value != another:
                return f"{what} {number} as {value!r}, and {when} as {another!r}"
    return ""
