"""Going on: after a crash at any event, after a suspension at any time, in the next call of a partial rollout."""

from __future__ import annotations

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
from fsm_rollout.agent.graph import AgentGraph, Interaction
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.environment.rewards import GroupFilter, Reward, scores_differ
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.errors import ConfigError, EngineError, JournalError, TargetNotReached
from fsm_rollout.scheduler.failure_policy import Failures, ToolFailures
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing import run_virtual
from fsm_rollout.tools import ToolContext
from fsm_rollout.trajectory import journal
from fsm_rollout.trajectory.events import AnyEvent, Scored, decode, encode
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import Limits, Sampling
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.embedded import tokenizer
from tests.laws.agents import agents
from tests.laws.world import call, scripted, turns

SCRIPTS = st.lists(turns(failures=False), min_size=1, max_size=6)


CHATS: dict[object, ChatTemplate] = {}
"""Those of the one tokenizer: a template is read once for all tests."""


class Replying:
    """Replies twice, by what the trajectory says, then is done; asks a model in between."""

    async def reply(self, conversation: Conversation) -> Reply:
        await asyncio.sleep(0.3)
        if conversation.replies >= 2:
            return Reply(None, score=0.25, done=True)
        verdict = await conversation.ask("judge", [{"role": "user", "content": "How was it?"}], Sampling(max_tokens=8))
        return Reply(f"Go on, {verdict.encode().hex()[:8]}.", score=0.5)


class Bench:
    """An engine, its scheduler and all events, in order."""

    def __init__(self, graph: AgentGraph, script: Callable[[Request], Turn], **options: Any) -> None:
        if graph.interaction is not None:
            graph = graph.model_copy(
                update={"interaction": Interaction(use="tests.unit.scheduler.test_resume:Replying")}
            )
        self.engine = ScriptedEngine(script, tokenizer=tokenizer(), log=True)
        self.log: list[tuple[str, AnyEvent]] = []
        clients = {name: EngineClient(self.engine) for name in ("policy", "judge")}
        for client in clients.values():
            client.chats = CHATS
        self.scheduler = Scheduler({graph.agent: graph}, clients, listeners=[self.hear], **options)

    def hear(self, trajectory: Trajectory, event: AnyEvent) -> None:
        self.log.append((trajectory.trajectory_id, event))

    async def run(self, n: int = 2, prompts: int = 2, **options: Any) -> list[Group]:
        return [group async for group in self.scheduler.run(listed(prompts), n, **options)]


def listed(count: int, start: int = 0) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"p{i}", messages=({"role": "user", "content": f"Question {i}?"},))
        for i in range(start, start + count)
    ]


def outline(groups: Sequence[Group]) -> dict[str, Any]:
    """All that must not depend on where a run was interrupted."""
    return {
        t.trajectory_id: (
            t.stop_reason, t.visits, t.spent, t.turn_scores, t.tool_rewards, t.generations, t.queries,
            [(s.context, s.tokens.ids.tolist(), s.tokens.spans, s.messages) for s in t.streams],
        )
        for group in sorted(groups, key=lambda group: group.index)
        for t in group.trajectories
    }  # fmt: skip


def histories(log: Sequence[tuple[str, AnyEvent]]) -> list[list[AnyEvent]]:
    """What a journal holds of some events: by trajectory, in order, packed and unpacked."""
    found: dict[str, list[AnyEvent]] = defaultdict(list)
    for trajectory_id, event in log:
        found[trajectory_id].append(decode(encode(event)))
    return list(found.values())


@given(agents(timeouts=False), SCRIPTS, st.floats(0, 1))
def test_a_run_killed_at_any_event_goes_on_to_the_same_end(graph: AgentGraph, script: list[Turn], part: float) -> None:
    """Law 6: nothing is done twice, nothing is lost, and every token is the one that it would have been."""

    def choose(request: Request) -> Turn:
        return scripted(script, request)

    whole = Bench(graph, choose)
    expected = outline(run_virtual(whole.run()))
    cut = round(part * len(whole.log))
    note(f"cut after {cut} of {len(whole.log)}: {[type(e).__name__ for _, e in whole.log[max(0, cut - 4) : cut]]}")
    again = Bench(graph, choose)
    groups = run_virtual(again.run(resume=histories(whole.log[:cut])))
    assert outline(groups) == expected
    assert [group.index for group in sorted(groups, key=lambda group: group.index)] == [0, 1]
    for history in histories(again.log):
        trajectory = Trajectory.fold(history)
        live = next(t for group in groups for t in group.all if t.trajectory_id == trajectory.trajectory_id)
        assert trajectory == live


@given(agents(timeouts=False), SCRIPTS, st.floats(0, 6), st.integers(1, 2))
def test_a_run_set_aside_at_any_time_goes_on_to_the_same_end(
    graph: AgentGraph, script: list[Turn], at: float, times: int
) -> None:
    def choose(request: Request) -> Turn:
        return scripted(script, request)

    expected = outline(run_virtual(Bench(graph, choose).run()))
    bench = Bench(graph, choose)

    async def main() -> list[Group]:
        groups: list[Group] = []
        for _ in range(times):
            asyncio.get_running_loop().call_later(at, bench.scheduler.stop, "asked")
            resume = [trajectory for group in groups for trajectory in group.all]
            groups = await bench.run(resume=resume)
            await asyncio.sleep(100.0)  # away for a while, which counts against nothing
        return await bench.run(resume=[trajectory for group in groups for trajectory in group.all])

    groups = run_virtual(main())
    assert outline(groups) == expected
    for group in groups:
        for trajectory in group.trajectories:
            assert trajectory.ended
            assert trajectory.suspended is None


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
    """Every event is tried as the last one before a crash; what was spent, asked and scored counts once.

    Entering WORKING writes its prompt into an open context, begins the context anew, or opens it.
    """
    graph = AgentGraph(
        agent="a",
        initial=initial,
        limits={"assistant_turns": 9, "tool_calls": 6, "user_turns": 3},
        tools={"tool": {"use": "tests.law_tools:echo", "timeout": 50.0}},
        interaction={"use": "tests.unit.scheduler.test_resume:Replying"},
        states={
            "PENDING": {},
            "WORKING": {
                "handler": "tests.unit.scheduler.test_resume:Thorough", "prompt": "Visit {{ visits.WORKING }}",
                "timeout": 100.0,
                "reset": reset,
            },
            "INTERACTING": {"timeout": 50.0},
        },
        transitions=[
            {"trigger": "prompted", "source": "PENDING", "dest": "WORKING"},
            {"trigger": "generated", "source": "WORKING", "dest": "INTERACTING"},
            {"trigger": "replied", "source": "INTERACTING", "dest": "WORKING"},
            {"trigger": "interaction_done", "source": "INTERACTING", "dest": "TERMINATED"},
        ],
    )  # fmt: skip

    def choose(request: Request) -> Turn:
        text = call("tool", "again") if request.turn % 2 and request.context == "main" else f"turn {request.turn}"
        return Turn(text=text, delay=0.5, chunks=2)

    whole = Bench(graph, choose)
    expected = outline(run_virtual(whole.run(n=1, prompts=1)))
    assert expected["p0/0"][2] == {"assistant_turns": 6, "tool_calls": 3, "user_turns": 3}
    kinds = set()
    for cut in range(len(whole.log) + 1):
        kinds |= {type(event).__name__ for _, event in whole.log[cut - 1 : cut]}
        again = Bench(graph, choose)
        assert outline(run_virtual(again.run(n=1, prompts=1, resume=histories(whole.log[:cut])))) == expected, cut
    assert kinds >= {
        "LimitCharged",
        "Scored",
        "ModelQueried",
        "UserReplied",
        "Called",
        "MessagesAppended",
        "Generated",
        "PromptExtended",
        "Ended",
    }


