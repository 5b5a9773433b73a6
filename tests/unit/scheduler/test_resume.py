"""Going on: after a crash at any event, after a suspension at any time, in the next call of a partial rollout."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from fsm_rollout.agent.graph import AgentGraph, InteractionSpec
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.environment.rewards import Reward
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.errors import ConfigError, JournalError
from fsm_rollout.scheduler.failure_policy import Failures, ToolFailures
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing import run_virtual
from fsm_rollout.trajectory import journal
from fsm_rollout.trajectory.events import AnyEvent, Scored
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.embedded import tokenizer
from tests.laws.agents import agents
from tests.laws.world import call, scripted, turns
from tests.runs import (
    ASKS,
    TOOLS,
    Bench,
    agent,
    asking,
    changed,
    histories,
    ids_of,
    only,
    outline,
    prompts,
    rows,
    slow,
    with_tool,
)

pytestmark = pytest.mark.virtual_time

HERE = "tests.unit.scheduler.test_resume"
SCRIPTS = st.lists(turns(failures=False), min_size=1, max_size=6)


class Replying:
    """Replies twice, by what the trajectory says, then is done; asks a model in between."""

    resumable = True

    async def reply(self, conversation: Conversation) -> Reply:
        await asyncio.sleep(0.3)
        if conversation.replies >= 2:
            return Reply(None, score=0.25, done=True)
        verdict = await conversation.ask("judge", [{"role": "user", "content": "How was it?"}], Sampling(max_tokens=8))
        return Reply(f"Go on, {verdict.encode().hex()[:8]}.", score=0.5)


def replied_to(graph: AgentGraph) -> AgentGraph:
    """Have an agent's interaction, if it has one, ask a model."""
    if graph.interaction is None:
        return graph
    return graph.model_copy(update={"interaction": InteractionSpec(use=f"{HERE}:Replying")})


def goes_on_from_anywhere(
    make: Callable[[], Bench], n: int = 1, listed: int = 1, *, children: bool = False
) -> tuple[list[tuple[Any, ...]], list[tuple[str, AnyEvent]]]:
    """Try every event of a run as the last one before a crash; return what the run comes to, and its events."""
    whole = make()
    expected = outline(whole.go(n, listed), children=children)
    for cut in range(len(whole.log) + 1):
        groups = make().go(n, listed, resume=histories(whole.log[:cut]))
        assert outline(groups, children=children) == expected, cut
        assert not any(group.discarded for group in groups)
    return expected, whole.log


@given(agents(timeouts=False), SCRIPTS, st.floats(0, 1))
def test_a_run_killed_at_any_event_goes_on_to_the_same_end(graph: AgentGraph, script: list[Turn], part: float) -> None:
    """Law 6: nothing is done twice, nothing is lost, and every token is the one that it would have been."""
    whole, again = (Bench(replied_to(graph), lambda request: scripted(script, request)) for _ in range(2))
    expected = outline(whole.go())
    cut = round(part * len(whole.log))
    note(f"cut after {cut} of {len(whole.log)}: {[type(e).__name__ for _, e in whole.log[max(0, cut - 4) : cut]]}")
    groups = again.go(resume=histories(whole.log[:cut]))
    assert outline(groups) == expected
    assert sorted(group.index for group in groups) == [0, 1]
    live = {t.trajectory_id: t for group in groups for t in group.all}
    for history in histories(again.log):
        trajectory = Trajectory.fold(history)
        assert trajectory == live[trajectory.trajectory_id]


@given(agents(timeouts=False), SCRIPTS, st.floats(0, 6), st.integers(1, 2))
def test_a_run_set_aside_at_any_time_goes_on_to_the_same_end(
    graph: AgentGraph, script: list[Turn], at: float, times: int
) -> None:
    once, bench = (Bench(replied_to(graph), lambda request: scripted(script, request)) for _ in range(2))
    expected = outline(once.go())

    async def main() -> list[Group]:
        groups: list[Group] = []
        for time in range(times + 1):
            resume = [trajectory for group in groups for trajectory in group.all]
            groups = await bench.run(resume=resume, at={at: bench.stop} if time < times else None)
            await asyncio.sleep(100.0)  # away for a while, which counts against nothing
        return groups

    groups = run_virtual(main())
    assert outline(groups) == expected
    assert all(t.ended and t.suspended is None for group in groups for t in group.trajectories)


