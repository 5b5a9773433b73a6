"""Going on: after a crash at any event, after a suspension at any time, in the next call of a partial rollout."""

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import fsm_rollout as fr
from fsm_rollout.agent.graph import AgentGraph, InteractionSpec
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.environment.rewards import GroupFilter, Reward, scores_differ
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.errors import ConfigError, JournalError, TargetNotReached
from fsm_rollout.scheduler.failure_policy import Failures, ToolFailures
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing import run_virtual
from fsm_rollout.tools import ToolContext
from fsm_rollout.trajectory import journal
from fsm_rollout.trajectory.enums import FailureClass
from fsm_rollout.trajectory.events import AnyEvent, CallBegun, Ended, Resumed, Scored
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
    ends,
    histories,
    only,
    outline,
    prompts,
    results,
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


# -- sub-agents ------------------------------------------------------------------------------------------------------


def asks(tool: str, tasks: Sequence[str]) -> str:
    made = ({"name": tool, "arguments": {"task": task}} for task in tasks)
    return "\n".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in made)


def family(timeout: float = 900.0, retry: int = 1) -> AgentGraph:
    """An agent that calls agents that call agents."""
    calling = changed(TOOLS, PROCESSING_TOOLS={"timeout": 900.0})
    deep = agent(agent="deep")
    ask = {"agent": deep, "timeout": timeout, "retry": {"attempts": retry}}
    middle = agent(calling, agent="middle", tools={"ask": ask})
    return agent(calling, agent="outer", tools={"delegate": {"agent": middle, "timeout": 900}})


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=2),
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
    st.sampled_from([1, 2]),
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
    st.booleans(),
)
def test_whoever_is_killed_and_resumed_however_often_rows_ids_and_order_are_those_of_one_run(
    calls: list[int], deeper: list[int], retry: int, cuts: list[float], kindly: bool
) -> None:
    """``cuts``: at which part of what is then in the journal the run ends; kindly, by being set aside."""

    def script(request: Request) -> Turn:
        number = request.sampling.seed % 1000
        counts, tool = {"outer": (calls, "delegate"), "middle": (deeper, "ask"), "deep": ([], "")}[request.agent]
        if request.turn < len(counts) and counts[request.turn]:
            tasks = [f"{request.agent} {request.turn} {index}" for index in range(counts[request.turn])]
            return Turn(text=asks(tool, tasks), delay=0.1 + number % 7)
        if request.agent == "deep" and retry == 2 and number % 2:
            return Turn(text="", error="Boom: no", delay=0.3)
        return Turn(text=f"answer {number}", delay=0.1 + number % 5, chunks=2)

    graph = family(retry=retry)
    whole = Bench(graph, script)
    expected = outline(whole.go(), children=True)
    log = whole.log
    for part in cuts:
        kept = log[: round(part * len(log))]
        again = Bench(graph, script)
        groups = again.go(resume=histories(kept), at={part * 20.0: again.stop} if kindly else None)
        assert kindly or outline(groups, children=True) == expected
        log = kept + again.log[len(kept) :]  # what it resumed is recorded again, first
    assert outline(Bench(graph, script).go(resume=histories(log)), children=True) == expected


@pytest.mark.parametrize("seconds", [0.7, 1.3, 4.1])
def test_sub_agents_are_carried_with_those_they_serve(seconds: float) -> None:
    """The first of two groups completes the target while calls of the other's are under way."""

    def script(request: Request) -> Turn:
        delay = 1.0 if request.group_id == "p0" else 1.0 + seconds
        tool = {"outer": "delegate", "middle": "ask"}.get(request.agent)
        return Turn(text="done" if tool is None or request.turn else asks(tool, ["a", "b"]), delay=delay, chunks=2)

    expected = outline(Bench(family(), script).go(1), children=True)
    bench = Bench(family(), script)

    async def main() -> list[Group]:
        return await bench.run(1, target_groups=1, over_sample=2) + await bench.run(1, [])

    groups = run_virtual(main())
    assert outline(groups, children=True) == expected
    assert any(t.resumptions for t in groups[1].all if t.parent_id is not None) or seconds > 2
    assert not any(group.active or group.discarded for group in groups)


