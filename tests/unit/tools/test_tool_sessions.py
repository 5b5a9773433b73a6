"""What a trajectory has of its tools: values, instances that live as long as it does, agents that it asks."""

import asyncio
import dataclasses
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.agent import graph
from fsm_rollout.errors import ToolError
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.tools import AgentAnswer, AgentCall, Toolbox
from fsm_rollout.tools.bound_tools import FunctionTool
from fsm_rollout.trajectory.events import Called, MalformedCall, ToolCall
from tests.cases import table
from tests.unit.tools.kit import BROKEN, HELPER, LOG, WHO, _fields, a_call, box, facts, made, opened

# What tools are given.


@pytest.mark.virtual_time
async def test_a_tool_may_ask_who_calls():
    tools = box(about="about", threaded="threaded_about")
    WHO.set("me")
    session = opened(tools, trajectory_id="g/3", group_id="g", extra={"k": 1})
    other = opened(tools, trajectory_id="g/3", group_id="g", extra={"k": 1}, seed=8)
    first, second, again, elsewhere, threaded = (
        await session.call(a_call("about", "c1")),
        await session.call(a_call("about", "c2")),
        await opened(tools, trajectory_id="g/3", group_id="g", extra={"k": 1}).call(a_call("about", "c1")),
        await other.call(a_call("about", "c1")),
        await session.call(a_call("threaded", "c3")),
    )
    assert '"ids": ["g/3", "g"]' in first.result
    assert '"extra": {"k": 1}, "who": "me"' in first.result
    assert first == again, "the same call of the same trajectory has the same random numbers"
    assert len({first.result, second.result, elsewhere.result}) == 3
    assert threaded.result == "me"


def test_hidden_values_come_from_the_agent_and_the_prompt_and_are_nobody_elses():
    tools = box(search={"use": "search", "kwargs": {"limit": 5, "table": ["agent"]}})
    assert list(tools.schemas("main")[0]["function"]["parameters"]["properties"]) == ["query"]
    tools_kwargs = {"search": {"table": ["prompt"]}}
    assert made(tools, a_call("search", query="q")).result == "['agent', 'q'] 5"
    assert made(tools, a_call("search", query="q"), tools_kwargs=tools_kwargs).result == "['prompt', 'q'] 5"
    assert made(tools, a_call("search", query="q"), tools_kwargs=tools_kwargs).result == "['prompt', 'q'] 5"
    assert tools_kwargs == {"search": {"table": ["prompt"]}}
    assert made(tools, a_call("search", query="q", limit=1)).failure == "bad_arguments"


@pytest.mark.parametrize("case", table("tool_results")["kwargs"], ids=str)
def test_a_prompts_tools_kwargs_are_checked_before_anything_runs(case: dict[str, Any]):
    tools = box(search="search", sandbox="Sandbox", agent={"agent": HELPER}, plain="Plain")
    with pytest.raises(ToolError, match=case["says"]):
        opened(tools, tools_kwargs=case["given"])


async def test_schemas_are_one_object_for_each_context():
    tools = {name: {"use": f"tests.unit.tools.kit:{name}"} for name in ("sync_add", "give")}
    contexts = {"critic": {}, "helper": {"tools": ["give"]}}
    agent = graph.AgentGraph(agent="a", tools=tools, contexts=contexts, states={"PENDING": {}}, transitions=())
    toolbox = Toolbox(agent)
    names = {c: [s["function"]["name"] for s in toolbox.schemas(c)] for c in ("main", "critic", "helper")}
    assert names == {"main": ["sync_add", "give"], "critic": [], "helper": ["give"]}
    assert toolbox.schemas("main") is toolbox.schemas("main")
    assert (
        await opened(toolbox).call(a_call("sync_add", left=1, right=1), context="helper")
    ).result == "error: there is no tool 'sync_add'; the tools are: give"


# Classes.


@pytest.mark.virtual_time
async def test_an_instance_lives_as_long_as_its_trajectory():
    tools = box(sandbox={"use": "Sandbox", "kwargs": {"size": 9}}, unused="Sandbox")
    session = opened(tools, tools_kwargs={"sandbox": {"start": 5}})
    other = opened(tools)
    assert LOG == [], "nothing is made before the first call"
    results = await asyncio.gather(*(session.call(a_call("sandbox", f"c{i}", by=1)) for i in range(3)))
    assert [r.result for r in results] == ["6", "7", "8"], "calls of one turn share the instance"
    assert (await other.call(a_call("sandbox", by=10))).result == "10", "trajectories do not"
    assert LOG == ["init 9", "create 5", "created", "init 9", "create 0", "created"]
    LOG.clear()
    assert await session.release() == await session.release() == []
    assert LOG == ["release"]
    await other.release()
    with pytest.raises(ToolError, match="have been released"):
        await session.call(a_call("sandbox"))


