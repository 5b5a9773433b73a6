"""Whether a state handler keeps what :mod:`fsm_rollout.states.base` asks of it.

Invariant: the handler runs in a real agent, on the real scheduler and a scripted engine, in virtual time. Only its
``run`` is wrapped, to watch it from outside, so what passes here behaves the same in a rollout.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from typing import Any

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
from fsm_rollout.testing.conformance.promises import (
    BlockedLoop,
    Checked,
    ConformanceError,
    called,
    importable,
    search,
)
from fsm_rollout.testing.conformance.watched_visits import (
    Story,
    Visited,
    Watch,
    current_watch,
    task_factory,
    watched_class,
)
from fsm_rollout.testing.simulation.blocking import HOW_TIME_PASSES, busy, in_virtual_time
from fsm_rollout.testing.simulation.one_engine import OneEngine
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.trajectory.events import AnyEvent, Generated, Transitioned, decode, encode
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

    1. It can be named in a YAML: it is a subclass of :class:`~fsm_rollout.states.State` that declares its triggers,
       takes its options, and leaves the scheduler's own triggers alone.
    2. `run` returns an :class:`~fsm_rollout.trajectory.trajectory.Outcome` with one of the declared triggers, and raises nothing
       of its own while the engine does its work.
    3. It keeps nothing on itself: one instance serves all trajectories, which come out the same alone and together.
    4. It ends: a visit takes at most ``patience`` seconds with an engine that answers, and ends when that fails.
    5. Cancellation passes, at every await; `timed_out` raises nothing.
    6. The event loop is never blocked.
    7. No task outlives its visit.
    8. It changes a trajectory through the visit alone (so that the events hold all of it), says nothing about the next
       state, and what it spends is charged.
    9. A limit that is reached ends the visit: `LimitReached` passes.
    10. Its randomness is the visit's: the same run gives the same trajectory, however often it was made before.
    11. Interrupted at any await and resumed, it comes to the end that it would have come to (``resumable``).

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
    name = called(handler)
    cls = _load(handler, name)
    with ExitStack() as names:
        watched = watched_class(cls)
        path = names.enter_context(importable(watched))
        try:
            spec = handler_spec(path)
        except ConfigError as error:
            raise ConformanceError(1, f"{name}: {error}".replace(path, name)) from None
        graph = _agent(path, spec, dict(state or {}), dict(agent or {}), patience)
        try:
            watched(CHECKED, graph.states[CHECKED])
        except Exception as error:
            raise ConformanceError(1, f"{name} cannot be made: {type(error).__name__}: {error}") from error
        checker = _Checker(graph, watched, name, tokenizer or embedded_tokenizer(), dict(prompt or {}), patience)
        says = st.lists(_turns, min_size=1, max_size=4).map(tuple)
        broken = st.lists(_turns | _failures, min_size=1, max_size=4).map(tuple)
        ran = search(st.builds(Story, says), checker.calm, examples)
        ran += search(st.builds(Story, broken), checker.runs, examples)
        ran += search(st.builds(Story, says, turns=st.integers(2, 6)), checker.runs, max(1, examples // 4))
        ran += search(st.builds(Story, says, tokens=st.integers(4, 60)), checker.runs, max(1, examples // 2))
        ran += search(st.builds(Story, says, hurry=st.just(True)), checker.runs, max(1, examples // 3))
        ran += search(st.builds(Story, says), checker.same, max(1, examples // 3))
        ran += search(st.builds(Story, says), checker.cancelled, max(1, examples // 5))
        if resumable:
            ran += search(st.builds(Story, says, suspend=st.just(True)), checker.resumed, max(1, examples // 5))
    promises = ["declared", "outcomes", "no state", "ends", "cancellation", "event loop", "tasks", "events", "limits"]
    return Checked((*promises, "randomness", *(["resumed"] if resumable else [])), ran)


def _load(handler: type[State] | str, name: str) -> type[State]:
    try:
        found: object = handler
        if isinstance(handler, str):
            found = load_handler(handler) if handler in BUILT_IN_HANDLERS else load_object(handler)
    except ConfigError as error:
        raise ConformanceError(1, f"{name} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, State)):
        raise ConformanceError(1, f"{name} is no subclass of fsm_rollout.states.State")
    if getattr(found, "__abstractmethods__", None):
        raise ConformanceError(1, f"{name} is abstract; it lacks {', '.join(sorted(found.__abstractmethods__))}")
    if inspect.iscoroutinefunction(found.timed_out):
        raise ConformanceError(1, f"{name}.timed_out is 'async def', and nobody awaits it; write 'def timed_out'")
    return found


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
    if "tools" not in agent:
        agent["tools"] = {"calculate": {"use": "fsm_rollout.tools.calculator:calculate", "timeout": patience}}
    if "interaction" not in agent:
        turns = {"turns": ["And now?", "Are you sure?"]}
        agent["interaction"] = {"use": "fsm_rollout.interactions:ScriptedUser", "kwargs": turns}
    try:
        return AgentGraph(
            **{"agent": "check", "states": states | agent.pop("states", {}), "limits": limits | agent.pop("limits", {}),
               "transitions": [*agent.pop("transitions", []), *rows], **agent}
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"the agent around the handler cannot be made: {error}") from error


# -- runs ---------------------------------------------------------------------------------------------------------


class _Checker:
    def __init__(
        self, graph: AgentGraph, cls: type[State], name: str, tokenizer: Any, prompt: dict[str, Any], patience: float
    ) -> None:
        self.graph, self.cls, self.name, self.tokenizer = graph, cls, name, tokenizer
        self.prompt, self.patience = prompt, patience
        self.first: dict[str, dict[str, list[Any]]] = {}
        """What a trajectory alone came to in each story when that was told for the first time."""

    def run(self, story: Story, n: int = 1) -> tuple[list[Trajectory], Watch]:
        """Run a story in virtual time and look at everything that holds of any run."""
        watch = Watch(story)
        groups: list[Group] = []
        broke: Exception | None = None
        try:
            groups = in_virtual_time(
                self._main(story, watch, n),
                blocking=(6, f"{self.name}.run"),
                endless=(4, f"a visit of {self.name} never ends; {story}"),
                leaky=(7, f"tasks that {self.name} started outlived the run; {story}"),
            )
        except BlockedLoop:
            raise
        except Exception as error:
            broke = error
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        for visited in watch.visits:
            self._look_at(visited, story)
        if isinstance(broke, ConformanceError):  # a visit itself may have said it better
            raise broke
        if broke is not None:
            raise ConformanceError(
                8, f"{self.name} left a trajectory that cannot go on: {type(broke).__name__}: {broke}; change it "
                f"through the visit; {story}"
            ) from broke  # fmt: skip
        for trajectory in trajectories:
            self._look_at_record(trajectory, watch.events[trajectory.trajectory_id], story)
        return trajectories, watch

    async def _main(self, story: Story, watch: Watch, n: int) -> list[Group]:
        asyncio.get_running_loop().set_task_factory(task_factory)
        current_watch.set(watch)
        scheduler, prompts = self._scheduler(story, watch), []
        watch.interrupt = scheduler.suspend if story.suspend else scheduler.cancel
        prompts = [Prompt(prompt_id="p", messages=({"role": "user", "content": "What is 2 + 2?"},), **self.prompt)]
        groups = [group async for group in scheduler.run(prompts, n)]
        aside = [t for group in groups for t in group.trajectories if t.suspended is not None]
        if aside and story.suspend:
            histories = [watch.events.pop(trajectory.trajectory_id) for trajectory in aside]  # they are told again
            await asyncio.sleep(AWAY_SECONDS)
            return [group async for group in self._scheduler(story, watch).run([], n, resume=histories)]
        return groups

    def _scheduler(self, story: Story, watch: Watch) -> Scheduler:
        def script(request: Request) -> Turn:
            return story.says[request.turn % len(story.says)]

        def tell(trajectory: Trajectory, event: AnyEvent) -> None:
            # A copy, as a journal keeps it: the trajectory holds the event's own lists and mappings.
            watch.events[trajectory.trajectory_id].append(decode(encode(event)))

        update = {"assistant_turns": story.turns} | ({} if story.tokens is None else {"response_tokens": story.tokens})
        limits = self.graph.limits.model_copy(update=update)
        states = dict(self.graph.states)
        if story.hurry:
            states[CHECKED] = states[CHECKED].model_copy(update={"timeout": 0.125})
        graph = self.graph.model_copy(update={"limits": limits, "states": FrozenMap(states)})
        engine = ScriptedEngine(script, tokenizer=self.tokenizer)
        dispatchers = OneEngine(engine, queue_timeout=self.patience / 4)
        return Scheduler({graph.agent: graph}, dispatchers, listeners=[tell])

    def _look_at(self, visited: Visited, story: Story) -> None:
        """Look at one visit."""
        outcome, error = visited.outcome, visited.stepped.ended_by
        busy(6, f"{self.name}.run", visited.stepped)
        if visited.left:
            raise ConformanceError(
                7, f"{self.name}.run returned while this task was running: {visited.left[0]}; await it; {story}"
            )
        if not visited.stepped.heard:
            raise ConformanceError(
                5, f"{self.name}.run, cancelled at its await number {story.cancel_at}, went on; let CancelledError "
                f"pass; {story}"
            )  # fmt: skip
        if visited.forbidden is not None:
            raise ConformanceError(
                8, f"{self.name}.run emitted {visited.forbidden}, which is the scheduler's to say; return an outcome; "
                f"{story}"
            )  # fmt: skip
        if visited.timed_out is not None:
            raise ConformanceError(5, f"{self.name}.timed_out raised {visited.timed_out!r}; {story}")
        if visited.limit is not None and error is None:
            raise ConformanceError(
                9, f"{self.name}.run swallowed LimitReached ('{visited.limit}') and returned {outcome}; let it pass; "
                f"{story}"
            )  # fmt: skip
        if not visited.awaited:
            raise ConformanceError(
                2,
                f"{self.name}.run gave {outcome!r:.80}, which cannot be awaited; write 'async def run' without 'yield'",
            )
        if error is None and not (isinstance(outcome, Outcome) and outcome.trigger in self.cls.triggers):
            declared = ", ".join(self.cls.triggers)
            raise ConformanceError(2, f"{self.name}.run returned {outcome!r}; it declares: {declared}; {story}")
        if visited.changed is not None:
            raise ConformanceError(
                3, f"{self.name}.run changed {visited.changed}, which all trajectories share; keep it in the "
                f"trajectory, as events; {story}"
            )  # fmt: skip

    def _look_at_record(self, trajectory: Trajectory, events: list[AnyEvent], story: Story) -> None:
        """Look at what was recorded of a trajectory."""
        if not trajectory.ended:
            raise ConformanceError(4, f"a trajectory through {self.name} did not end; {story}")
        try:
            folded = Trajectory.fold(events)
        except RolloutError as error:
            raise ConformanceError(
                8, f"{self.name} left events that do not fit one another: {error}; {story}"
            ) from None
        if folded != trajectory:
            what = [slot for slot in Trajectory.__slots__ if getattr(folded, slot) != getattr(trajectory, slot)]
            raise ConformanceError(
                8, f"{self.name} changed the trajectory's {', '.join(what)} without an event; use the visit; {story}"
            )
        generations = sum(isinstance(event, Generated) and not event.resumed for event in events)
        if generations > trajectory.spent.get(LimitName.ASSISTANT_TURNS, 0):
            raise ConformanceError(
                8, f"{self.name} made {generations} generations, and {trajectory.spent} was charged; "
                f"generate through the visit; {story}"
            )  # fmt: skip

    def calm(self, story: Story) -> None:
        """Run with an engine that answers: nothing is raised, nothing takes for ever."""
        trajectories, watch = self.run(story)
        for visited in watch.visits:
            error = visited.stepped.ended_by
            if visited.seconds >= self.patience:
                raise ConformanceError(
                    4, f"a visit of {self.name} took {visited.seconds:g} s; {HOW_TIME_PASSES}; {story}"
                )
            if error is not None and not isinstance(error, LimitReached | asyncio.CancelledError):
                single: BaseException = error
                while isinstance(single, BaseExceptionGroup) and len(single.exceptions) == 1:
                    single = single.exceptions[0]
                if not isinstance(single, LimitReached):
                    raise ConformanceError(
                        2, f"{self.name}.run raised {type(single).__name__}: {single}; {story}"
                    ) from single
        self.first.setdefault(str(story), _outline(trajectories[0], watch))
        for trajectory in trajectories:
            if trajectory.stop_reason == StopReason.TIMED_OUT:
                raise ConformanceError(4, f"a visit of {self.name} did not end in {self.patience:g} s; {story}")
            if StopReason.is_failure(trajectory.stop_reason):  # later: what it raises itself is told above
                raise ConformanceError(
                    8, f"{self.name} left a trajectory that cannot go on: {trajectory.stop_reason}: "
                    f"{trajectory.detail}; {story}"
                )  # fmt: skip

    def runs(self, story: Story) -> None:
        """Run, whatever comes."""
        self.run(story)

    def same(self, story: Story) -> None:
        """Run twice alone, and once beside others."""
        latest = self.outline(story)
        alone = self.first.setdefault(str(story), latest)
        for again in (latest, self.outline(story)):
            if again != alone:
                raise ConformanceError(
                    10, f"a trajectory through {self.name} came out with {_difference(alone, again, 'the second time')}"
                    f"; take randomness from visit.rng and keep nothing between visits; {story}"
                )  # fmt: skip
        together = self.outline(story, n=3)
        if together != alone:
            raise ConformanceError(
                3, f"a trajectory through {self.name} came out with {_difference(alone, together, 'beside others')}; "
                f"keep nothing that they share; {story}"
            )  # fmt: skip

    def outline(self, story: Story, n: int = 1) -> dict[str, list[Any]]:
        """Run a story, and return what the first trajectory came to."""
        trajectories, watch = self.run(story, n)
        return _outline(trajectories[0], watch)

    def cancelled(self, story: Story) -> None:
        """Cancel the first visit, at each of its awaits in turn."""
        for number in range(1, MOST_WAITS):
            (trajectory,), watch = self.run(replace(story, cancel_at=number))
            if not watch.visits or watch.visits[0].stepped.cancelled_at is None:
                return
            if trajectory.stop_reason != StopReason.CANCELLED:
                raise ConformanceError(
                    5, f"{self.name} was cancelled at its await number {number}, and the trajectory came to "
                    f"'{trajectory.stop_reason}'; {story}"
                )  # fmt: skip

    def resumed(self, story: Story) -> None:
        """Set a trajectory aside at each await of the first visit, and go on with it on a new scheduler."""
        whole = self.outline(replace(story, suspend=False))
        for number in range(1, MOST_WAITS):
            (trajectory,), watch = self.run(replace(story, cancel_at=number))
            if not watch.visits or watch.visits[0].stepped.cancelled_at is None:
                return
            resumed = _outline(trajectory, watch)
            if resumed != whole:
                raise ConformanceError(
                    11, f"{self.name} was set aside at its await number {number} and resumed, and came to "
                    f"{_difference(resumed, whole, 'uninterrupted')}; what it does must follow from the trajectory and "
                    f"ctx.rng; {story}"
                )  # fmt: skip


def _outline(trajectory: Trajectory, watch: Watch) -> dict[str, list[Any]]:
    """Return what must not depend on when things happened, by what one of it is called in a message."""
    events = watch.events[trajectory.trajectory_id]
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


def _difference(one: dict[str, list[Any]], other: dict[str, list[Any]], when: str) -> str:
    """Say the first thing in which two outlines differ."""
    what = next(key for key in one if one[key] != other[key])
    pairs = enumerate(zip_longest(one[what], other[what], fillvalue="nothing"), 1)
    number, (mine, others) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"{what} {number} as {mine!r}, and {when} as {others!r}"