async def suspended(bench: Bench, at: float | None) -> list[Group]:
    """Run one sample; set it aside at some time, if any, and go on with it at once."""
    groups = await bench.run(1, 1, at={at: lambda: bench.scheduler.suspend("p0/0")} if at is not None else None)
    return groups if at is None else await bench.run(1, 0, resume=groups[0].all)


@pytest.mark.parametrize("at", [5.0, 25.0, 45.0, 65.0, 85.0])
def test_sub_agents_say_the_same_wherever_their_callers_were_interrupted(at: float) -> None:
    """And those that served a sub-agent whose call is made again are in no batch either."""

    def script(request: Request) -> Turn:
        tool = {"outer": "delegate", "middle": "ask"}.get(request.agent)
        last = tool is None or request.turn
        return Turn(text=f"answer {request.sampling.seed % 100_000}" if last else asks(str(tool), ["t"]), delay=20.0)

    whole, cut = (run_virtual(suspended(Bench(family(), script), when))[0].all for when in (None, at))
    assert [trajectory.stop_reason for trajectory in cut] == ["answered"] * 3
    for one, other in zip(whole, cut, strict=True):
        assert [stream.tokens.ids for stream in one.streams] == [stream.tokens.ids for stream in other.streams]


@pytest.mark.parametrize("at", [None, 35.0])
def test_a_sub_agent_that_its_call_gave_up_stays(at: float | None) -> None:
    """Its call was answered (its time was up), so an interruption later on takes nothing of it back."""

    def script(request: Request) -> Turn:
        if request.agent == "helper":
            return Turn(text="a b c d e f", delay=2.0, chunks=6)
        return Turn(text="Done." if request.turn else ASKS, delay=20.0)

    (group,) = run_virtual(suspended(Bench(asking(agent(agent="helper"), timeout=5.0), script), at))
    assert [(t.stop_reason, t.trained_tokens > 0) for t in group.all] == [("answered", True), ("cancelled", True)]
    assert group.discarded == []


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


async def test_what_waits_can_be_dropped_after_an_interruption_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(agent(), slow())
    interrupted: list[Group] = []
    drop = bench.scheduler._drop

    async def first_is_interrupted(group: Group) -> None:
        await drop(group)
        if not interrupted:
            interrupted.append(group)
            raise KeyboardInterrupt

    monkeypatch.setattr(bench.scheduler, "_drop", first_is_interrupted)
    await bench.run(1, 6, target_groups=4)
    assert len(bench.scheduler.carried) > 1
    with pytest.raises(KeyboardInterrupt):
        await bench.scheduler.drop_carried()
    rest = await bench.scheduler.drop_carried()
    assert rest
    assert interrupted[0] not in rest
    assert not bench.scheduler.carried


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


# -- partial rollouts ------------------------------------------------------------------------------------------------


def ids_of(trajectory: Trajectory) -> list[int]:
    return trajectory.streams[-1].tokens.response_ids().tolist()


def test_a_target_is_enough_and_the_rest_goes_on_in_the_next_run_on_new_weights() -> None:
    bench = Bench(agent(), slow({"p0": 0.3, "p1": 0.1, "p2": 0.2, "p3": 0.4}))

    async def main() -> tuple[list[Group], list[Group], list[Group]]:
        first = await bench.run(2, 4, target_groups=2, over_sample=2)
        aside = bench.scheduler.carried
        assert not bench.engine.load().running, "the rest is aborted"
        await bench.scheduler.update_weights({}, 7)
        return first, aside, await bench.run(2, prompts(1, start=9))

    first, aside, second = run_virtual(main())
    assert [group.group_id for group in first] == ["p1", "p2"]
    assert [group.group_id for group in aside] == ["p0", "p3"]
    assert sorted(group.group_id for group in second) == ["p0", "p3", "p9"]
    assert bench.scheduler.carried == []
    whole = [*tokenizer().encode("word " * 10), tokenizer().eos_token_id]
    for trajectory in [t for group in second for t in group.trajectories]:
        assert trajectory.stop_reason == "answered"
        versions = trajectory.streams[0].tokens.response_versions().tolist()
        assert ids_of(trajectory) == whole, "it goes on where it was, and nothing is sampled twice"
        assert versions == sorted(versions)
        assert set(versions) == ({7} if trajectory.group_id == "p9" else {0, 7})
    for request in bench.asked:  # what goes on sends what it has, and asks for the rest
        assert request.sampling.max_tokens == 64 - request.sampled


