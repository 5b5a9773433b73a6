"""Handlers of a user's own: what they may do, and that what they do wrong costs their own trajectory and is said."""

import asyncio
import json
import logging
import re
import textwrap
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from fsm_rollout.agent.graph import AgentGraph, Context
from fsm_rollout.agent.handlers import TEMPLATE_FACTS
from fsm_rollout.concurrency import step_timing
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.errors import ConfigError
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.trajectory.events import Transitioned
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.settings import FrozenMap
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.laws.world import call
from tests.runs import LISTENING, SINGLE, SLOW, TOOLS, Bench, agent, changed, ends, only, rows, run

pytestmark = pytest.mark.virtual_time
HERE = "tests.unit.scheduler.test_handlers"


class Speaker(State):
    """A handler that comes to "said"."""

    triggers: ClassVar = ("said",)


class Liar(Speaker):
    """Returns what it has not declared."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        return Outcome("something else")


class Graceless(Liar):
    """Gives a score that is none."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        ctx.score_turn(float("nan"), 0)
        return Outcome("said")


class Unbuilt(Liar):
    """Cannot be built."""

    def __init__(self, name: str, spec: Any) -> None:
        raise RuntimeError("no such index")


class Debate(Liar):
    """Lets two contexts speak side by side; the first is slower."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        await asyncio.gather(ctx.generate("left"), ctx.generate("right"))
        return Outcome("said")


class Twice(Speaker):
    """Samples one context twice at once."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        await asyncio.gather(ctx.generate("main"), ctx.generate("main"))
        return Outcome("said")


def custom(handler: str, module: str = HERE, **state: Any) -> AgentGraph:
    """Return an agent whose one state, after the prompt, is a handler's own."""
    states = {"PENDING": {}, "OWN": {"handler": f"{module}:{handler}", "timeout": 50.0, "max_visits": 1, **state}}
    return agent({"states": states, "transitions": rows("PENDING prompted OWN", "OWN said TERMINATED as said")})


@pytest.mark.parametrize(
    ("handler", "reason"),
    [("Liar", "failed:UndeclaredOutcome"), ("Twice", "failed:StreamError"), ("Graceless", "failed:StreamError")],
)
def test_a_bad_handler_is_named(handler: str, reason: str) -> None:
    groups, bench = run(custom(handler), [SLOW])
    assert only(groups).stop_reason == reason
    assert bench.engine.load().running == 0


def test_a_handler_that_cannot_be_built_is_named_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"the handler of 'OWN' \(.*Unbuilt\) cannot be built: RuntimeError: no such"):
        run(custom("Unbuilt"), [SLOW])


def debate(slow: str = "left", **options: Any) -> Trajectory:
    graph = custom("Debate").model_copy(update={"contexts": FrozenMap({"left": Context(), "right": Context()})})
    groups, _ = run(graph, lambda r: Turn(text=r.context, delay=9.0 if r.context == slow else 1.0, chunks=2), **options)
    return only(groups)


@pytest.mark.parametrize("slow", ["left", "right"])
def test_generations_side_by_side_are_recorded_in_the_order_in_which_they_were_asked_for(slow: str) -> None:
    trajectory = debate(slow=slow)
    assert trajectory.stop_reason == "said"
    assert [(stream.context, stream.turn) for stream in trajectory.streams[1:]] == [("left", 0), ("right", 1)]
    assert trajectory.text == "right"


def test_generations_side_by_side_keep_that_order_when_they_are_cut_off() -> None:
    trajectory = debate(at={12.0: Bench.cancel})  # left has its first half, right is done
    assert trajectory.stop_reason == "cancelled"
    assert [(s.context, s.turn, s.finish_reason) for s in trajectory.streams[1:]] == [
        ("left", 0, "abort"),
        ("right", 1, "stop"),
    ]


class CancelsItself(Speaker):
    """Awaits something that was cancelled, as code around anyio or httpx may."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        task = asyncio.ensure_future(asyncio.sleep(10))
        task.cancel()
        await task
        return Outcome("said")


class Leaves(Speaker):
    """Returns while a generation of its own is still running."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        self.left = asyncio.ensure_future(ctx.generate("main"))
        await asyncio.sleep(15.0)
        return Outcome("said")


class Deaf(Speaker):
    """Swallows its cancellation and goes on."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        try:
            await asyncio.sleep(40.0)
        except asyncio.CancelledError:
            await asyncio.sleep(1.0)
        return Outcome("said")


class Odd(BaseException):
    """Neither an Exception nor one of Python's own."""


ENDS: dict[str, BaseException] = {"exit": SystemExit(3), "generator": GeneratorExit(), "odd": Odd("strange")}


