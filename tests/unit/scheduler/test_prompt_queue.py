"""Prompts that come while their run is under way."""

import asyncio

import fsm_rollout as fr
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.scheduler.run_state import PromptQueue
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.trajectory.prompt import as_prompt
from tests.kit import CONFIGS


async def test_a_run_over_a_queue_ends_when_it_is_closed_and_all_have_come_back() -> None:
    engine = ScriptedEngine(lambda request: "well", tokenizer=embedded_tokenizer())
    queue, came = PromptQueue(), []
    async with asyncio.timeout(600), fr.Rollout(CONFIGS / "agents/single_turn.yaml", engine) as rollout:
        queue.put(as_prompt("first", 0))
        async for group in rollout.stream(queue):
            came.append(group.group_id)
            if len(came) < 3:  # nothing was there to take meanwhile
                asyncio.get_running_loop().call_later(0.001, queue.put, as_prompt("next", 0))
            else:
                queue.close()
    assert came == ["0", "1", "2"]