@pytest.mark.parametrize("limit", ["timeout", "wall_seconds"])
def test_a_timeout_stays_one_wherever_its_run_was_cut_off(limit: str) -> None:
    """Every event is tried as the last one; after the calls were told that their time is up, only their row is left."""
    rows = [
        *TOOLS["transitions"],
        {"trigger": "timed_out", "source": "PROCESSING_TOOLS", "dest": "HURRYING"},
        {
            "trigger": "limit_reached", "source": "PROCESSING_TOOLS", "dest": "HURRYING",
            "conditions": [{"name": "limit", "argument": "wall_seconds"}],
        },
        {"trigger": "written", "source": "HURRYING", "dest": "GENERATING"},
    ]  # fmt: skip
    states = {
        **TOOLS["states"],
        "GENERATING": {"timeout": 100.0, "max_visits": 3},
        "PROCESSING_TOOLS": {
            "timeout": 3.0 if limit == "timeout" else 200.0,
            "prompt": "Now the tools.",
            "parallel": 2,
        },
        "HURRYING": {"handler": "write", "prompt": "Hurry!", "max_visits": 2},
    }
    wall = {"wall_seconds": 4.0} if limit == "wall_seconds" else {}
    graph = AgentGraph(
        agent="a", limits={"assistant_turns": 6, "tool_calls": 6, **wall}, states=states, transitions=rows,
        tools={name: {"use": f"tests.law_tools:{name}", "timeout": 500.0} for name in ("echo", "hang")},
    )  # fmt: skip
    calls = "\n".join([call("hang", "x"), call("echo", "hello"), call("hang", "y"), call("echo", "never")])

    def choose(request: Request) -> Turn:
        return Turn(text="done" if request.turn else calls, delay=0.5)

    whole = Bench(graph, choose)
    expected = outline(run_virtual(whole.run(n=1, prompts=1)))
    assert expected["p0/0"][1]["HURRYING"] == 1
    for cut in range(len(whole.log) + 1):
        again = Bench(graph, choose)
        assert outline(run_virtual(again.run(n=1, prompts=1, resume=histories(whole.log[:cut])))) == expected, cut


def test_time_away_counts_against_no_limit() -> None:
    graph = single().model_copy(update={"limits": Limits(assistant_turns=2, wall_seconds=10.0)})
    bench = Bench(graph, slow({"p0": 0.5}))

    async def main() -> list[Group]:
        asyncio.get_running_loop().call_later(2.0, bench.scheduler.stop, "asked")
        groups = await bench.run(n=1, prompts=1)
        await asyncio.sleep(1000.0)
        return await bench.run(n=1, prompts=1, resume=groups[0].trajectories)

    ((trajectory,),) = [group.trajectories for group in run_virtual(main())]
    assert trajectory.stop_reason == "answered"
    assert 2.0 < (trajectory.wall_seconds or 0.0) < 10.0
    assert trajectory.suspended_seconds == pytest.approx(1000.0)


def test_a_sub_agent_that_was_cut_off_goes_on_when_its_call_is_made_again() -> None:
    helper = single().model_copy(update={"agent": "helper"})
    graph = AgentGraph(
        agent="a",
        limits={"assistant_turns": 6, "tool_calls": 6},
        tools={"ask": {"agent": helper, "timeout": 50.0}},
        **TOOLS,
    )
    asks = '<tool_call>\n{"name": "ask", "arguments": {"task": "Think."}}\n</tool_call>'

    def choose(request: Request) -> Turn:
        return Turn(text=asks if request.agent == "a" and request.turn < 2 else "done", delay=0.5, chunks=2)

    whole = Bench(graph, choose)
    expected = everything(run_virtual(whole.run(n=1, prompts=1)))
    assert [row[0] for row in expected] == ["p0/0", "p0/0/ask.1", "p0/0/ask.2"]
    for cut in range(1, len(whole.log)):
        again = Bench(graph, choose)
        groups = run_virtual(again.run(n=1, prompts=1, resume=histories(whole.log[:cut])))
        assert everything(groups) == expected
        assert groups[0].discarded == []


def everything(groups: Sequence[Group]) -> list[Any]:
    """All that must not depend on where a run was interrupted, sub-agents' trajectories too, in their order."""
    return [
        (
            t.trajectory_id, t.parent_id, t.sample, t.agent, t.seed, t.stop_reason, t.visits, t.spent, t.generations,
            [(s.context, s.tokens.ids.tolist(), s.tokens.spans, s.messages) for s in t.streams],
            [(called.id, called.result, called.failure, called.tries, called.child_id) for called in t.called],
        )
        for group in sorted(groups, key=lambda group: group.index)
        for t in group.all
    ]  # fmt: skip


def asks(tool: str, tasks: Sequence[str]) -> str:
    made = ({"name": tool, "arguments": {"task": task}} for task in tasks)
    return "\n".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in made)


async def set_aside(bench: Bench, kept: Sequence[tuple[str, AnyEvent]], at: float) -> None:
    """Go on with what is kept, and set everything aside at some time."""
    asyncio.get_running_loop().call_later(at, bench.scheduler.stop, "asked")
    await bench.run(resume=histories(kept))


def family(timeout: float = 900.0, retry: int = 1) -> AgentGraph:
    """An agent that calls agents that call agents."""
    deep = AgentGraph(**{"agent": "deep", **SPEAKS})
    of_middle = {"ask": {"agent": deep, "timeout": timeout, "retry": {"attempts": retry}}}
    middle = AgentGraph(**{"agent": "middle", **CALLS, "tools": of_middle})
    return AgentGraph(**{"agent": "outer", **CALLS, "tools": {"delegate": {"agent": middle, "timeout": 900}}})


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
    expected = everything(run_virtual(whole.run()))
    log = whole.log
    for part in cuts:
        cut = round(part * len(log))
        kept = log[:cut]
        again = Bench(graph, script)
        if kindly:
            run_virtual(set_aside(again, kept, part * 20.0))
        else:
            groups = run_virtual(again.run(resume=histories(kept)))
            assert everything(groups) == expected
        log = kept + again.log[len(kept) :]  # what it resumed is recorded again, first
    last = Bench(graph, script)
    assert everything(run_virtual(last.run(resume=histories(log)))) == expected


@pytest.mark.parametrize("seconds", [0.7, 1.3, 4.1])
def test_sub_agents_are_carried_with_those_they_serve(seconds: float) -> None:
    """The first of two groups completes the target while calls of the other's are under way."""

    def script(request: Request) -> Turn:
        slow = 1.0 if request.group_id == "p0" else 1.0 + seconds
        tool = {"outer": "delegate", "middle": "ask"}.get(request.agent)
        says = "done" if tool is None or request.turn else asks(tool, ["a", "b"])
        return Turn(text=says, delay=slow, chunks=2)

    expected = everything(run_virtual(Bench(family(), script).run(1)))
    bench = Bench(family(), script)

    async def main() -> list[Group]:
        first = await bench.run(1, target_groups=1, over_sample=2)
        return first + [group async for group in bench.scheduler.run([], 1)]

    groups = run_virtual(main())
    assert everything(groups) == expected
    assert any(t.resumptions for t in groups[1].all if t.parent_id is not None) or seconds > 2
    assert not any(group.active or group.discarded for group in groups)