class Thorough(State):
    """Generates twice, writes in between, asks, and scores: every step that a handler can take."""

    triggers = ("generated",)
    spends = "assistant_turns"

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        await ctx.generate("main")
        await asyncio.sleep(ctx.rng.random())
        verdict = await ctx.ask("judge", [{"role": "user", "content": "Well?"}], Sampling(max_tokens=8))
        ctx.write([{"role": "user", "content": f"They said {verdict.encode().hex()[:8]}."}], context="main")
        ctx.score_turn(0.5)
        generated = await ctx.generate("main")
        for attempt in generated.attempts:
            await ctx.call_tool(attempt)
        ctx.score_turn(0.75)
        return Outcome("generated")


@pytest.mark.parametrize(("initial", "reset"), [("PENDING", False), ("PENDING", True), ("WORKING", False)])
def test_a_handler_of_many_steps_goes_on_from_any_of_them(initial: str, reset: bool) -> None:
    """What was spent, asked and scored counts once.

    Entering WORKING writes its prompt into an open context, begins the context anew, or opens it.
    """
    working = {"handler": f"{HERE}:Thorough", "prompt": "Visit {{ visits.WORKING }}", "timeout": 100.0, "reset": reset}
    graph = AgentGraph(
        agent="a",
        initial=initial,
        limits={"assistant_turns": 9, "tool_calls": 6, "user_turns": 3},
        tools={"tool": {"use": "tests.law_tools:echo", "timeout": 50.0}},
        interaction={"use": f"{HERE}:Replying"},
        states={"PENDING": {}, "WORKING": working, "INTERACTING": {"timeout": 50.0}},
        transitions=rows(
            "PENDING prompted WORKING",
            "WORKING generated INTERACTING",
            "INTERACTING replied WORKING",
            "INTERACTING interaction_done TERMINATED",
        ),
    )

    def choose(request: Request) -> Turn:
        text = call("tool", "again") if request.turn % 2 and request.context == "main" else f"turn {request.turn}"
        return Turn(text=text, delay=0.5, chunks=2)

    expected, log = goes_on_from_anywhere(lambda: Bench(graph, choose))
    assert {"assistant_turns": 6, "tool_calls": 3, "user_turns": 3} in expected[0]
    every = "LimitCharged Scored ModelQueried UserReplied Called MessagesAppended Generated PromptExtended Ended"
    assert {type(event).__name__ for _, event in log} >= set(every.split())


@pytest.mark.parametrize(("limit", "seconds"), [({}, 3.0), ({"wall_seconds": 4.0}, 200.0)])
def test_a_timeout_stays_one_wherever_its_run_was_cut_off(limit: dict[str, float], seconds: float) -> None:
    """After the calls were told that their time is up, only their row is left."""
    frame = changed(
        TOOLS, "PROCESSING_TOOLS timed_out HURRYING", "HURRYING written GENERATING", GENERATING={"max_visits": 3},
        PROCESSING_TOOLS={"timeout": seconds, "prompt": "Now the tools.", "parallel": 2},
        HURRYING={"handler": "write", "prompt": "Hurry!", "max_visits": 2},
    )  # fmt: skip
    wall = [{"name": "limit", "argument": "wall_seconds"}]
    frame["transitions"] += [{**row, "conditions": wall} for row in rows("PROCESSING_TOOLS limit_reached HURRYING")]
    tools = {name: {"use": f"tests.law_tools:{name}", "timeout": 500.0} for name in ("echo", "hang")}
    graph = agent(frame, limits={"assistant_turns": 6, "tool_calls": 6, **limit}, tools=tools)
    calls = "\n".join([call("hang", "x"), call("echo", "hello"), call("hang", "y"), call("echo", "never")])
    expected, log = goes_on_from_anywhere(
        lambda: Bench(graph, lambda request: Turn(text="done" if request.turn else calls, delay=0.5))
    )
    assert Trajectory.fold([event for _, event in log]).visits["HURRYING"] == 1
    assert expected


def test_a_sub_agent_that_was_cut_off_goes_on_when_its_call_is_made_again() -> None:
    graph = asking(agent(agent="helper"))

    def choose(request: Request) -> Turn:
        return Turn(text=ASKS if request.agent == "a" and request.turn < 2 else "done", delay=0.5, chunks=2)

    expected, _ = goes_on_from_anywhere(lambda: Bench(graph, choose), children=True)
    assert [row[0] for row in expected] == ["p0/0", "p0/0/ask.1", "p0/0/ask.2"]