@pytest.mark.parametrize("deliver_at_end", [False, True])
def test_what_ends_beyond_the_target_comes_first_in_the_next_run(deliver_at_end: bool) -> None:
    bench = Bench(agent(), slow())  # all groups end at the same moment

    async def main() -> list[list[str]]:
        options: dict[str, Any] = {"target_groups": 2, "deliver_at_end": deliver_at_end}
        runs = [await bench.run(2, 5, over_sample=3, **options)]
        runs += [await bench.run(1, [], **options) for _ in range(3)]
        return [[group.group_id for group in run] for run in runs]

    runs = run_virtual(main())
    assert [len(run) for run in runs] == [2, 2, 1, 0]
    assert sorted(group_id for run in runs for group_id in run) == ["p0", "p1", "p2", "p3", "p4"]


async def test_what_is_carried_goes_on_in_the_order_of_its_prompts() -> None:
    async def judge(trajectory: Trajectory) -> float:
        await asyncio.sleep(10.0 * (trajectory.group_id == "p0"))
        return 1.0

    delays = {"p0": 1.0, "p1": 5.0, "p2": 2.0}
    bench = Bench(agent(), lambda r: Turn(text="done", delay=delays[r.group_id]), reward=Reward(judge))
    await bench.run(1, 3, target_groups=1, over_sample=3)
    assert [group.group_id for group in bench.scheduler.carried] == ["p0", "p1"], "also where the first is being scored"


async def test_a_target_takes_no_more_prompts_than_it_needs_and_begins_what_is_missing_of_a_group_later() -> None:
    bench = Bench(agent(), slow(), concurrency=3)
    taken: list[Prompt] = []
    source = (taken.append(prompt) or prompt for prompt in prompts(1000))  # type: ignore[func-returns-value]
    both = await bench.run(2, source, target_groups=2), await bench.run(2, source, target_groups=3)
    await bench.scheduler.drop_carried()
    first, second = both
    assert (len(first), len(second)) == (2, 3)
    assert len(taken) < 10
    for group in first + second:
        assert [t.trajectory_id for t in group.trajectories] == [f"{group.group_id}/0", f"{group.group_id}/1"]
        assert group.ended


def test_a_group_filter_drops_and_a_target_refills() -> None:
    bench = Bench(
        agent(), lambda request: Turn(text="word", delay=float(request.group_id[1:]) + 0.1),
        reward=Reward(lambda trajectory: trajectory.sample if trajectory.group_id in ("p1", "p3", "p4") else 1.0),
        group_filter=GroupFilter(scores_differ),
    )  # fmt: skip
    groups = bench.go(2, 6, target_groups=2)
    assert [(group.group_id, group.dropped) for group in groups] == [
        ("p0", True), ("p1", False), ("p2", True), ("p3", False),
    ]  # fmt: skip


def test_a_filter_that_fails_keeps_the_group() -> None:
    def broken(group: Sequence[Trajectory]) -> bool:
        raise RuntimeError("no")

    bench = Bench(agent(), slow(), group_filter=GroupFilter(broken))
    assert [group.dropped for group in bench.go()] == [False, False]
    with pytest.raises(ConfigError, match="must take one argument, a group"):
        GroupFilter(lambda: True)


OPENED: list[str] = []