def test_each_resumed_group_has_as_many_samples_as_it_had_or_as_the_run_has() -> None:
    large, small = Bench(single(), slow({})), Bench(single(), slow({}))
    run_virtual(large.run(n=3, prompts=1))
    run_virtual(small.run(n=1, prompts=2))
    second = [(trajectory_id, event) for trajectory_id, event in small.log if trajectory_id.startswith("p1/")]
    resuming = Bench(single(), slow({}))
    groups = run_virtual(resuming.run(n=2, prompts=0, resume=histories([*large.log, *second])))
    assert {group.group_id: len(group.trajectories) for group in groups} == {"p0": 3, "p1": 2}


def test_a_prompt_that_a_resumed_group_belongs_to_cannot_come_twice() -> None:
    before, after = Bench(single(), slow({})), Bench(single(), slow({}))
    run_virtual(before.run(n=1, prompts=1))

    async def twice() -> list[Group]:
        run = after.scheduler.run([*listed(1), *listed(1)], 1, resume=histories(before.log))
        return [group async for group in run]

    with pytest.raises(ConfigError, match="prompt id 'p0' is used twice"):
        run_virtual(twice())


def test_what_waits_can_be_dropped_after_an_interruption_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(single(), slow({}))
    interrupted: list[Group] = []
    drop = bench.scheduler._drop

    async def first_is_interrupted(group: Group) -> None:
        await drop(group)
        if not interrupted:
            interrupted.append(group)
            raise KeyboardInterrupt

    monkeypatch.setattr(bench.scheduler, "_drop", first_is_interrupted)

    async def main() -> list[Group]:
        async for _ in bench.scheduler.run(listed(6), 1, target_groups=4):
            pass
        assert len(bench.scheduler.carried) > 1
        with pytest.raises(KeyboardInterrupt):
            await bench.scheduler.drop_carried()
        return await bench.scheduler.drop_carried()

    rest = run_virtual(main())
    assert rest
    assert interrupted[0] not in rest
    assert not bench.scheduler.carried


def test_a_reopened_group_keeps_its_place_its_prompts_own_sampling_and_its_attempt() -> None:
    cut_short = listed(1, start=1)[0].model_copy(update={"sampling": Sampling(max_tokens=4)})
    bench = Bench(single(), slow({"p0": 0.2}), max_staleness=0)

    async def main() -> None:
        async def train() -> None:
            await asyncio.sleep(1.1)
            await bench.scheduler.update_weights({})
            await asyncio.sleep(1.0)
            bench.scheduler.stop("asked")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(train())
            async for _ in bench.scheduler.run(listed(1)):
                pass

    run_virtual(main())
    left = [history for history in histories(bench.log) if Trajectory.fold(history).suspended]
    assert [history[0].trajectory_id for history in left] == ["p0/0~1"]
    again = Bench(single(), slow({}))
    second = run_virtual(again.run(n=1, prompts=2, resume=left))
    assert {group.group_id: group.index for group in second} == {"p0": 0, "p1": 1}
    assert next(g for g in second if g.group_id == "p0").trajectories[0].trajectory_id == "p0/0~1"

    half = Bench(single(), slow({"p1": 0.2}))

    async def stopped() -> None:
        asyncio.get_running_loop().call_later(0.3, half.scheduler.stop, "asked")
        async for _ in half.scheduler.run([cut_short]):
            pass

    run_virtual(stopped())
    (group, _) = sorted(
        run_virtual(Bench(single(), slow({})).run(n=1, prompts=2, resume=histories(half.log))),
        key=lambda group: -group.index,
    )
    assert (group.group_id, group.index) == ("p1", 1)
    assert len(ids_of(group.trajectories[0])) == 4
    assert group.trajectories[0].stop_reason == "truncated"


def test_a_failure_that_ends_the_trajectory_ends_it_after_an_interruption_too() -> None:
    bench = Bench(
        with_tool("tests.law_tools:fail"),
        lambda request: Turn(text=call("tool", "no")),
        failures=Failures(tool=ToolFailures(do="end")),
    )
    expected = outline(run_virtual(bench.run(n=1, prompts=1)))
    assert expected["p0/0"][0] == "failed:ToolError"
    for cut in range(len(bench.log)):
        again = Bench(
            with_tool("tests.law_tools:fail"),
            lambda request: Turn(text=call("tool", "no")),
            failures=Failures(tool=ToolFailures(do="end")),
        )
        assert outline(run_virtual(again.run(n=1, prompts=1, resume=histories(bench.log[:cut])))) == expected, cut


# -- partial rollouts ----------------------------------------------------------------------------------------------

SINGLE = {
    "states": {"PENDING": {}, "GENERATING": {"timeout": 100.0, "sampling": {"max_tokens": 64}}},
    "transitions": [
        {"trigger": "prompted", "source": "PENDING", "dest": "GENERATING"},
        {"trigger": "generated", "source": "GENERATING", "dest": "TERMINATED"},
    ],
}
TOOLS = {
    "states": {"PENDING": {}, "GENERATING": {"timeout": 100.0}, "PROCESSING_TOOLS": {"timeout": 200.0}},
    "transitions": [
        {"trigger": "prompted", "source": "PENDING", "dest": "GENERATING"},
        {
            "trigger": "generated", "source": "GENERATING", "dest": "PROCESSING_TOOLS",
            "conditions": [{"name": "has_tool_calls"}],
        },
        {"trigger": "generated", "source": "GENERATING", "dest": "TERMINATED"},
        {"trigger": "tools_done", "source": "PROCESSING_TOOLS", "dest": "GENERATING"},
    ],
}  # fmt: skip


def single() -> AgentGraph:
    return AgentGraph(agent="a", limits={"assistant_turns": 6, "tool_calls": 6}, **SINGLE)


def with_tool(use: str, **more: Any) -> AgentGraph:
    tools = {"tool": {"use": use, "timeout": 50.0, **more}}
    return AgentGraph(agent="a", limits={"assistant_turns": 6, "tool_calls": 6}, tools=tools, **TOOLS)


def slow(seconds: dict[str, float]) -> Callable[[Request], Turn]:
    """Ten pieces of words, each `seconds` of the prompt's id long."""
    return lambda request: Turn(text="word " * 10, delay=seconds.get(request.group_id, 0.1), chunks=10)


def ids_of(trajectory: Trajectory) -> list[int]:
    return trajectory.streams[-1].tokens.response_ids().tolist()


def test_a_target_is_enough_and_the_rest_goes_on_in_the_next_run_on_new_weights() -> None:
    bench = Bench(single(), slow({"p0": 0.3, "p1": 0.1, "p2": 0.2, "p3": 0.4}))

    async def main() -> tuple[list[Group], list[Group], list[Group]]:
        first = await bench.run(n=2, prompts=4, target_groups=2, over_sample=2)
        aside = bench.scheduler.carried
        assert not bench.engine.load().running, "the rest is aborted"
        await bench.scheduler.update_weights({}, 7)
        second = [group async for group in bench.scheduler.run(listed(1, start=9), 2)]
        return first, aside, second

    first, aside, second = run_virtual(main())
    assert [group.group_id for group in first] == ["p1", "p2"]
    assert [group.group_id for group in aside] == ["p0", "p3"]
    assert sorted(group.group_id for group in second) == ["p0", "p3", "p9"]
    assert bench.scheduler.carried == []
    whole = [*tokenizer().encode("word " * 10), tokenizer().eos_token_id]
    for group in second:
        assert [t.stop_reason for t in group.trajectories] == ["answered"] * 2
        for trajectory in group.trajectories:
            versions = trajectory.streams[0].tokens.response_versions().tolist()
            assert ids_of(trajectory) == whole, "it goes on where it was, and nothing is sampled twice"
            assert versions == sorted(versions)
            assert set(versions) == ({7} if group.group_id == "p9" else {0, 7})
    asked = [line.what for line in bench.engine.log if isinstance(line.what, Request)]
    for request in asked:  # what goes on sends what it has, and asks for the rest
        assert request.sampling.max_tokens == 64 - request.sampled