def test_sync_classes_run_in_threads():
    result = made(box(tool="SyncTool"), a_call("tool"), tools_kwargs={"tool": {"start": 3}})
    assert (result.result, LOG) == ("3", ["released"])
    assert made(box(plain="Plain"), a_call("plain")).result == "plain"


@pytest.mark.virtual_time
async def test_a_failing_create_is_not_the_models_fault_and_is_tried_anew():
    session = opened(box(sandbox="Sandbox"), tools_kwargs={"sandbox": {"fail": "connection"}})
    first = await session.call(a_call("sandbox", "c1"))
    assert (first.failure, first.bad) == ("ConnectionResetError", False)
    assert first.result == (
        "error: sandbox is not available (ConnectionResetError); try again later or go on without it"
    )
    assert (await session.call(a_call("sandbox", "c2"))).result == "1"
    assert await session.release() == []
    assert LOG.count("release") == 1


@pytest.mark.virtual_time
async def test_a_slow_create_goes_on_for_the_next_call():
    tools = box(sandbox={"use": "Sandbox", "timeout": 3})
    session = opened(tools, tools_kwargs={"sandbox": {"slow": 5}})
    assert (await session.call(a_call("sandbox", "c1"))).failure == "timed_out"
    assert (await session.call(a_call("sandbox", "c2"))).result == "1"
    assert asyncio.get_running_loop().time() == 5.0
    assert LOG == ["init 1", "create 0", "created"]
    await session.release()


@pytest.mark.virtual_time
async def test_a_create_under_way_is_stopped_by_the_release():
    tools = box(sandbox={"use": "Sandbox", "timeout": 3})
    session = opened(tools, tools_kwargs={"sandbox": {"slow": 500}})
    await session.call(a_call("sandbox", "c1"))
    assert await session.release() == []
    assert asyncio.get_running_loop().time() == 3.0
    assert LOG == ["init 1", "create 0"]


async def test_a_hanging_sync_create_is_reported():
    session = opened(box(tool={"use": "HangingCreate", "timeout": 0.01}))
    assert (await session.call(a_call("tool"))).failure == "timed_out"
    assert (await session.release()) == ["tool 'tool': release did not end within 0.01 s and was stopped"]


@pytest.mark.virtual_time
async def test_a_release_that_fails_is_reported_and_hurts_no_other():
    session = opened(box(bad="BadRelease", slow={"use": "SlowRelease", "timeout": 2}, good="Sandbox"))
    for name in ("bad", "slow", "good"):
        await session.call(a_call(name, name))
    assert await session.release() == [
        "tool 'bad': release raised Odd: strange",
        "tool 'slow': release did not end within 2 s and was stopped",
    ]
    assert LOG.count("release") == 2


@pytest.mark.virtual_time
async def test_a_release_ends_what_it_began_when_it_is_cancelled():
    session = opened(box(slow={"use": "SlowRelease", "timeout": 5}, good="Sandbox"))
    for name in ("slow", "good"):
        await session.call(a_call(name, name))
    releasing = asyncio.create_task(session.release())
    await asyncio.sleep(0)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert LOG.count("release") == 1
    assert asyncio.get_running_loop().time() == 5.0


@pytest.mark.virtual_time
async def test_an_instance_is_released_when_its_calls_were_cancelled():
    session = opened(box(sandbox="Sandbox"), tools_kwargs={"sandbox": {"slow": 1}})
    call = asyncio.create_task(session.call(a_call("sandbox")))
    await asyncio.sleep(0.5)
    call.cancel()
    await asyncio.wait({call})
    await asyncio.sleep(1)
    assert await session.release() == []
    assert LOG == ["init 1", "create 0", "created", "release"]


@pytest.mark.parametrize(
    ("order", "results", "in_order"), [("called", ["1", "3", "6"], True), ("any", ["1", "2", "3"], False)]
)
def test_calls_of_one_turn_to_one_instance_run_in_their_order(order: str, results: list[str], in_order: bool) -> None:
    """Also where the first of them is tried again; at once they would lose each other's updates."""

    async def main() -> tuple[list[Called], list[Called], float]:
        tools = box(account={"use": "Account", "order": order, "retry": {"attempts": 2}})
        one, other = opened(tools), opened(tools, trajectory_id="u")
        calls = [asyncio.create_task(one.call(a_call("account", f"c{i}", by=i))) for i in (1, 2, 3)]
        beside = await other.call(a_call("account", by=5))
        seconds = asyncio.get_running_loop().time()
        return [await call for call in calls], [beside], seconds

    made_calls, (beside,), seconds = run_virtual(main())
    assert [call.result for call in made_calls] == results
    assert beside.result == "5"
    assert seconds < 10.0, "another trajectory has an instance of its own, and waits for nobody"
    ends = [call.seconds for call in made_calls]
    assert (ends == sorted(ends)) is in_order