class Ends(Speaker):
    """Raises what is no Exception, the way that the first message says; the other trajectories go on."""

    class Options(BaseModel):
        kind: str

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        if trajectory.trajectory_id.startswith("p0"):
            await asyncio.sleep(1.0)
            raise ENDS[self.options.kind]  # type: ignore[union-attr]
        await ctx.generate("main")
        return Outcome("said")


class EndingUser:
    """An interaction that raises it, in a thread."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def reply(self, conversation: Conversation) -> Any:
        raise ENDS[self.kind]


class AsyncEndingUser(EndingUser):
    """An interaction that raises it on the loop."""

    async def reply(self, conversation: Conversation) -> Any:
        raise ENDS[self.kind]


def ending_predicate(trajectory: Trajectory) -> bool:
    if trajectory.trajectory_id.startswith("p0"):
        raise SystemExit(3)
    return True


@pytest.mark.parametrize("kind", ENDS)
def test_a_handler_that_raises_what_is_no_exception_fails_its_own_trajectory(kind: str) -> None:
    groups, _ = run(custom("Ends", options={"kind": kind}), ["hm"], 2)
    assert ends(groups) == {"p0/0": f"failed:{type(ENDS[kind]).__name__}", "p1/0": "said"}


@pytest.mark.parametrize("user", ["EndingUser", "AsyncEndingUser"])
@pytest.mark.parametrize("kind", ENDS)
def test_so_does_an_interaction(kind: str, user: str) -> None:
    groups, _ = run(agent(LISTENING, interaction={"use": f"{HERE}:{user}", "kwargs": {"kind": kind}}), ["hm"])
    assert only(groups).stop_reason == f"failed:{type(ENDS[kind]).__name__}"


def test_so_does_a_predicate() -> None:
    asked = rows(f"PENDING prompted GENERATING if {HERE}:ending_predicate")
    groups, _ = run(agent(SINGLE, transitions=[*asked, *SINGLE["transitions"]]), ["hm"], 2)
    assert ends(groups) == {"p0/0": "failed:PredicateFailed", "p1/0": "answered"}


def test_states_are_scored_after_their_visits_and_a_score_that_raises_fails_its_trajectory() -> None:
    frame = changed(TOOLS, PROCESSING_TOOLS={"score": "tests.custom_code:calls_so_far"})
    echo = {"use": "tests.law_tools:echo", "timeout": 50.0}
    script = [call("echo", "a"), call("echo", "b"), "Done."]
    groups, bench = run(agent(frame, tools={"echo": echo}), script)
    trajectory = only(groups)
    assert trajectory.state_scores == [("PROCESSING_TOOLS", 1.0, 1), ("PROCESSING_TOOLS", 2.0, 2)]
    assert Trajectory.fold(event for _, event in bench.log) == trajectory
    frame = changed(SINGLE, PENDING={"score": "tests.custom_code:calls_so_far"})
    assert only(run(agent(frame), ["hm"])[0]).state_scores == [], "None is no opinion"
    frame = changed(SINGLE, GENERATING={"score": "tests.custom_code:calls_so_far"})
    failed = only(run(agent(frame), ["broken"])[0])
    assert (failed.stop_reason, failed.failure, failed.state_scores) == ("failed:ScoreFailed", "environment", [])
    assert str(failed.detail).startswith("score 'tests.custom_code:calls_so_far': KeyError: 'broken'")


class Wrong(Speaker):
    """Goes wrong in a way of its own choice."""

    class Options(BaseModel):
        how: str

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        match self.options.how:  # type: ignore[union-attr]
            case "key":
                raise KeyError("boom")
            case "json":
                json.loads("{")
            case "context":
                await ctx.generate("mian")
            case "writing":
                ctx.write([{"role": "user", "content": "?"}], context="mian")
            case "early":
                ctx.score_turn(0.5)
            case "count":
                await ctx.generate("main")
                ctx.score_turn(0.5, trajectory.generations)
            case "swapped":
                await ctx.generate("main")
                ctx.score_turn(trajectory.generations, 0.0)  # type: ignore[arg-type]
        return Outcome("said")


@cases("scheduler")
def test_a_failure_says_what_and_where_also_where_a_row_takes_it(how: str, error: str, detail: str) -> None:
    trajectory = only(run(custom("Wrong", options={"how": how}), ["hm"])[0])
    assert trajectory.stop_reason == f"failed:{error}"
    line = trajectory.detail or ""
    assert line.startswith(detail)
    assert re.search(r" \(at test_handlers\.py:\d+, in run\)$", line)
    assert not trajectory.turn_scores
    routed: list[Transitioned] = []
    graph = custom("Wrong", options={"how": how})
    routes = [*graph.model_dump()["transitions"], *rows("OWN failed TERMINATED")]
    listeners = [lambda _, event: routed.append(event) if isinstance(event, Transitioned) else None]
    run(AgentGraph(**{**graph.model_dump(), "transitions": routes}), ["hm"], listeners=listeners)
    assert (routed[-1].row, routed[-1].detail) == (2, line)


class Scores(Speaker):
    """Scores each of its turns as it goes, and an earlier one."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        await ctx.generate("main")
        ctx.score_turn(0.25)
        ctx.write([{"role": "user", "content": "And?"}], context="main")
        await ctx.generate("main")
        ctx.score_turn(0.5)
        ctx.score_turn(0.75, 0)
        return Outcome("said")