@pytest.mark.parametrize("deliver_at_end", [False, True])
def test_what_ends_beyond_the_target_comes_first_in_the_next_run(deliver_at_end: bool) -> None:
    bench = Bench(single(), slow({}))  # all groups end at the same moment

    async def main() -> list[list[str]]:
        options: dict[str, Any] = {"target_groups": 2, "deliver_at_end": deliver_at_end}
        runs = [await bench.run(prompts=5, over_sample=3, **options)]
        runs += [[group async for group in bench.scheduler.run([], **options)] for _ in range(3)]
        return [[group.group_id for group in run] for run in runs]

    runs = run_virtual(main())
    assert [len(run) for run in runs] == [2, 2, 1, 0]
    assert sorted(group_id for run in runs for group_id in run) == ["p0", "p1", "p2", "p3", "p4"]


def test_a_target_takes_no_more_prompts_than_it_needs_and_begins_what_is_missing_of_a_group_later() -> None:
    bench = Bench(single(), slow({}), concurrency=3)
    taken: list[str] = []

    def endless() -> Iterator[Prompt]:
        for i in range(1000):
            taken.append(f"p{i}")
            yield listed(1, start=i)[0]

    async def main() -> tuple[list[Group], list[Group]]:
        source = endless()
        first = [group async for group in bench.scheduler.run(source, 2, target_groups=2)]
        second = [group async for group in bench.scheduler.run(source, 2, target_groups=3)]
        await bench.scheduler.drop_carried()
        return first, second

    first, second = run_virtual(main())
    assert len(first) == 2
    assert len(second) == 3
    assert len(taken) < 10
    for group in first + second:
        assert [t.trajectory_id for t in group.trajectories] == [f"{group.group_id}/0", f"{group.group_id}/1"]
        assert group.ended


def test_a_group_filter_drops_and_a_target_refills() -> None:
    bench = Bench(
        single(), lambda request: Turn(text="word", delay=float(request.group_id[1:]) + 0.1),
        reward=Reward(lambda trajectory: trajectory.sample if trajectory.group_id in ("p1", "p3", "p4") else 1.0),
        group_filter=GroupFilter(scores_differ),
    )  # fmt: skip

    async def main() -> list[Group]:
        groups = await bench.run(prompts=6, target_groups=2)
        await bench.scheduler.drop_carried()
        return groups

    groups = run_virtual(main())
    assert [(group.group_id, group.dropped) for group in groups] == [
        ("p0", True), ("p1", False), ("p2", True), ("p3", False),
    ]  # fmt: skip


def test_a_filter_that_fails_keeps_the_group() -> None:
    def broken(group: Sequence[Trajectory]) -> bool:
        raise RuntimeError("no")

    bench = Bench(single(), slow({}), group_filter=GroupFilter(broken))
    assert [group.dropped for group in run_virtual(bench.run())] == [False, False]
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


def test_what_is_carried_keeps_its_tools_open() -> None:
    def choose(request: Request) -> Turn:
        if request.group_id == "p1":
            return Turn(text="done", delay=3.0)
        calls = [call("tool", "one"), call("tool", "two"), "done"]
        return Turn(text=calls[request.turn].replace('"text"', '"line"'), delay=2.0)

    OPENED.clear()
    bench = Bench(with_tool("tests.unit.scheduler.test_resume:Notebook"), choose)

    async def main() -> tuple[list[str], list[Group]]:
        await bench.run(n=1, prompts=2, target_groups=1)
        before = list(OPENED)
        return before, [group async for group in bench.scheduler.run([])]

    before, (group,) = run_virtual(main())
    assert before == ["+p0/0"], "set aside in its second turn, and still open"
    tool_texts = [m["content"] for m in group.trajectories[0].streams[0].messages if m["role"] == "tool"]
    assert tool_texts == ["one", "one two"]
    assert OPENED == ["+p0/0", "-"]

    async def given_up() -> list[Group]:
        OPENED.clear()
        await bench.run(n=1, prompts=2, target_groups=1)
        return await bench.scheduler.drop_carried()

    (group,) = run_virtual(given_up())
    assert group.trajectories[0].suspended == "carried"
    assert OPENED[-1] == "-"


CALLED: list[str] = []


async def pay(text: str) -> str:
    """Pay somebody.

    Args:
        text: Whom.
    """
    CALLED.append(text)
    await asyncio.sleep(10.0)
    return f"paid {text}"


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_call_cut_off_by_an_interruption_is_made_again_only_if_it_may_be(repeatable: bool) -> None:
    CALLED.clear()
    script = [call("tool", "bob"), "done"]
    bench = Bench(
        with_tool("tests.unit.scheduler.test_resume:pay", repeatable=repeatable),
        lambda request: Turn(text=script[request.turn], delay=1.0),
    )

    async def main() -> list[Group]:
        asyncio.get_running_loop().call_later(5.0, bench.scheduler.stop, "asked")
        groups = await bench.run(n=1, prompts=1)
        return await bench.run(n=1, prompts=1, resume=groups[0].trajectories)

    (group,) = run_virtual(main())
    (trajectory,) = group.trajectories
    tool_texts = [m["content"] for m in trajectory.streams[0].messages if m["role"] == "tool"]
    assert len(CALLED) == (2 if repeatable else 1)
    assert tool_texts == (["paid bob"] if repeatable else [tool_texts[0]])
    if not repeatable:
        assert "interrupted and may have had its effect" in tool_texts[0]
    assert trajectory.spent["tool_calls"] == 1


# -- weights and staleness -----------------------------------------------------------------------------------------


def test_weights_change_while_generations_wait_and_tools_go_on() -> None:
    CALLED.clear()
    script = [call("tool", "bob"), "word " * 10]
    bench = Bench(
        with_tool("tests.unit.scheduler.test_resume:pay"),
        lambda request: Turn(text=script[request.turn], delay=1.0, chunks=1 + request.turn * 9),
    )

    async def main() -> list[Group]:
        async def train() -> None:
            await asyncio.sleep(5.0)  # in the tool
            await bench.scheduler.update_weights({})
            await asyncio.sleep(11.0)  # in the second generation, half sampled
            assert await bench.scheduler.update_weights({}, 5) == 5

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(train())
            groups = tasks.create_task(bench.run(n=1, prompts=1))
        return groups.result()

    ((trajectory,),) = [group.trajectories for group in run_virtual(main())]
    tokens = trajectory.streams[0].tokens
    versions = [span.version for span in tokens.sampled()]
    assert versions == [0, 1, 5]
    logged = [line.what for line in bench.engine.log if not isinstance(line.what, Request) and len(line.what.ids)]
    expected = [chunk.weight_version for chunk in logged for _ in chunk.ids]
    assert [v for v in tokens.response_versions().tolist() if v >= 0] == expected