def test_a_failure_that_ends_the_trajectory_ends_it_after_an_interruption_too() -> None:
    graph, failures = with_tool("tests.law_tools:fail"), Failures(tool=ToolFailures(do="end"))
    expected, _ = goes_on_from_anywhere(
        lambda: Bench(graph, lambda request: Turn(text=call("tool", "no")), failures=failures)
    )
    assert "failed:ToolError" in expected[0]


def test_time_away_counts_against_no_limit() -> None:
    bench = Bench(agent(limits={"assistant_turns": 2, "wall_seconds": 10.0}), slow({"p0": 0.5}))
    trajectory = only(run_virtual(bench.interrupted(2.0, away=1000.0)))
    assert trajectory.stop_reason == "answered"
    assert 2.0 < (trajectory.wall_seconds or 0.0) < 10.0
    assert trajectory.suspended_seconds == pytest.approx(1000.0)
    assert [request.session for request in bench.asked] == ["p0/0/main/1", "p0/0/main/1~1"], "the first has ended"


async def test_two_steps_of_one_rollout_are_different_samples() -> None:
    """Sub-agents' too."""
    graph = asking(agent(agent="helper"))
    bench = Bench(graph, lambda r: Turn(text=ASKS if r.agent == "a" and r.turn == 0 else "done", delay=0.5))
    trajectories = [t for group in [*await bench.run(), *await bench.run()] for t in group.all]
    assert len({t.seed for t in trajectories}) == len(trajectories) == 16


# -- which groups go on ----------------------------------------------------------------------------------------------


def test_each_resumed_group_has_as_many_samples_as_it_had_or_as_the_run_has() -> None:
    large, small, resuming = (Bench(agent(), slow()) for _ in range(3))
    large.go(3, 1)
    small.go(1, 2)
    second = [(trajectory_id, event) for trajectory_id, event in small.log if trajectory_id.startswith("p1/")]
    groups = resuming.go(2, 0, resume=histories([*large.log, *second]))
    assert {group.group_id: len(group.trajectories) for group in groups} == {"p0": 3, "p1": 2}


def test_a_prompt_that_a_resumed_group_belongs_to_cannot_come_twice() -> None:
    before, after = Bench(agent(), slow()), Bench(agent(), slow())
    before.go(1, 1)
    with pytest.raises(ConfigError, match="prompt id 'p0' is used twice"):
        after.go(1, [*prompts(1), *prompts(1)], resume=histories(before.log))


def test_a_reopened_group_keeps_its_place_its_prompts_own_sampling_and_its_attempt() -> None:
    bench = Bench(agent(), slow({"p0": 0.2}), max_staleness=0)
    bench.go(1, 1, at={1.1: bench.new_weights, 2.1: bench.stop})
    left = [history for history in histories(bench.log) if Trajectory.fold(history).suspended]
    assert [history[0].trajectory_id for history in left] == ["p0/0~1"]
    second = {group.group_id: group for group in Bench(agent(), slow()).go(1, 2, resume=left)}
    assert {group_id: group.index for group_id, group in second.items()} == {"p0": 0, "p1": 1}
    assert second["p0"].trajectories[0].trajectory_id == "p0/0~1"

    half = Bench(agent(), slow({"p1": 0.2}))
    half.go(1, prompts(1, start=1, sampling=Sampling(max_tokens=4)), at={0.3: half.stop})
    _, group = sorted(Bench(agent(), slow()).go(1, 2, resume=histories(half.log)), key=lambda group: group.index)
    assert (group.group_id, group.index) == ("p1", 1)
    assert len(ids_of(group.trajectories[0])) == 4
    assert group.trajectories[0].stop_reason == "truncated"


# -- through the front door ------------------------------------------------------------------------------------------


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    """And leaves the journal alone."""
    stopped = Bench(agent(), slow())
    (group, _) = stopped.go(1, 2, at={0.5: stopped.stop})
    renamed = {
        "states": {"PENDING": {}, "THINKING": {"handler": "generate", "timeout": 100.0}},
        "transitions": rows("PENDING prompted THINKING", "THINKING generated TERMINATED"),
    }
    with journal.Journal(tmp_path / "j.sqlite") as kept:
        for graph, resume, error, says in (
            (agent(agent="b"), group.all, ConfigError, "agent 'a' of a trajectory to resume is not one of the run's"),
            (agent(renamed), histories(stopped.log), ConfigError, "stands in state 'GENERATING', which agent 'a' does"),
            (agent(), group.all, JournalError, "'prompted' comes first"),
        ):
            with pytest.raises(error, match=says):
                Bench(graph, slow(), journal=kept).go(1, 2, resume=resume)
        assert len(Bench(agent(), slow(), journal=kept).go(1, 2, resume=histories(stopped.log))) == 2


