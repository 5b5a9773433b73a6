"""One run of a state handler under check: what is drawn for it, and what was seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from hypothesis import strategies as st

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing.conformance.runner import ConformanceError
from fsm_rollout.testing.simulation.laws import Outline, outline
from fsm_rollout.testing.simulation.visits import HandlerVisit, Stepped, watch_visits
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.outcome import Outcome
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

    watch_visits(handler, run.visits, step)
    handler.timed_out = timed_out  # type: ignore[method-assign]