def test_visit_timeouts_stand_still_during_an_update() -> None:
    class Slow(ScriptedEngine):
        async def update_weights(self, weights: Any, version: int | None = None) -> int:
            await asyncio.sleep(500.0)  # longer than the visit's timeout
            return await super().update_weights(weights, version)

    bench = Bench(single(), slow({"p0": 1.0}))
    bench.engine = Slow(slow({"p0": 1.0}), tokenizer=tokenizer(), log=True)
    for dispatcher in bench.scheduler.clients.values():
        dispatcher.engine = bench.engine

    async def main() -> list[Group]:
        async def train() -> None:
            await asyncio.sleep(3.0)
            await bench.scheduler.update_weights({})

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(train())
            groups = tasks.create_task(bench.run(n=1, prompts=1))
        return groups.result()

    (group,) = run_virtual(main())
    assert group.trajectories[0].stop_reason == "answered"
    begun = bench.log[0][1].at
    times = [line.at - begun for line in bench.engine.log if isinstance(line.what, Chunk)]
    assert not [at for at in times if 3.0 < at < 503.0], "nothing is sampled while the weights change"
    assert max(times) > 503.0


@pytest.mark.parametrize("requeue", [1, 0])
def test_what_falls_too_far_behind_is_given_up(requeue: int) -> None:
    bench = Bench(
        single(), slow({"p0": 1.0, "p1": 0.5}), max_staleness=1, max_restarts=requeue, reward=Reward(lambda t: 1.0)
    )

    async def main() -> list[Group]:
        async def train() -> None:
            for at in (2.0, 5.5):  # p1 has ended by then
                await asyncio.sleep(at - asyncio.get_running_loop().time() % 1000)
                await bench.scheduler.update_weights({})

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(train())
            groups = tasks.create_task(bench.run(n=2, prompts=2))
        return groups.result()

    groups = {group.group_id: group for group in run_virtual(main())}
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


def test_what_was_carried_and_is_stale_by_then_begins_anew() -> None:
    bench = Bench(single(), slow({"p0": 0.3}), max_staleness=0)

    async def main() -> list[Group]:
        await bench.run(n=1, prompts=2, target_groups=1)
        await bench.scheduler.update_weights({})
        return [group async for group in bench.scheduler.run([])]

    (group,) = run_virtual(main())
    assert [t.trajectory_id for t in group.trajectories] == ["p0/0~1"]
    assert [t.stop_reason for t in group.discarded] == ["cancelled"]


# -- through the front door ----------------------------------------------------------------------------------------


def test_a_rollout_resumes_from_a_journal(tmp_path: Path) -> None:
    spec = {"kind": "scripted", "turns": [{"text": "word " * 10, "delay": 0.2, "chunks": 4}]}
    texts = ["one", "two"]
    with journal.Journal(tmp_path / "whole.sqlite") as kept, fr.Rollout(single(), spec, journal=kept) as rollout:
        whole = rollout.run(texts, n=2)

    async def cut() -> None:
        with journal.Journal(tmp_path / "first.sqlite") as kept:
            rollout = fr.Rollout(single(), spec, journal=kept)
            asyncio.get_running_loop().call_later(0.3, rollout.scheduler.stop, "asked")
            await rollout.arun(texts, n=2)
            await rollout.aclose()

    asyncio.run(cut())
    assert {t.suspended for t in journal.read(tmp_path / "first.sqlite")} == {"asked"}
    with journal.Journal(tmp_path / "second.sqlite") as kept, fr.Rollout(single(), spec, journal=kept) as rollout:
        batch = rollout.run(texts, n=2, resume=journal.histories(tmp_path / "first.sqlite"))
    for key in ("input_ids", "response_mask", "rollout_log_probs", "weight_versions"):
        assert batch.tensordict[key].equal(whole.tensordict[key])
    again = {t.trajectory_id: t for t in journal.read(tmp_path / "second.sqlite")}
    assert all(t.ended and t.resumptions == 1 for t in again.values())


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    bench = Bench(single(), slow({}))
    (group, _) = run_virtual(bench.run())
    other = Bench(single().model_copy(update={"agent": "b"}), slow({}))
    with pytest.raises(ConfigError, match="agent 'a' of a trajectory to resume is not one of the run's"):
        run_virtual(other.run(resume=group.trajectories))
    with journal.Journal(tmp_path / "j.sqlite") as kept:
        third = Bench(single(), slow({}), journal=kept)
        stopped = Bench(single(), slow({"p0": 5.0}))

        async def suspended() -> list[Group]:
            asyncio.get_running_loop().call_later(1.0, stopped.scheduler.stop, "asked")
            return await stopped.run(n=1, prompts=1)

        (group,) = run_virtual(suspended())
        with pytest.raises(JournalError, match="'prompted' comes first"):
            run_virtual(third.run(n=1, prompts=1, resume=group.trajectories))


def test_two_steps_of_one_rollout_are_different_samples() -> None:
    bench = Bench(single(), slow({}))

    async def main() -> list[Group]:
        return [*await bench.run(), *await bench.run()]

    trajectories = [t for group in run_virtual(main()) for t in group.trajectories]
    assert len({t.seed for t in trajectories}) == len(trajectories) == 8


def test_sub_agents_of_two_steps_are_different_samples_too() -> None:
    graph = AgentGraph(
        agent="a",
        limits={"assistant_turns": 3, "tool_calls": 3},
        tools={"ask": {"agent": single().model_copy(update={"agent": "helper"}), "timeout": 50.0}},
        **TOOLS,
    )
    asks = '<tool_call>\n{"name": "ask", "arguments": {"task": "Think."}}\n</tool_call>'
    bench = Bench(graph, lambda r: Turn(text=asks if r.agent == "a" and r.turn == 0 else "done", delay=0.5))

    async def main() -> list[Group]:
        return [*await bench.run(), *await bench.run()]

    children = [child for group in run_virtual(main()) for child in group.children]
    assert len({child.seed for child in children}) == len(children) == 8


@pytest.mark.parametrize("of_group", [False, True])
def test_what_was_scored_before_an_interruption_is_not_judged_again(of_group: bool) -> None:
    judged: list[str] = []

    def one(trajectory: Trajectory) -> float:
        judged.append(trajectory.trajectory_id)
        return float(trajectory.sample)

    def all_of(group: Sequence[Trajectory]) -> list[float]:
        return [one(trajectory) for trajectory in group]

    reward = Reward(all_of if of_group else one)
    first = Bench(single(), slow({"p1": 20.0}), reward=reward)
    run_virtual(first.run())
    assert sorted(judged) == ["p0/0", "p0/1", "p1/0", "p1/1"]
    cut = max(i for i, (name, event) in enumerate(first.log) if name == "p0/1" and isinstance(event, Scored)) + 1
    judged.clear()
    groups = run_virtual(Bench(single(), slow({}), reward=reward).run(resume=histories(first.log[:cut])))
    assert sorted(judged) == ["p1/0", "p1/1"]
    assert [t.score for group in sorted(groups, key=lambda g: g.index) for t in group.trajectories] == [0, 1, 0, 1]


def test_only_the_unfinished_groups_of_a_journal_can_be_asked_for(tmp_path: Path) -> None:
    bench = Bench(single(), slow({"p1": 20.0}), journal=journal.Journal(tmp_path / "j.sqlite"))

    async def main() -> None:
        asyncio.get_running_loop().call_later(10.0, bench.scheduler.stop, "asked")
        await bench.run()

    run_virtual(main())
    assert bench.scheduler.recorder.journal is not None
    bench.scheduler.recorder.journal.close()
    assert [h[0].trajectory_id for h in journal.histories(tmp_path / "j.sqlite")] == ["p0/0", "p0/1", "p1/0", "p1/1"]
    left = [history[0].trajectory_id for history in journal.histories(tmp_path / "j.sqlite", unfinished=True)]
    assert left == ["p1/0", "p1/1"]