class Notebook:
    """A tool that remembers: one per trajectory, closed at its end."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def create(self, context: ToolContext) -> None:
        OPENED.append(f"+{context.trajectory_id}")

    async def execute(self, line: str) -> str:
        """Write a line down and read them all.

        Args:
            line: What to write.
        """
        self.lines.append(line)
        return " ".join(self.lines)

    async def release(self) -> None:
        OPENED.append("-")


def noting(**options: Any) -> Bench:
    """p0 writes two lines down, a turn each; p1 answers while it is about to do so for the second time."""
    OPENED.clear()
    says = [call("tool", text).replace('"text"', '"line"') for text in ("one", "two")] + ["done"]
    return Bench(
        with_tool(f"{HERE}:Notebook"),
        lambda r: Turn(text="done", delay=3.0) if r.group_id == "p1" else Turn(text=says[r.turn], delay=2.0),
        **options,
    )


def test_what_is_carried_keeps_its_tools_open() -> None:
    bench = noting()

    async def main() -> list[Group]:
        await bench.run(1, target_groups=1)
        assert OPENED == ["+p0/0"], "set aside in its second turn, and still open"
        return await bench.run(1, [])

    assert results(only(run_virtual(main()))) == ["one", "one two"]
    assert OPENED == ["+p0/0", "-"]
    bench = noting()

    async def given_up() -> list[Group]:
        await bench.run(1, target_groups=1)
        return await bench.scheduler.drop_carried()

    assert only(run_virtual(given_up())).suspended == "carried"
    assert OPENED[-1] == "-"


async def test_two_may_drop_what_waits_at_once() -> None:
    bench = noting()
    await bench.run(1, 3, target_groups=1, over_sample=3)
    first, second = await asyncio.gather(bench.scheduler.drop_carried(), bench.scheduler.drop_carried())
    assert {group.group_id for group in first + second} == {"p0", "p2"}
    assert OPENED == ["+p0/0", "+p2/0", "-", "-"]


async def test_stale_ones_that_wait_release_their_tools_and_are_not_handed_out() -> None:
    bench = noting(max_staleness=0)
    await bench.run(1, target_groups=1, over_sample=2)
    assert OPENED == ["+p0/0"]
    await bench.new_weights()
    assert OPENED == ["+p0/0", "-"]
    (group,) = await bench.run(1, [])
    assert [t.suspended for t in group.discarded] == [None]
    assert set(group.trajectories[0].streams[0].tokens.response_versions().tolist()) == {-1, 1}


CALLED: list[str] = []


async def pay(text: str) -> str:
    """Pay somebody.

    Args:
        text: Whom.
    """
    CALLED.append(text)
    await asyncio.sleep(10.0)
    return f"paid {text}"


@cases("scheduler")
def test_a_call_cut_off_by_an_interruption_is_made_again_only_if_it_may_be(
    repeatable: bool, names: list[str], made: list[str], told: list[str]
) -> None:
    CALLED.clear()
    script = ["\n".join(call("tool", name) for name in names), "done"]
    tools = {"tool": {"use": f"{HERE}:pay", "timeout": 50.0, "repeatable": repeatable}}
    graph = agent(changed(TOOLS, PROCESSING_TOOLS={"parallel": 1}), tools=tools)
    bench = Bench(graph, lambda request: Turn(text=script[request.turn], delay=1.0))
    trajectory = only(run_virtual(bench.interrupted(5.0)))
    assert made == CALLED
    assert all(part in result for part, result in zip(told, results(trajectory), strict=True))
    assert trajectory.spent["tool_calls"] == len(names)


# -- weights and staleness -------------------------------------------------------------------------------------------


def test_weights_change_while_generations_wait_and_tools_go_on() -> None:
    CALLED.clear()
    script = [call("tool", "bob"), "word " * 10]
    bench = Bench(
        with_tool(f"{HERE}:pay"), lambda r: Turn(text=script[r.turn], delay=1.0, chunks=1 + r.turn * 9)
    )  # fmt: skip
    # In the tool; and in the second generation, when half of it is sampled.
    trajectory = only(bench.go(1, 1, at={5.0: bench.new_weights, 16.0: lambda: bench.scheduler.update_weights({}, 5)}))
    tokens = trajectory.streams[0].tokens
    assert [span.version for span in tokens.sampled()] == [0, 1, 5]
    logged = [line.what for line in bench.engine.log if isinstance(line.what, Chunk)]
    expected = [chunk.weight_version for chunk in logged for _ in chunk.ids]
    assert [v for v in tokens.response_versions().tolist() if v >= 0] == expected


def test_visit_timeouts_stand_still_during_an_update() -> None:
    class Slow(ScriptedEngine):
        async def update_weights(self, weights: Any, version: int | None = None) -> int:
            await asyncio.sleep(500.0)  # longer than the visit's timeout
            return await super().update_weights(weights, version)

    bench = Bench(agent(), slow())
    bench.engine = Slow(slow({"p0": 1.0}), tokenizer=tokenizer(), log=True)
    for dispatcher in bench.scheduler.clients.values():
        dispatcher.pool.replicas[0].engine = bench.engine
    assert only(bench.go(1, 1, at={3.0: bench.new_weights})).stop_reason == "answered"
    begun = bench.log[0][1].at
    times = [line.at - begun for line in bench.engine.log if isinstance(line.what, Chunk)]
    assert not [at for at in times if 3.0 < at < 503.0], "nothing is sampled while the weights change"
    assert max(times) > 503.0


@pytest.mark.parametrize("requeue", [1, 0])
def test_what_falls_too_far_behind_is_given_up(requeue: int) -> None:
    bench = Bench(
        agent(), slow({"p0": 1.0, "p1": 0.5}), max_staleness=1, max_restarts=requeue, reward=Reward(lambda t: 1.0)
    )
    # p1 has ended by the second update.
    groups = {group.group_id: group for group in bench.go(at={2.0: bench.new_weights, 5.5: bench.new_weights})}
    assert [t.stop_reason for t in groups["p1"].trajectories] == ["answered"] * 2
    old = groups["p0"]
    given_up = old.discarded if requeue else old.trajectories
    assert [t.stop_reason for t in given_up] == ["cancelled"] * 2
    assert all((t.detail or "").startswith("stale: it has tokens of version 0") for t in given_up)
    if requeue:
        assert [t.trajectory_id for t in old.trajectories] == ["p0/0~1", "p0/1~1"]
        assert [t.stop_reason for t in old.trajectories] == ["answered"] * 2
        assert all(set(t.streams[0].tokens.response_versions().tolist()) == {2} for t in old.trajectories)
        assert len({t.seed for t in old.trajectories + old.discarded}) == 4
    assert not any(t in old.discarded for t in old.all)


async def test_what_was_carried_and_is_stale_by_then_begins_anew() -> None:
    bench = Bench(agent(), slow({"p0": 0.3}), max_staleness=0)
    await bench.run(1, target_groups=1)
    await bench.new_weights()
    (group,) = await bench.run(1, [])
    assert [t.trajectory_id for t in group.trajectories] == ["p0/0~1"]
    assert [t.stop_reason for t in group.discarded] == ["cancelled"]


def test_a_pause_of_the_callers_own_outlives_an_update() -> None:
    bench = Bench(agent(), slow())
    dispatcher = bench.scheduler.clients["policy"]

    async def pause_during_an_update() -> None:
        update = asyncio.ensure_future(bench.new_weights())
        await dispatcher.pause("asleep")
        await update
        assert dispatcher.pool.paused
        before = len(bench.engine.log)
        await asyncio.sleep(50.0)
        assert len(bench.engine.log) == before
        await dispatcher.resume("asleep")

    assert only(bench.go(1, 1, at={0.35: pause_during_an_update})).stop_reason == "answered"


# -- through the front door ------------------------------------------------------------------------------------------


def test_a_rollout_resumes_from_a_journal(tmp_path: Path) -> None:
    spec = {"kind": "scripted", "turns": [{"text": "word " * 10, "delay": 0.2, "chunks": 4}]}
    texts = ["one", "two"]
    with journal.Journal(tmp_path / "whole.sqlite") as kept, fr.Rollout(agent(), spec, journal=kept) as rollout:
        whole = rollout.run(texts, n=2)

    async def cut() -> None:
        with journal.Journal(tmp_path / "first.sqlite") as kept:
            rollout = fr.Rollout(agent(), spec, journal=kept)
            asyncio.get_running_loop().call_later(0.3, rollout.scheduler.stop, "asked")
            await rollout.arun(texts, n=2)
            await rollout.aclose()

    asyncio.run(cut())
    assert {t.suspended for t in journal.read(tmp_path / "first.sqlite")} == {"asked"}
    with journal.Journal(tmp_path / "second.sqlite") as kept, fr.Rollout(agent(), spec, journal=kept) as rollout:
        batch = rollout.run(texts, n=2, resume=journal.histories(tmp_path / "first.sqlite"))
    for key in ("input_ids", "response_mask", "rollout_log_probs", "weight_versions"):
        assert batch.tensordict[key].equal(whole.tensordict[key])
    again = {t.trajectory_id: t for t in journal.read(tmp_path / "second.sqlite")}
    assert all(t.ended and t.resumptions == 1 for t in again.values())


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


def test_only_the_unfinished_groups_of_a_journal_can_be_asked_for(tmp_path: Path) -> None:
    with journal.Journal(tmp_path / "j.sqlite") as kept:
        bench = Bench(agent(), slow({"p1": 20.0}), journal=kept)
        bench.go(at={10.0: bench.stop})
    every, left = (
        [history[0].trajectory_id for history in journal.histories(tmp_path / "j.sqlite", unfinished=unfinished)]
        for unfinished in (False, True)
    )
    assert every == ["p0/0", "p0/1", "p1/0", "p1/1"]
    assert left == ["p1/0", "p1/1"]


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


@pytest.mark.parametrize("deliver_at_end", [False, True])
def test_a_filter_that_turns_everything_down_ends_the_run(deliver_at_end: bool) -> None:
    """What has run is kept: the next run delivers it, and goes on with what was set aside."""
    bench = Bench(
        agent(), lambda request: Turn(text="word", delay=1.0), reward=Reward(lambda trajectory: 0.5),
        group_filter=GroupFilter(lambda group: group[0].group_id == "p1"),
    )  # fmt: skip
    endless = (prompts(1, start=number)[0] for number in itertools.count())
    came: list[Group] = []

    async def watched(groups: AsyncIterator[Group]) -> None:
        async for group in groups:
            came.append(group)  # noqa: PERF401  # what came before an exception counts

    async def main() -> list[str]:
        options = {"target_groups": 2, "over_sample": 2, "deliver_at_end": deliver_at_end}
        with pytest.raises(TargetNotReached) as caught:
            await watched(bench.scheduler.run(endless, 2, max_filtered=2.5, **options))
        assert len([group for group in came if not group.dropped]) == (0 if deliver_at_end else 1)
        says = str(caught.value)
        assert "'<lambda>' has turned down 6 groups, and 1 of the 2 that were asked for are there" in says
        assert "scores: [0.5, 0.5]" in says
        bench.scheduler.scoring.group_filter = None
        later = await bench.run(2, endless, **options)
        return [group.group_id for group in later if not group.dropped]

    later = run_virtual(main())
    assert len(later) == 2
    assert ("p1" in later) == deliver_at_end, "kept where it was not delivered"


@cases("scheduler")
def test_bounds_that_are_none_are_refused(options: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Bench(agent(), slow()).go(target_groups=1, **options)


def test_without_a_bound_or_a_target_a_filter_ends_nothing() -> None:
    for options in ({"target_groups": 1, "max_filtered": None}, {}):
        bench = Bench(agent(), lambda request: Turn(text="word"), group_filter=GroupFilter(lambda group: False))
        assert [group.dropped for group in bench.go(1, 40, **options)] == [True] * 40


@pytest.mark.parametrize(("over_sample", "most"), [(1.0, 2), (1.5, 3), (3.0, 6)])
def test_no_more_groups_begin_than_a_target_is_worth(over_sample: float, most: int) -> None:
    under_way: set[str] = set()
    widths: list[int] = []

    def watch(trajectory: Trajectory, event: AnyEvent) -> None:
        under_way.add(trajectory.group_id)
        if type(event).__name__ in ("Ended", "Suspended"):
            under_way.discard(trajectory.group_id)
        widths.append(len(under_way))

    bench = Bench(
        agent(), lambda request: Turn(text="word", delay=1.0 + int(request.group_id[1:])), listeners=[watch],
        group_filter=GroupFilter(lambda group: group[0].group_id not in ("p0", "p1")),
    )  # fmt: skip
    groups = bench.go(1, 20, target_groups=2, over_sample=over_sample)
    assert [group.group_id for group in groups if not group.dropped] == ["p2", "p3"]
    assert max(widths) == most


# -- found by attacking it -------------------------------------------------------------------------------------------


def test_calls_have_the_same_ids_after_an_interruption() -> None:
    """Their randomness follows from their ids."""
    script = [call("tool", "one"), call("tool", "two"), "done"]

    def bench() -> Bench:
        return Bench(with_tool("tests.law_tools:echo"), lambda r: Turn(text=script[r.turn], delay=1.0, chunks=4))

    def ids(groups: list[Group]) -> list[str]:
        messages = groups[0].trajectories[0].streams[0].messages
        return [message["tool_call_id"] for message in messages if message["role"] == "tool"]

    whole = ids(bench().go(1, 1))
    assert ids(run_virtual(bench().interrupted(2.5))) == whole, "half-way through the first turn"
    assert len(set(whole)) == 2


def test_reopened_groups_that_a_target_leaves_over_are_carried() -> None:
    first, bench = Bench(agent(), slow()), Bench(agent(), slow())
    left = [trajectory for group in first.go(1, 5, at={0.5: first.stop}) for trajectory in group.trajectories]

    async def main() -> tuple[list[str], list[str], list[str]]:
        one = await bench.run(1, 0, resume=left, target_groups=1, over_sample=1)
        carried = bench.scheduler.carried
        rest = await bench.run(1, [])
        return tuple([group.group_id for group in groups] for groups in (one, carried, rest))  # type: ignore[return-value]

    one, carried, rest = run_virtual(main())
    assert len(one) == 1
    assert sorted(one + carried) == sorted(one + rest) == [f"p{i}" for i in range(5)]


@pytest.mark.parametrize("cancelled_at", [0.05, 0.3, 0.55, 1.05, 1.3, 2.4])
async def test_a_step_that_is_cancelled_loses_nothing_that_earlier_steps_carried(cancelled_at: float) -> None:
    bench = Bench(agent(), slow({"p0": 0.3, "p1": 0.1, "p2": 0.4, "p3": 0.35}))
    first = await bench.run(1, 4, target_groups=1, over_sample=4)
    before = {group.group_id for group in bench.scheduler.carried}
    step = asyncio.ensure_future(bench.run(1, 0, target_groups=1, over_sample=1))
    await asyncio.sleep(cancelled_at)
    step.cancel()
    came: set[str] = set()
    with suppress(asyncio.CancelledError):
        came = {group.group_id for group in await step}
    everything = [Trajectory.fold(history) for history in histories(bench.log)]
    ended = {t.group_id for t in everything if t.stop_reason == "cancelled"}
    after = {group.group_id for group in bench.scheduler.carried}
    assert came | ended | after == before
    assert len(first) == 1
    again = {group.group_id for group in await bench.run(1, prompts(4, start=10))}
    assert again == after | {"p10", "p11", "p12", "p13"}


def test_prompts_may_go_round_and_round() -> None:
    groups = Bench(agent(), slow({"p0": 0.5})).go(1, itertools.cycle(prompts(3)), target_groups=7)
    ids = {group.group_id for group in groups}
    assert len(ids) == 7
    assert ids >= {"p1", "p1#2", "p1#3"}


def test_rewards_beyond_the_target_are_not_waited_for() -> None:
    async def reward(trajectory: Trajectory) -> float:
        await asyncio.sleep(500.0 if trajectory.group_id == "p0" else 0.0)
        return 1.0

    bench = Bench(agent(), lambda r: Turn(text="word", delay=0.1 + int(r.group_id[1:])), reward=Reward(reward))

    async def main() -> tuple[float, list[Group]]:
        began = asyncio.get_running_loop().time()
        await bench.run(1, target_groups=1, over_sample=2)
        took = asyncio.get_running_loop().time() - began
        return took, await bench.run(1, [])

    took, groups = run_virtual(main())
    assert took < 5.0
    assert only(groups).score == 1.0


async def test_closing_a_stream_waits_for_what_runs() -> None:
    rollout = fr.Rollout(agent(), ScriptedEngine(slow({"0": 5.0}), tokenizer=tokenizer()))
    stream = rollout.stream(["one", "two"])
    await anext(stream)
    await stream.aclose()
    assert not rollout.scheduler.samples.running
    await rollout.aclose()


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


# -- a process that died in a call ---------------------------------------------------------------------------------


def looks(**options: Any) -> Bench:
    """Three trajectories; each calls `echo` once, at its own time."""
    return Bench(
        with_tool(f"{HERE}:pay"),
        lambda r: Turn(text="done" if r.turn else call("tool", r.group_id), delay=1.0 + float(r.group_id[1:])),
        **options,
    )


def tags(log: Sequence[tuple[str, AnyEvent]], trajectory_id: str) -> list[str]:
    return [event.__struct_config__.tag for id_, event in log if id_ == trajectory_id]


def dying(log: Sequence[tuple[str, AnyEvent]], *begun: str, after: int = 0) -> list[tuple[str, AnyEvent]]:
    """Return what a journal has when the process dies as soon as the calls of these trajectories have begun."""
    kept, waiting = list(log[:after]), set(begun)
    for entry in log[after:]:
        kept.append(entry)
        if isinstance(entry[1], CallBegun):
            waiting.discard(entry[0])
            if not waiting:
                return kept
    raise AssertionError(waiting)


def test_calls_are_recorded_before_they_are_made_once_a_process_has_died() -> None:
    first = looks()
    first.go(1, 1)
    assert "call_begun" not in tags(first.log, "p0/0"), "which costs something, and is no use before"
    second = looks()
    second.go(1, 1, resume=histories(first.log[:2]))
    assert tags(second.log, "p0/0").count("call_begun") == 1
    suspended = looks()

    async def main() -> list[Group]:
        return await suspended.interrupted(0.5)

    assert only(run_virtual(main())).deaths == 0
    assert "call_begun" not in tags(suspended.log, "p0/0")


def test_a_trajectory_that_was_alone_in_its_call_at_the_second_death_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = looks()
    first.go(1, 3)
    second = looks()
    second.go(1, 3, resume=histories(first.log[:3]))
    third = looks()
    groups = third.go(1, 3, resume=histories(dying(second.log, "p0/0")))
    assert ends(groups) == {"p0/0": "failed:ToolDied", "p1/0": "answered", "p2/0": "answered"}
    given_up = groups[0].trajectories[0]
    assert given_up.failure is FailureClass.TOOL
    why = (
        "the process died 2 times with this trajectory in its hands, at last while tool 'tool' carried out call "
        f"{given_up.attempts[0].id}: {{'text': 'p0'}}"
    )
    assert given_up.detail == why
    assert f"trajectory p0/0 is given up: {why}" in caplog.text


def test_of_several_in_their_calls_each_runs_alone_until_it_is_known_which_it_was() -> None:
    first = looks()
    first.go(1, 3)
    second = looks()
    second.go(1, 3, resume=histories(first.log[:3]))
    upto_second = dying(second.log, "p0/0", "p1/0")
    third = looks()
    groups = third.go(1, 3, resume=histories(upto_second))
    assert set(ends(groups).values()) == {"answered"}, "nobody knows in whose call the process died"
    order = [id_ for id_, event in third.log if isinstance(event, Resumed | Ended)]
    assert order[-6:] == ["p0/0", "p0/0", "p1/0", "p1/0", "p2/0", "p2/0"]
    fourth = looks()
    groups = fourth.go(1, 3, resume=histories(dying(third.log, "p1/0", after=len(upto_second))))
    assert ends(groups) == {"p0/0": "answered", "p1/0": "failed:ToolDied", "p2/0": "answered"}
    (given_up,) = [t for group in groups for t in group.trajectories if t.failure]
    assert given_up.deaths == 2


def test_a_sub_agent_is_given_up_for_its_own_tool_and_its_caller_goes_on() -> None:
    helper = with_tool(f"{HERE}:pay").model_copy(update={"agent": "helper"})
    says = {"a": [ASKS, "done"], "helper": [call("tool", "ann"), "It is done."]}
    make: Callable[[], Bench] = lambda: Bench(  # noqa: E731
        asking(helper), lambda r: Turn(text=says[r.agent or "a"][r.turn], delay=1.0)
    )
    first = make()
    first.go(1, 1)
    child_begun = next(place for place, (id_, _) in enumerate(first.log, 1) if id_ != "p0/0")
    second = make()
    second.go(1, 1, resume=histories(first.log[:child_begun]))
    (child,) = {id_ for id_, _ in second.log} - {"p0/0"}
    assert "call_begun" not in tags(second.log, "p0/0"), "the caller's call runs no code here"
    third = make()
    (group,) = third.go(1, 1, resume=histories(dying(second.log, child)))
    assert [t.stop_reason for t in group.children] == ["failed:ToolDied"]
    assert only([group]).stop_reason == "answered"
    (told,) = results(only([group]))
    assert told == "error: ask ended without an answer (failed:ToolDied); try again or go on without it"
    assert not group.active
