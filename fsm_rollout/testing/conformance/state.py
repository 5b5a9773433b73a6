"""Whether a state handler keeps what :mod:`fsm_rollout.states.base` asks of it.

Invariant: the handler runs in a real agent, on the real scheduler and a scripted engine, in virtual time. Only its
``run`` and ``timed_out`` are wrapped, to look at them from outside, so what passes here behaves the same in a rollout.
What was seen in a run is in its :class:`Run`, which contexts hand down, so runs do not see one another's.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.handlers import Handler, checked_handler, load_handler
from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.replica import Placement, PoolTimes
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.errors import ConfigError, RolloutError, single
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing.conformance.runner import Checked, ConformanceError, Subject, Suite, demand, demand_all, named
from fsm_rollout.testing.simulation.laws import Outline, difference, outline
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.testing.simulation.stand_ins import OneEngine
from fsm_rollout.testing.simulation.visits import HandlerVisit, Stepped, held_by, watch_visits
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import LimitName, StopReason
from fsm_rollout.trajectory.event_bytes import decode, encode
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import FrozenMap
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
    visits: list[HandlerVisit] = field(default_factory=list)
    broken: list[ConformanceError] = field(default_factory=list)  # by `timed_out`
    interrupt: Callable[[str], object] = lambda trajectory_id: None  # cancels a trajectory, or sets it aside
    events: dict[str, list[AnyEvent]] = field(default_factory=lambda: defaultdict(list))

    def outline(self, trajectory: Trajectory) -> Outline:
        """Return what must not depend on when things happened."""
        return outline(trajectory, self.events[trajectory.trajectory_id])


def watch(handler: State, run: Run) -> None:
    """Look at each visit of a handler from outside; the first is interrupted where the story says so."""
    real_timed_out = handler.timed_out

    def step(visit: Coroutine[object, object, Outcome], trajectory: Trajectory) -> Stepped[Outcome]:
        cancel_at = None if run.visits else run.story.cancel_at
        return Stepped(visit, cancel_at, lambda: run.interrupt(trajectory.trajectory_id))

    def timed_out(trajectory: Trajectory, ctx: HandlerContext) -> None:
        try:
            real_timed_out(trajectory, ctx)
        except BaseException as error:
            run.broken.append(ConformanceError(5, f"{type(handler).__name__}.timed_out raised {error!r}"))
            raise

    watch_visits(handler, run.visits, step, held_by)
    handler.timed_out = timed_out  # type: ignore[method-assign]


MOST_WAITS = 25  # a visit is interrupted at each of its awaits, up to this many
AWAY_SECONDS = 100.0  # how long a trajectory is set aside before it goes on


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

    1. declared: It can be named in a YAML: a `State` that declares its triggers, and no other's.
    2. outcomes: `run` returns an `Outcome` with a declared trigger, and raises nothing of its own.
    3. no state: It keeps nothing on itself: trajectories come out the same alone and together.
    4. ends: A visit takes at most `patience` seconds with an engine that answers, and ends when it fails.
    5. cancellation: Cancellation passes, at every await; `timed_out` raises nothing.
    6. event loop: The event loop is never blocked.
    7. tasks: No task outlives its visit.
    8. events: It changes a trajectory through `ctx` alone, and what it spends is charged.
    9. limits: A limit that is reached ends the visit: `LimitReached` passes.
    10. randomness: Its randomness is the visit's: the same run gives the same trajectory, whenever made.
    11. resumed: Interrupted at any await and resumed, it comes to the same end (`resumable`).

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
        return SUITE.hold(_Handler(title, graph, opening_prompt, tokenizer, patience, resumable, examples))


SUITE = Suite[Callable[["_Handler"], "int | None"]](check_state)


def _load(path: str, title: str) -> type[Handler]:
    """Return what the handler declares, if it can be used at all."""
    try:
        found = load_handler(path)
        demand(issubclass(found, State), 1, f"{title} is no subclass of fsm_rollout.states.State")
        yields = inspect.isasyncgenfunction(found.run)  # type: ignore[attr-defined]
        demand(not yields, 2, f"{title}.run is an async generator, which cannot be awaited; write it without 'yield'")
        unheard = inspect.iscoroutinefunction(found.timed_out)  # type: ignore[attr-defined]
        demand(not unheard, 1, f"{title}.timed_out is 'async def', and nobody awaits it; write 'def timed_out'")
        return checked_handler(path)
    except ConfigError as error:
        raise ConformanceError(1, f"{title} cannot be loaded: {error}".replace(path, title)) from None


def _agent(
    path: str, handler: type[Handler], state: Mapping[str, object], agent: Mapping[str, Any], patience: float
) -> AgentGraph:
    """Return an agent that answers, visits the handler, and does so again."""
    answers = {"prompt": "Think about it."} if handler.spends == LimitName.ASSISTANT_TURNS else {}
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
        *({"trigger": trigger, "source": CHECKED, "dest": "GOING_ON"} for trigger in handler.triggers),
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


# -- the checks ---------------------------------------------------------------------------------------------------


class _Handler(Subject):
    BLOCKING, ENDLESS, LEAKY, CANCELLED = 6, 4, 7, 5

    def __init__(
        self, title: str, graph: AgentGraph, prompt: Prompt, tokenizer: Any, patience: float,
        resumable: bool, examples: int,
    ) -> None:  # fmt: skip
        super().__init__(f"{title}.run", f"a visit of {title}", patience, examples)
        self.title, self.graph, self.prompt = title, graph, prompt
        self.tokenizer, self.unmade = tokenizer, set() if resumable else {11}
        # What the runs have learnt about the chat template, each for the next.
        self.chats: dict[object, ChatTemplate] = {}
        # The result of a trajectory alone in each story, when the story was first run.
        self.first_outlines: dict[Story, Outline] = {}

    # A story, run and looked at.

    def tell_all(
        self, hold: Callable[[Story], object], part: int = 1, says: Says = SAYS, **more: st.SearchStrategy[object]
    ) -> int:
        """Run ``hold`` on drawn stories, on one of ``part`` examples; what breaks is said with its story."""

        def hold_and_name(story: Story) -> None:
            try:
                hold(story)
            except ConformanceError as error:
                error.message += f"; {story}"
                raise

        return self.search(st.builds(Story, says, **more), hold_and_name, part)

    def tell(self, story: Story, n: int = 1) -> tuple[list[Trajectory], Run]:
        """Run a story in virtual time and look at everything that holds of any run."""
        run, trajectories, failure = Run(story), list[Trajectory](), None
        try:
            trajectories = self.run(self._main(run, n))
        except Exception as error:
            if isinstance(error, ConformanceError) and error.invariant == self.BLOCKING:
                raise
            failure = error
        for visit in run.visits:  # its own error is clearer than its consequences
            self.check_busy(visit.steps)
            demand_all(self.name, *((False, *fault) for fault in visit.faults()))
        if run.broken:
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

    async def _main(self, run: Run, n: int) -> list[Trajectory]:
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

    def _scheduler(self, run: Run) -> Scheduler:
        def keep(trajectory: Trajectory, event: AnyEvent) -> None:
            # A copy, as a journal keeps it: the trajectory holds the event's own lists and mappings.
            run.events[trajectory.trajectory_id].append(decode(encode(event)))

        says, graph = run.story.says, run.story.changed(self.graph)
        engine = ScriptedEngine(lambda request: says[request.turn % len(says)], tokenizer=self.tokenizer)
        pool = EnginePool(Placement(engine), times=PoolTimes(silence=self.patience / 4))
        clients = OneEngine(pool, chats=self.chats)
        scheduler = Scheduler({graph.agent: graph}, clients, listeners=[keep])
        watch(scheduler.agents.of_graph(graph).handlers[CHECKED], run)
        return scheduler

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
        return run.outline(trajectories[0])

    # What is told, and what must hold of it.

    @SUITE.check(1, 2, 4, 6, 7, 8)
    def works_when_all_works(self) -> int:
        """Run with an engine that answers: nothing is raised, nothing takes for ever."""
        return self.tell_all(self._calm)

    def _calm(self, story: Story) -> None:
        trajectories, run = self.tell(story)
        for visit in run.visits:
            took = f"a visit of {self.title} took {visit.steps.seconds:g} s"
            demand(visit.steps.seconds < self.patience, 4, f"{took}; {self.HOW_TIME_PASSES}")
            error = visit.steps.ended_by and single(visit.steps.ended_by)
            if error is not None and not isinstance(error, LimitReached | asyncio.CancelledError):
                raise ConformanceError(2, f"{self.name} raised {type(error).__name__}: {error}") from error
        self.first_outlines.setdefault(story, run.outline(trajectories[0]))
        for trajectory in trajectories:
            reason = trajectory.stop_reason
            late = f"a visit of {self.title} did not end in {self.patience:g} s"
            demand(reason != StopReason.TIMED_OUT, 4, late)
            if StopReason.is_failure(reason):  # later: what it raises itself is told above
                raise self._stuck(f"{reason}: {trajectory.detail}")

    @SUITE.check(9)
    def works_whatever_comes(self) -> int:
        """Run with engines that fail, and with limits and timeouts that are reached."""
        ran = self.tell_all(self.tell, says=SAYS_OR_FAILS)
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

    def _interrupted(self, story: Story) -> Iterator[tuple[str, Trajectory, Run]]:
        """Interrupt the first visit at each of its awaits in turn; yield where, and what came of it."""
        for number in range(1, MOST_WAITS):
            (trajectory,), run = self.tell(replace(story, cancel_at=number))
            if not run.visits or not run.visits[0].steps.cancelled:
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
                resumed = run.outline(trajectory)
                came_to = (
                    f"was set aside {where} and resumed, and came to {_difference(resumed, whole, 'uninterrupted')}"
                )
                advice = "what it does must follow from the trajectory and ctx.rng"
                demand(resumed == whole, 11, f"{self.title} {came_to}; {advice}")

        return self.tell_all(hold, 5, suspend=st.just(True))


def _difference(first: Outline, other: Outline, when: str) -> str:
    """Say the first thing in which two outlines differ, if they do."""
    parted = difference(first, other)
    return "" if parted is None else "{} {} as {!r}, and {} as {!r}".format(*parted[:3], when, parted[3])