def test_prompts_that_raise_leave_no_trajectory_without_an_end() -> None:
    def source() -> Iterator[Prompt]:
        yield from listed(2)
        raise RuntimeError("the data set is broken")

    bench = Bench(single(), slow({}))

    async def main() -> None:
        async for _ in bench.scheduler.run(source()):
            pass

    with pytest.raises(RuntimeError, match="the data set is broken"):
        run_virtual(main())
    for history in histories(bench.log):
        assert Trajectory.fold(history).stop_reason == "cancelled"


def test_a_turn_of_which_nothing_came_is_asked_for_again_without_a_second_header() -> None:
    """A row that leads from a timeout back to generating: the header stands there already."""
    rows = [*TOOLS["transitions"], {"trigger": "timed_out", "source": "GENERATING", "dest": "GENERATING"}]
    states = {**TOOLS["states"], "GENERATING": {"timeout": 3.0}}
    graph = AgentGraph(
        agent="a", limits={"assistant_turns": 6, "tool_calls": 6}, states=states, transitions=rows,
        tools={"tool": {"use": "tests.law_tools:echo", "timeout": 50.0}},
    )  # fmt: skip
    tries: dict[int, int] = defaultdict(int)

    def choose(request: Request) -> Turn:
        tries[request.turn] += 1
        if request.turn == 0:
            return Turn(text=call("tool", "hello"))
        return Turn(text="done", delay=50.0 if tries[1] == 1 else 0.1)

    (group,) = run_virtual(Bench(graph, choose).run(n=1, prompts=1))
    (trajectory,) = group.trajectories
    assert trajectory.stop_reason == "answered"
    assert trajectory.visits["GENERATING"] == 3
    assert (
        tokenizer()
        .decode(trajectory.streams[0].tokens.ids)
        .endswith("<tool_response>\nhello\n</tool_response><|im_end|>\n<|im_start|>assistant\ndone<|im_end|>")
    )


def test_what_is_said_after_a_turn_of_which_nothing_came_opens_the_stream_again() -> None:
    """The header of the turn that never came cannot be taken back, so the history is rendered anew."""
    rows = [
        *TOOLS["transitions"],
        {"trigger": "timed_out", "source": "GENERATING", "dest": "HURRYING"},
        {"trigger": "written", "source": "HURRYING", "dest": "GENERATING"},
    ]
    states = {**TOOLS["states"], "GENERATING": {"timeout": 3.0}, "HURRYING": {"handler": "write", "prompt": "Hurry!"}}
    graph = AgentGraph(
        agent="a", limits={"assistant_turns": 6, "tool_calls": 6}, states=states, transitions=rows,
        tools={"tool": {"use": "tests.law_tools:echo", "timeout": 50.0}},
    )  # fmt: skip
    tries: dict[int, int] = defaultdict(int)

    def choose(request: Request) -> Turn:
        tries[request.turn] += 1
        if request.turn == 0:
            return Turn(text=call("tool", "hello"))
        return Turn(text="done", delay=50.0 if tries[1] == 1 else 0.1)

    (group,) = run_virtual(Bench(graph, choose).run(n=1, prompts=1))
    (trajectory,) = group.trajectories
    assert trajectory.stop_reason == "answered", trajectory.detail
    first, second = trajectory.streams
    assert (
        tokenizer()
        .decode(second.tokens.ids)
        .endswith(
            "<tool_response>\nhello\n</tool_response><|im_end|>\n<|im_start|>user\nHurry!<|im_end|>\n"
            "<|im_start|>assistant\ndone<|im_end|>"
        )
    )
    assert second.tokens.trained_length == len(tokenizer().encode("done<|im_end|>"))
    assert first.tokens.trained_length > 0


@pytest.mark.parametrize("deliver_at_end", [False, True])
def test_a_filter_that_turns_everything_down_ends_the_run(deliver_at_end: bool) -> None:
    """What has run is kept: the next run delivers it, and goes on with what was set aside."""
    bench = Bench(
        single(),
        lambda request: Turn(text="word", delay=1.0),
        reward=Reward(lambda trajectory: 0.5),
        group_filter=GroupFilter(lambda group: group[0].group_id == "p1"),
    )
    endless = (Prompt(prompt_id=f"p{i}", messages=({"role": "user", "content": "?"},)) for i in itertools.count())
    came: list[Group] = []

    async def watched(groups: AsyncIterator[Group]) -> AsyncIterator[Group]:
        async for group in groups:
            came.append(group)
            yield group

    async def main() -> list[str]:
        options = {"target_groups": 2, "over_sample": 2, "deliver_at_end": deliver_at_end}
        with pytest.raises(TargetNotReached) as caught:
            [group async for group in watched(bench.scheduler.run(endless, 2, max_filtered=2.5, **options))]
        assert len([group for group in came if not group.dropped]) == (0 if deliver_at_end else 1)
        says = str(caught.value)
        assert "'<lambda>' has turned down 6 groups, and 1 of the 2 that were asked for are there" in says
        assert "scores: [0.5, 0.5]" in says
        bench.scheduler.scoring.group_filter = None
        later = [group async for group in bench.scheduler.run(endless, 2, **options)]
        await bench.scheduler.drop_carried()
        return [group.group_id for group in later if not group.dropped]

    later = run_virtual(main())
    assert len(later) == 2
    assert ("p1" in later) == deliver_at_end, "kept where it was not delivered"
    with pytest.raises(ConfigError, match="max_filtered must be at least 0 groups"):
        run_virtual(bench.run(target_groups=1, max_filtered=-1))


def test_without_a_bound_or_a_target_a_filter_ends_nothing() -> None:
    for options in ({"target_groups": 1, "max_filtered": None}, {}):
        bench = Bench(single(), lambda request: Turn(text="word"), group_filter=GroupFilter(lambda group: False))
        groups = run_virtual(bench.run(n=1, prompts=40, **options))
        assert [group.dropped for group in groups] == [True] * 40


@pytest.mark.parametrize(("over_sample", "most"), [(1.0, 2), (1.5, 3), (3.0, 6)])
def test_no_more_groups_begin_than_a_target_is_worth(over_sample: float, most: int) -> None:
    bench = Bench(
        single(),
        lambda request: Turn(text="word", delay=1.0 + int(request.group_id[1:])),
        group_filter=GroupFilter(lambda group: group[0].group_id not in ("p0", "p1")),
    )
    under_way: set[str] = set()
    widest = 0

    def watch(trajectory: Trajectory, event: AnyEvent) -> None:
        nonlocal widest
        under_way.add(trajectory.group_id)
        if type(event).__name__ in ("Ended", "Suspended"):
            under_way.discard(trajectory.group_id)
        widest = max(widest, len(under_way))

    recorder = bench.scheduler.recorder
    recorder.listeners = (*recorder.listeners, watch)

    async def main() -> list[Group]:
        groups = await bench.run(n=1, prompts=20, target_groups=2, over_sample=over_sample)
        await bench.scheduler.drop_carried()
        return groups

    assert [group.group_id for group in run_virtual(main()) if not group.dropped] == ["p2", "p3"]
    assert widest == most
    with pytest.raises(ConfigError, match="over_sample must be at least 1"):
        run_virtual(bench.run(target_groups=1, over_sample=0.5))


# -- found by attacking it -----------------------------------------------------------------------------------------