def test_a_score_is_the_latest_turn_s_unless_it_says_another() -> None:
    assert only(run(custom("Scores"), ["hm", "ho"])[0]).turn_scores == [(0, 0.25), (1, 0.5), (0, 0.75)]


class Looks(Speaker):
    """Scores whether the facts are those that are said to be."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        await ctx.generate("main")
        ctx.score_turn(float(list(ctx.facts()) == list(TEMPLATE_FACTS)))
        return Outcome("said")


def test_templates_may_use_all_that_is_said_and_nothing_else() -> None:
    assert only(run(custom("Looks"), ["hm"])[0]).turn_scores == [(0, 1.0)]
    assert all(f"``{fact}``" in (State.__doc__ or "") for fact in TEMPLATE_FACTS)


def test_the_worked_example_of_a_handler_works() -> None:
    """What stands in the docstring of State, as it stands there."""
    example = (State.__doc__ or "").partition("::\n\n")[2].partition("    What ``ctx`` offers")[0]
    exec(textwrap.dedent(example), globals())
    states = custom("Draft", options={"min_words": 4}, max_visits=2).model_dump()["states"]
    lines = rows("PENDING prompted OWN", "OWN good TERMINATED as good", "OWN poor OWN")
    trajectory = only(run(agent({"states": states, "transitions": lines}), ["one two", "one two three four five"])[0])
    assert trajectory.stop_reason == "good"
    assert trajectory.turn_scores == [(0, 0.5), (1, 1.0)]
    asked = [m["content"] for m in trajectory.streams[0].messages if m["role"] == "user"]
    assert asked == ["Question 0?", "Only 2 words. Write more."]


class Sleeps(Speaker):
    """Keeps the event loop."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        await asyncio.sleep(1.0)
        CLOCK[0] += 2.5
        return Outcome("said")


CLOCK = [0.0]


def test_a_handler_that_keeps_the_event_loop_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_timing, "monotonic", lambda: CLOCK[0])
    groups, _ = run(custom("Sleeps"), ["hm"], 3)
    assert set(ends(groups).values()) == {"said"}
    (log_line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert (
        log_line
        == "the handler of 'OWN' kept the event loop for 2.5 s (trajectory p0/0), and all else waited; use a thread"
    )


class Stubborn(Speaker):
    """Swallows its cancellation and goes on for long."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1000.0)
        await asyncio.sleep(1000.0)
        return Outcome("said")


def test_a_handler_that_ignores_its_cancellation_is_named(caplog: pytest.LogCaptureFixture) -> None:
    groups, _ = run(custom("Stubborn"), ["hm"])
    assert only(groups).stop_reason == "said"
    (log_line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert log_line.startswith("the handler of 'OWN' ignores its cancellation (trajectory p0/0, 30 s so far)")


def test_an_interruption_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENDS, "interrupt", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(custom("Ends", options={"kind": "interrupt"}), ["hm"], 2)


def test_a_handler_that_is_cancelled_by_its_own_code_has_failed() -> None:
    groups, _ = run(custom("CancelsItself"), [SLOW], 2)
    assert list(ends(groups).values()) == ["failed:CancelledError"] * 2


def test_a_generation_left_behind_is_recorded_and_is_the_handler_s_mistake() -> None:
    groups, bench = run(custom("Leaves"), [SLOW])
    assert only(groups).stop_reason == "failed:StreamError"
    assert 0 < only(groups).trained_tokens == len(bench.sampled)


def test_a_handler_that_swallows_its_cancellation_is_cancelled_all_the_same() -> None:
    assert only(run(custom("Deaf"), [SLOW], at={5.0: Bench.cancel})[0]).stop_reason == "cancelled"


class NeverCloses:
    """An interaction that ends at once and hangs when it is closed."""

    async def reply(self, conversation: Any) -> Reply:
        return Reply(None, done=True)

    async def close(self) -> None:
        await asyncio.Event().wait()


def test_an_interaction_that_hangs_on_closing_is_waited_for_a_bounded_time() -> None:
    groups, _ = run(agent(LISTENING, interaction={"use": f"{HERE}:NeverCloses"}), ["x"])
    assert only(groups).stop_reason == "interaction_done"
