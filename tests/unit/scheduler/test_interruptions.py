"""What interruptions leave whole: the next run, answers to questions, sub-agents with wrong glue, what closes."""

import asyncio

import pytest

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.errors import GlueMismatchError
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.embedded import tokenizer
from tests.runs import ASKS, Bench, agent, asking, only, prompts, rows

pytestmark = pytest.mark.virtual_time


def handled_by(handler: str) -> AgentGraph:
    states = {"PENDING": {}, "WORKING": {"handler": f"{__name__}:{handler}"}}
    return agent({"states": states, "transitions": rows("PENDING prompted WORKING", "WORKING generated TERMINATED")})


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


def test_a_run_that_is_cancelled_twice_leaves_nothing_to_the_next() -> None:
    async def main() -> list[str]:
        bench = Bench(handled_by("CleansUpSlowly"), ["x"])
        task = asyncio.create_task(bench.run(1))
        for _ in range(2):
            await asyncio.sleep(5)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not bench.scheduler.groups
        assert not bench.scheduler.samples.running
        later = [prompt.model_copy(update={"prompt_id": "q"}) for prompt in prompts()]
        async with asyncio.timeout(1000):
            return [group.group_id for group in await bench.run(1, later)]

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


def test_of_two_questions_at_once_each_gets_its_own_answer_after_an_interruption() -> None:
    def script(request: Request) -> Turn:
        first = "AAA" in tokenizer().decode(request.ids)
        return Turn(text="about A" if first else "about B", delay=100.0 if first else 1.0)

    ANSWERS.clear()
    trajectory = only(run_virtual(Bench(handled_by("AsksTwice"), script).interrupted(50)))
    assert trajectory.resumptions == 1
    assert ANSWERS == [("about A", "about B")]


async def test_a_suspended_sub_agent_with_wrong_glue_fails_too() -> None:
    thinking = {
        "states": {"PENDING": {}, "THINKING": {"handler": "generate", "timeout": 1000.0}},
        "transitions": rows("PENDING prompted THINKING", "THINKING generated TERMINATED"),
    }
    bench = Bench(
        asking(agent(thinking, agent="child"), timeout=1000.0),
        lambda request: Turn(text="late", delay=500.0) if request.agent == "child" else Turn(text=ASKS),
    )
    asyncio.get_running_loop().call_later(50, bench.stop)
    async for group in bench.scheduler.run(prompts()):
        (asked,) = group.children
        assert asked.suspended == "asked"
        entry = object()
        group.glue_entries[asked.trajectory_id] = {entry}
        bench.scheduler.glue_mismatch(GlueMismatchError("it differs", entry))
        assert (asked.state, asked.stop_reason) == ("TERMINATED", "failed:GlueMismatchError")
        assert group.drop_reason == "wrong_tokens"


CLOSES: list[str] = []


class ClosesSlowly:
    async def reply(self, conversation: Conversation) -> Reply:
        return Reply("go on")

    async def close(self) -> None:
        CLOSES.append("begins")
        await asyncio.sleep(5)
        CLOSES.append("ends")


async def test_every_interaction_is_closed_whole_when_a_second_cancellation_comes() -> None:
    users = {"use": f"{__name__}:ClosesSlowly"}
    states = {
        "PENDING": {}, "GENERATING": {"timeout": 1000.0}, "INTERACTING": {"timeout": 100.0},
        "OTHER": {"handler": "interact", "timeout": 100.0, "interaction": users},
    }  # fmt: skip
    lines = rows(
        "PENDING prompted GENERATING", "GENERATING generated INTERACTING", "INTERACTING replied OTHER",
        "INTERACTING interaction_done TERMINATED", "OTHER replied GENERATING", "OTHER interaction_done TERMINATED",
    )  # fmt: skip
    limits = {"assistant_turns": 6, "user_turns": 10}
    graph = agent({"states": states, "transitions": lines}, interaction=users, limits=limits)
    CLOSES.clear()
    bench = Bench(graph, lambda r: Turn(text="x", delay=1.0 if r.turn == 0 else 500.0))
    task = asyncio.create_task(bench.run(1, 1))
    await asyncio.sleep(20)
    bench.scheduler.cancel("p0/0")
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert CLOSES == ["begins", "ends"] * 2