@pytest.mark.parametrize("of_group", [False, True])
def test_what_was_scored_before_an_interruption_is_not_judged_again(of_group: bool) -> None:
    judged: list[str] = []

    def one(trajectory: Trajectory) -> float:
        judged.append(trajectory.trajectory_id)
        return float(trajectory.sample)

    def all_of(group: Sequence[Trajectory]) -> list[float]:
        return [one(trajectory) for trajectory in group]

    reward = Reward(all_of if of_group else one)
    first = Bench(agent(), slow({"p1": 20.0}), reward=reward)
    first.go()
    assert sorted(judged) == ["p0/0", "p0/1", "p1/0", "p1/1"]
    cut = max(i for i, (name, event) in enumerate(first.log) if name == "p0/1" and isinstance(event, Scored)) + 1
    judged.clear()
    groups = Bench(agent(), slow(), reward=reward).go(resume=histories(first.log[:cut]))
    assert sorted(judged) == ["p1/0", "p1/1"]
    assert [t.score for group in sorted(groups, key=lambda g: g.index) for t in group.trajectories] == [0, 1, 0, 1]


@pytest.mark.parametrize(("count", "target"), [(6, None), (2, 2)])
async def test_a_data_set_that_breaks_leaves_nothing_without_an_end(count: int, target: int | None) -> None:
    """Without a target what runs is cancelled; with one it is carried, and goes on."""
    bench = Bench(agent(), slow({"p0": 0.3}), concurrency=2)

    def source() -> Iterator[Prompt]:
        yield from prompts(count)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        await bench.run(1, source(), target_groups=target)
    assert target is None or "p0" in {group.group_id for group in bench.scheduler.carried}
    groups = await bench.run(1, [])
    assert {t.stop_reason for group in groups for t in group.trajectories} == ({"answered"} if target else set())
    if target is None:
        stop_reasons = {Trajectory.fold(history).stop_reason for history in histories(bench.log)}
        assert stop_reasons == {"answered", "cancelled"}


@cases("scheduler")
def test_a_turn_of_which_nothing_came_is_asked_for_again_without_a_second_header(
    lines: list[str], hurrying: dict[str, Any], streams: int, between: str
) -> None:
    """Rows that lead from a timeout back to generating: the header stands there already."""
    frame = changed(TOOLS, *lines, GENERATING={"timeout": 3.0}, **hurrying)
    tries: dict[int, int] = defaultdict(int)

    def choose(request: Request) -> Turn:
        tries[request.turn] += 1
        if request.turn == 0:
            return Turn(text=call("tool", "hello"))
        return Turn(text="done", delay=50.0 if tries[1] == 1 else 0.1)

    graph = agent(frame, tools={"tool": {"use": "tests.law_tools:echo", "timeout": 50.0}})
    trajectory = only(Bench(graph, choose).go(1, 1))
    assert trajectory.stop_reason == "answered", trajectory.detail
    assert trajectory.visits["GENERATING"] == 3
    assert len(trajectory.streams) == streams
    text = tokenizer().decode(trajectory.streams[-1].tokens.ids)
    result = "<tool_response>\nhello\n</tool_response><|im_end|>\n"
    assert text.endswith(f"{result}{between}<|im_start|>assistant\ndone<|im_end|>")
    if streams == 2:
        first, second = trajectory.streams
        assert second.tokens.trained_length == len(tokenizer().encode("done<|im_end|>"))
        assert first.tokens.trained_length > 0


def test_agents_of_one_name_are_not_taken_for_one_another() -> None:
    one, other = agent(), agent(TOOLS)
    bench = Bench(one, lambda request: Turn(text="Done.", delay=20.0))
    left = [t for group in bench.go(1, 1, at={5.0: lambda: bench.scheduler.suspend("p0/0")}) for t in group.all]

    async def again(*graphs: AgentGraph) -> list[Group]:
        agents = {str(number): graph for number, graph in enumerate(graphs)}
        scheduler = Scheduler(agents, {"policy": EngineClient(bench.engine)})
        return [group async for group in scheduler.run([], 1, resume=left)]

    with pytest.raises(ConfigError, match="several agents of the run are called 'a'"):
        run_virtual(again(other, one))
    assert [group.ended for group in run_virtual(again(one, one.model_copy()))] == [True], "the same one twice is one"