def test_calls_have_the_same_ids_after_an_interruption() -> None:
    """Their randomness follows from their ids."""
    script = [call("tool", "one"), call("tool", "two"), "done"]

    def choose(request: Request) -> Turn:
        return Turn(text=script[request.turn], delay=1.0, chunks=4)

    def ids(groups: list[Group]) -> list[str]:
        messages = groups[0].trajectories[0].streams[0].messages
        return [message["tool_call_id"] for message in messages if message["role"] == "tool"]

    whole = ids(run_virtual(Bench(with_tool("tests.law_tools:echo"), choose).run(n=1, prompts=1)))
    bench = Bench(with_tool("tests.law_tools:echo"), choose)

    async def main() -> list[Group]:
        asyncio.get_running_loop().call_later(2.5, bench.scheduler.stop, "asked")  # half-way through the first turn
        groups = await bench.run(n=1, prompts=1)
        return await bench.run(n=1, prompts=1, resume=groups[0].trajectories)

    assert ids(run_virtual(main())) == whole
    assert len(set(whole)) == 2


def test_reopened_groups_that_a_target_leaves_over_are_carried() -> None:
    first = Bench(single(), slow({}))

    async def stopped() -> list[Group]:
        asyncio.get_running_loop().call_later(0.5, first.scheduler.stop, "asked")
        return await first.run(n=1, prompts=5)

    left = [trajectory for group in run_virtual(stopped()) for trajectory in group.trajectories]
    bench = Bench(single(), slow({}))

    async def main() -> tuple[list[str], list[str], list[str]]:
        one = await bench.run(n=1, prompts=0, resume=left, target_groups=1, over_sample=1)
        carried = [group.group_id for group in bench.scheduler.carried]
        rest = [group.group_id async for group in bench.scheduler.run([])]
        return [group.group_id for group in one], carried, rest

    one, carried, rest = run_virtual(main())
    assert len(one) == 1
    assert sorted(one + carried) == sorted(one + rest) == [f"p{i}" for i in range(5)]


@pytest.mark.parametrize("cancelled_at", [0.05, 0.3, 0.55, 1.05, 1.3, 2.4])
def test_a_step_that_is_cancelled_loses_nothing_that_earlier_steps_carried(cancelled_at: float) -> None:
    bench = Bench(single(), slow({"p0": 0.3, "p1": 0.1, "p2": 0.4, "p3": 0.35}))

    async def main() -> None:
        first = await bench.run(n=1, prompts=4, target_groups=1, over_sample=4)
        before = {group.group_id for group in bench.scheduler.carried}
        step = asyncio.ensure_future(bench.run(n=1, prompts=0, target_groups=1, over_sample=1))
        await asyncio.sleep(cancelled_at)
        step.cancel()
        came: set[str] = set()
        with suppress(asyncio.CancelledError):
            came = {group.group_id for group in await step}
        ended = {t.group_id for t in everything() if t.stop_reason == "cancelled"}
        after = {group.group_id for group in bench.scheduler.carried}
        assert came | ended | after == before
        assert len(first) == 1
        again = [group.group_id async for group in bench.scheduler.run(listed(4, start=10), 1)]
        assert set(again) == after | {"p10", "p11", "p12", "p13"}

    def everything() -> list[Trajectory]:
        return [Trajectory.fold(history) for history in histories(bench.log)]

    run_virtual(main())


def test_a_data_set_that_breaks_costs_nothing_that_is_under_way() -> None:
    bench = Bench(single(), slow({"p0": 0.3}))

    def source() -> Iterator[Prompt]:
        yield from listed(2)
        raise OSError("the disk is gone")

    async def main() -> list[Group]:
        with pytest.raises(OSError, match="the disk is gone"):
            async for _ in bench.scheduler.run(source(), 1, target_groups=2):
                pass
        assert {group.group_id for group in bench.scheduler.carried} >= {"p0"}
        return [group async for group in bench.scheduler.run([])]

    assert all(t.stop_reason == "answered" for group in run_virtual(main()) for t in group.trajectories)


def test_prompts_may_go_round_and_round() -> None:
    bench = Bench(single(), slow({"p0": 0.5}))

    async def main() -> list[str]:
        return [group.group_id async for group in bench.scheduler.run(itertools.cycle(listed(3)), 1, target_groups=7)]

    ids = run_virtual(main())
    assert len(set(ids)) == 7
    assert {"p1", "p1#2", "p1#3"} <= set(ids)


def test_stale_ones_that_wait_release_their_tools_and_are_not_handed_out() -> None:
    def choose(request: Request) -> Turn:
        if request.group_id == "p1":
            return Turn(text="done", delay=3.0)
        return Turn(text=[call("tool", "one"), "done"][min(request.turn, 1)].replace('"text"', '"line"'), delay=2.5)

    OPENED.clear()
    bench = Bench(with_tool("tests.unit.scheduler.test_resume:Notebook"), choose, max_staleness=0)

    async def main() -> list[Group]:
        await bench.run(n=1, prompts=2, target_groups=1, over_sample=2)
        assert OPENED == ["+p0/0"]
        await bench.scheduler.update_weights({})
        assert OPENED == ["+p0/0", "-"]
        return [group async for group in bench.scheduler.run([])]

    (group,) = run_virtual(main())
    assert [t.suspended for t in group.discarded] == [None]
    assert set(group.trajectories[0].streams[0].tokens.response_versions().tolist()) == {-1, 1}


def test_a_pause_of_the_callers_own_outlives_an_update() -> None:
    bench = Bench(single(), slow({}))
    dispatcher = bench.scheduler.clients["policy"]

    async def main() -> list[Group]:
        running = asyncio.ensure_future(bench.run(n=1, prompts=1))
        await asyncio.sleep(0.35)
        update = asyncio.ensure_future(bench.scheduler.update_weights({}))
        await dispatcher.pause("asleep")
        await update
        assert dispatcher.paused
        before = len(bench.engine.log)
        await asyncio.sleep(50.0)
        assert len(bench.engine.log) == before
        await dispatcher.resume("asleep")
        return await running

    assert run_virtual(main())[0].trajectories[0].stop_reason == "answered"


def test_rewards_beyond_the_target_are_not_waited_for() -> None:
    async def reward(trajectory: Trajectory) -> float:
        await asyncio.sleep(500.0 if trajectory.group_id == "p0" else 0.0)
        return 1.0

    bench = Bench(
        single(), lambda request: Turn(text="word", delay=0.1 + int(request.group_id[1:])), reward=Reward(reward)
    )

    async def main() -> tuple[float, list[Group]]:
        began = asyncio.get_running_loop().time()
        await bench.run(n=1, prompts=2, target_groups=1, over_sample=2)
        took = asyncio.get_running_loop().time() - began
        return took, [group async for group in bench.scheduler.run([])]

    took, (group,) = run_virtual(main())
    assert took < 5.0
    assert group.trajectories[0].score == 1.0


def test_a_call_that_had_not_begun_is_made_even_if_it_must_not_be_repeated() -> None:
    CALLED.clear()
    script = [call("tool", "ann") + "\n" + call("tool", "bob"), "done"]
    graph = with_tool("tests.unit.scheduler.test_resume:pay", repeatable=False)
    states = dict(graph.states)
    states["PROCESSING_TOOLS"] = states["PROCESSING_TOOLS"].model_copy(update={"parallel": 1})
    bench = Bench(
        graph.model_copy(update={"states": states}), lambda request: Turn(text=script[request.turn], delay=1.0)
    )

    async def main() -> list[Group]:
        asyncio.get_running_loop().call_later(5.0, bench.scheduler.stop, "asked")
        groups = await bench.run(n=1, prompts=1)
        return await bench.run(n=1, prompts=1, resume=groups[0].trajectories)

    (group,) = run_virtual(main())
    tool_texts = [m["content"] for m in group.trajectories[0].streams[0].messages if m["role"] == "tool"]
    assert CALLED == ["ann", "bob"]
    assert "may have had its effect" in tool_texts[0]
    assert tool_texts[1] == "paid bob"