@pytest.mark.virtual_time
async def test_a_call_that_is_given_up_leaves_its_turn_to_the_next() -> None:
    session = opened(box(sandbox={"use": "Account", "timeout": 6}))
    calls = [asyncio.create_task(session.call(a_call("sandbox", f"c{i}", by=i))) for i in (1, 2, 3)]
    await asyncio.sleep(7.0)
    calls[1].cancel()
    await asyncio.wait(calls)
    assert [call.cancelled() or call.result().result for call in calls] == [
        "error: sandbox did not answer and was stopped after 6 s; try again or go on without it", True, "3",
    ]  # fmt: skip


# Agents.


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (AgentAnswer("done"), {"result": "done"}),
        (
            AgentAnswer("half", failure="limit:assistant_turns"),
            {
                "result": "error: ask ended without an answer (limit:assistant_turns); try again or go on without it",
                "failure": "limit:assistant_turns",
            },
        ),
    ],
)
def test_an_agent_is_run_with_its_task(answer: AgentAnswer, told: dict[str, Any]):
    async def run_agent(agent: graph.AgentGraph, call: AgentCall) -> AgentAnswer:
        assert (call.tool, agent, call.task, call.call_id, call.number) == ("ask", HELPER, "do it", "c1", 1)
        return dataclasses.replace(answer, child_id="t/x.1")

    result = made(box(ask={"agent": HELPER}), a_call("ask", task="do it"), run_agent=run_agent)
    assert facts(result) == told | {"child_id": "t/x.1", "tries": 1}


def test_a_failed_agent_may_be_tried_again():
    async def run_agent(agent: graph.AgentGraph, call: AgentCall) -> AgentAnswer:
        LOG.append(call.task)
        return AgentAnswer("ok") if len(LOG) == 2 else AgentAnswer("", failure="failed:EngineError")

    def ask(errors: list[str]) -> Called:
        LOG.clear()
        tools = box(ask={"agent": HELPER, "retry": {"attempts": 2, "errors": errors}})
        return made(tools, a_call("ask", task="x"), run_agent=run_agent)

    assert (ask(["EngineError"]).result, ask(["ValueError"]).failure) == ("ok", "failed:EngineError")


def test_an_agents_end_is_awaited_however_long_it_takes():
    """Its trajectory must be recorded: it is not left behind as a tool would be."""

    async def run_agent(agent: graph.AgentGraph, call: AgentCall) -> AgentAnswer:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(60)
            LOG.append("recorded")
        return AgentAnswer("")

    result = made(box(ask={"agent": HELPER, "timeout": 1}), a_call("ask", task="x"), run_agent=run_agent)
    assert (result.failure, result.seconds, LOG) == ("timed_out", 61.0, ["recorded"])


# All of it together.


@given(
    st.lists(
        st.sampled_from(
            [
                a_call("add", left=1, right=2),
                a_call("add", left="x"),
                a_call("nothing"),
                BROKEN,
                a_call("fail", kind="odd"),
                a_call("fail", kind="cancelled"),
                a_call("sleep", seconds=1),
                a_call("sleep", seconds=9),
                a_call("sandbox"),
                a_call("bad", by=2),
            ]
        ),
        max_size=8,
    ),
    st.none() | st.floats(0, 4),
)
def test_every_call_has_a_result_and_every_instance_its_release(
    attempts: list[ToolCall | MalformedCall], stop_at: float | None
):
    LOG.clear()
    slot = {"timeout": 2, "concurrency": 2}
    tools = box(
        add={"use": "async_add", **slot},
        fail={"use": "async_fail", **slot},
        sleep={"use": "sleep", **slot},
        sandbox={"use": "Sandbox", **slot},
        bad={"use": "BadRelease", **slot},
    )

    async def settled(calls: list[Awaitable[Called]]) -> list[Called | BaseException]:
        return await asyncio.gather(*calls, return_exceptions=True)

    async def main() -> None:
        session = opened(tools, tools_kwargs={"sandbox": {"slow": 1}})
        calls = [
            asyncio.create_task(session.call(type(a)(**{**_fields(a), "id": f"c{i}"}))) for i, a in enumerate(attempts)
        ]
        if stop_at is not None:
            await asyncio.sleep(stop_at)
            for call in calls:
                call.cancel()
        allowed = Called if stop_at is None else (Called, asyncio.CancelledError)
        assert all(isinstance(result, allowed) for result in await settled(calls))
        await session.release()

    run_virtual(main())
    assert LOG.count("created") == LOG.count("release")


def test_a_call_looks_no_further_than_its_own_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {f"tool_{number}": graph.ToolSpec(use="fsm_rollout.tools.calculator:calculate") for number in range(30)}
    box = Toolbox(graph.AgentGraph(agent="a", tools=specs, states={"PENDING": {}}, transitions=()))
    assert box.tools_of("main") is box.tools_of("main")
    assert box.check(None) == {}
    monkeypatch.setattr(FunctionTool, "check", lambda *_: pytest.fail("every tool was checked again"))
    assert (box.check(None), box.check({})) == ({}, {})
