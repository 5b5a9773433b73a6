"""What interruptions leave whole: the next run, answers to questions, sub-agents with wrong glue, what closes."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.errors import GlueMismatchError
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.embedded import tokenizer
from tests.unit.scheduler.test_scheduler import SINGLE, TOOLS, agent, prompts

SLOW = {**SINGLE, "states": {"PENDING": {}, "GENERATING": {"timeout": 1000.0}}}


def handled_by(monkeypatch: pytest.MonkeyPatch, handler: type[State]) -> AgentGraph:
    module = ModuleType("handlers_of_this_test")
    setattr(module, handler.__name__, handler)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    state = {"handler": f"{module.__name__}:{handler.__name__}"}
    transitions = [
        {"trigger": "prompted", "source": "PENDING", "dest": "WORKING"},
        {"trigger": "generated", "source": "WORKING", "dest": "TERMINATED"},
    ]
    return agent({"states": {"PENDING": {}, "WORKING": state}, "transitions": transitions})


def scheduler_of(graph: AgentGraph, script: Any) -> Scheduler:
    return Scheduler({graph.agent: graph}, {"policy": EngineClient(ScriptedEngine(script, tokenizer=tokenizer()))})


class CleansUpSlowly(State):
    triggers = ("generated",)
    spends = "assistant_turns"

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        try:
            await asyncio.sleep(1000 if trajectory.trajectory_id.startswith("p") else 0)
        except asyncio.CancelledError:
            await asyncio.sleep(10)
            raise
        return Outcome("generated")


def test_a_run_that_is_cancelled_twice_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[str]:
        scheduler = scheduler_of(handled_by(monkeypatch, CleansUpSlowly), ["x"])

        async def iterate() -> None:
            async for _ in scheduler.run(prompts(2)):
                pass

        task = asyncio.create_task(iterate())
        for _ in range(2):
            await asyncio.sleep(5)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not scheduler.groups
        assert not scheduler.samples.running
        later = [prompt.model_copy(update={"prompt_id": "q"}) for prompt in prompts(1)]
        async with asyncio.timeout(1000):
            return [group.group_id async for group in scheduler.run(later)]

    assert run_virtual(main()) == ["q"]


ANSWERS: list[tuple[str, str]] = []


class AsksTwice(State):
    triggers = ("generated",)
    spends = "assistant_turns"

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        questions = ([{"role": "user", "content": text}] for text in ("AAA", "BBB"))
        answers = await asyncio.gather(
            *(ctx.ask("policy", question, Sampling(max_tokens=20)) for question in questions)
        )
        ANSWERS.append((answers[0], answers[1]))
        return Outcome("generated")


def test_of_two_questions_at_once_each_gets_its_own_answer_after_an_interruption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def script(request: Request) -> Turn:
        first = "AAA" in tokenizer().decode(request.ids)
        return Turn(text="about A" if first else "about B", delay=100.0 if first else 1.0)

    async def main() -> None:
        scheduler = scheduler_of(handled_by(monkeypatch, AsksTwice), script)
        asyncio.get_running_loop().call_later(50, lambda: scheduler.stop(suspend="later"))
        (group,) = [group async for group in scheduler.run(prompts(1))]
        (trajectory,) = group.trajectories
        assert trajectory.suspended == "later"
        assert [group async for group in scheduler.run([], resume=[trajectory])]

    ANSWERS.clear()
    run_virtual(main())
    assert ANSWERS == [("about A", "about B")]


def test_a_suspended_sub_agent_with_wrong_glue_fails_too() -> None:
    def script(request: Request) -> Turn:
        called = '<tool_call>\n{"name": "ask", "arguments": {"task": "?"}}\n</tool_call>'
        return Turn(text="late", delay=500.0) if request.agent == "child" else Turn(text=called)

    thinking = {
        "states": {"PENDING": {}, "THINKING": {"handler": "generate", "timeout": 1000.0}},
        "transitions": [
            {"trigger": "prompted", "source": "PENDING", "dest": "THINKING"},
            {"trigger": "generated", "source": "THINKING", "dest": "TERMINATED"},
        ],
    }
    child = agent(thinking, agent="child", description="Knows.")

    async def main() -> None:
        scheduler = scheduler_of(agent(TOOLS, tools={"ask": {"agent": child, "timeout": 1000.0}}), script)
        asyncio.get_running_loop().call_later(50, lambda: scheduler.stop(suspend="later"))
        async for group in scheduler.run(prompts(1)):
            (asked,) = group.children
            assert asked.suspended == "later"
            entry = object()
            group.glue_entries[asked.trajectory_id] = {entry}
            scheduler.glue_mismatch(GlueMismatchError("it differs", entry))
            assert (asked.state, asked.stop_reason) == ("TERMINATED", "failed:GlueMismatchError")
            assert group.drop_reason == "wrong_tokens"

    run_virtual(main())


CLOSES: list[str] = []


class ClosesSlowly:
    async def reply(self, conversation: Conversation) -> Reply:
        return Reply("go on")

    async def close(self) -> None:
        CLOSES.append("begins")
        await asyncio.sleep(5)
        CLOSES.append("ends")


def test_every_interaction_is_closed_whole_when_a_second_cancellation_comes() -> None:
    users = {"use": f"{__name__}:ClosesSlowly"}
    frame = {
        "interaction": users,
        "states": {
            "PENDING": {},
            "GENERATING": {"timeout": 1000.0},
            "INTERACTING": {"timeout": 100.0},
            "OTHER": {"handler": "interact", "timeout": 100.0, "interaction": users},
        },
        "transitions": [
            {"trigger": "prompted", "source": "PENDING", "dest": "GENERATING"},
            {"trigger": "generated", "source": "GENERATING", "dest": "INTERACTING"},
            {"trigger": "replied", "source": "INTERACTING", "dest": "OTHER"},
            {"trigger": "interaction_done", "source": "INTERACTING", "dest": "TERMINATED"},
            {"trigger": "replied", "source": "OTHER", "dest": "GENERATING"},
            {"trigger": "interaction_done", "source": "OTHER", "dest": "TERMINATED"},
        ],
    }

    async def main() -> None:
        graph = agent(frame, limits={"assistant_turns": 6, "user_turns": 10})
        scheduler = scheduler_of(graph, lambda r: Turn(text="x", delay=1.0 if r.turn == 0 else 500.0))

        async def iterate() -> None:
            async for _ in scheduler.run(prompts(1)):
                pass

        task = asyncio.create_task(iterate())
        await asyncio.sleep(20)
        scheduler.cancel("p0/0")
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    CLOSES.clear()
    run_virtual(main())
    assert CLOSES == ["begins", "ends"] * 2