def test_a_refused_resume_leaves_the_journal_alone_and_an_agent_that_changed_is_named(tmp_path: Path) -> None:
    first = Bench(single(), slow({}))

    async def stopped() -> list[Group]:
        asyncio.get_running_loop().call_later(0.5, first.scheduler.stop, "asked")
        return await first.run(n=1, prompts=2)

    run_virtual(stopped())
    renamed = {"states": {**SINGLE["states"], "THINKING": SINGLE["states"]["GENERATING"] | {"handler": "generate"}},
               "transitions": [{**row, **{key: "THINKING" for key in ("source", "dest") if row[key] == "GENERATING"}}
                               for row in SINGLE["transitions"]]}  # fmt: skip
    renamed["states"].pop("GENERATING")
    changed = AgentGraph(agent="a", limits={"assistant_turns": 6}, **renamed)
    with journal.Journal(tmp_path / "j.sqlite") as kept:
        bench = Bench(changed, slow({}), journal=kept)
        with pytest.raises(ConfigError, match="stands in state 'GENERATING', which agent 'a' does not have any more"):
            run_virtual(bench.run(n=1, prompts=2, resume=histories(first.log)))
        right = Bench(single(), slow({}), journal=kept)
        assert len(run_virtual(right.run(n=1, prompts=2, resume=histories(first.log)))) == 2


def test_a_closed_rollout_says_so() -> None:
    rollout = fr.Rollout(single(), {"kind": "scripted", "turns": ["x"]})
    rollout.run(["one"])
    rollout.close()
    with pytest.raises(EngineError, match="this rollout is closed"):
        rollout.run(["two"])
    rollout.close()


def test_closing_a_stream_waits_for_what_runs() -> None:
    async def main() -> None:
        rollout = fr.Rollout(single(), ScriptedEngine(slow({"0": 5.0}), tokenizer=tokenizer()))
        stream = rollout.stream(["one", "two"])
        await anext(stream)
        await stream.aclose()
        assert not rollout.scheduler.samples.running
        await rollout.aclose()

    run_virtual(main())


SPEAKS: dict[str, Any] = {
    "limits": {"assistant_turns": 4, "tool_calls": 4, "response_tokens": 400, "wall_seconds": 1000},
    "states": {"PENDING": {"handler": "prompt"}, "GENERATING": {"handler": "generate", "timeout": 100}},
    "transitions": [
        {"trigger": "prompted", "source": "PENDING", "dest": "GENERATING"},
        {"trigger": "generated", "source": "GENERATING", "dest": "TERMINATED", "stop_reason": "answered"},
    ],
}


async def interrupted(bench: Bench, at: float | None) -> list[Group]:
    """Run one sample; set it aside at some time, if any, and go on with it at once."""
    if at is not None:
        asyncio.get_running_loop().call_later(at, bench.scheduler.suspend, "p0/0")
    groups = await bench.run(1, 1)
    return groups if at is None else await bench.run(1, 0, resume=groups[0].all)


CALLING = '<tool_call>\n{"name": "%s", "arguments": {"task": "t"}}\n</tool_call>'
CALLS: dict[str, Any] = SPEAKS | {
    "states": SPEAKS["states"] | {"PROCESSING_TOOLS": {"handler": "call_tools", "timeout": 900}},
    "transitions": [
        SPEAKS["transitions"][0],
        {
            "trigger": "generated",
            "source": "GENERATING",
            "dest": "PROCESSING_TOOLS",
            "conditions": [{"name": "has_tool_calls"}],
        },
        SPEAKS["transitions"][1],
        {"trigger": "tools_done", "source": "PROCESSING_TOOLS", "dest": "GENERATING"},
    ],
}


@pytest.mark.parametrize("at", [None, 5.0, 25.0, 45.0, 65.0, 85.0])
def test_sub_agents_say_the_same_wherever_their_callers_were_interrupted(at: float | None) -> None:
    """And those that served a sub-agent whose call is made again are in no batch either."""
    deep = AgentGraph(**{"agent": "deep", **SPEAKS})
    middle = AgentGraph(**{"agent": "middle", **CALLS, "tools": {"ask": {"agent": deep, "timeout": 500}}})
    outer = AgentGraph(**{"agent": "outer", **CALLS, "tools": {"delegate": {"agent": middle, "timeout": 900}}})

    def script(request: Request) -> Turn:
        tool = {"outer": "delegate", "middle": "ask"}.get(request.agent)
        said = f"answer {request.sampling.seed % 100_000}" if tool is None or request.turn else CALLING % tool
        return Turn(text=said, delay=20.0)

    bench = Bench(outer, script)
    (group,) = run_virtual(interrupted(bench, at))
    said = [[list(stream.tokens.ids) for stream in trajectory.streams] for trajectory in group.all]
    assert [trajectory.stop_reason for trajectory in group.all] == ["answered"] * 3
    if at is not None:
        (whole,) = run_virtual(Bench(outer, script).run(1, 1))
        assert said == [[list(stream.tokens.ids) for stream in trajectory.streams] for trajectory in whole.all]


@pytest.mark.parametrize("at", [None, 35.0])
def test_a_sub_agent_that_its_call_gave_up_stays(at: float | None) -> None:
    """Its call was answered (its time was up), so an interruption later on takes nothing of it back."""
    helper = AgentGraph(**{"agent": "helper", **SPEAKS})
    outer = AgentGraph(**{"agent": "outer", **CALLS, "tools": {"delegate": {"agent": helper, "timeout": 5}}})

    def script(request: Request) -> Turn:
        if request.agent == "helper":
            return Turn(text="a b c d e f", delay=2.0, chunks=6)
        return Turn(text="Done." if request.turn else CALLING % "delegate", delay=20.0)

    bench = Bench(outer, script)
    (group,) = run_virtual(interrupted(bench, at))
    assert [(t.stop_reason, t.trained_tokens > 0) for t in group.all] == [("answered", True), ("cancelled", True)]
    assert group.discarded == []


def test_agents_of_one_name_are_not_taken_for_one_another() -> None:
    one, other = AgentGraph(**{"agent": "solver", **SPEAKS}), AgentGraph(**{"agent": "solver", **CALLS})
    bench = Bench(one, lambda request: Turn(text="Done.", delay=20.0))

    async def main() -> list[Trajectory]:
        asyncio.get_running_loop().call_later(5, bench.scheduler.suspend, "p0/0")
        return [trajectory for group in await bench.run(1, 1) for trajectory in group.all]

    left = run_virtual(main())

    async def again(*graphs: AgentGraph) -> list[Group]:
        agents = {str(number): graph for number, graph in enumerate(graphs)}
        scheduler = Scheduler(agents, {"policy": EngineClient(bench.engine)})
        return [group async for group in scheduler.run([], 1, resume=left)]

    with pytest.raises(ConfigError, match="several agents of the run are called 'solver'"):
        run_virtual(again(other, one))
    assert [group.ended for group in run_virtual(again(one, one.model_copy()))] == [True], "the same one twice is one"
