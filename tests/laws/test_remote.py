"""A rollout that a training service runs gives its trainer what the same rollout gives here, over real HTTP.

The oracle is the rollout of one process, which other laws hold to the engine's own log. Of a service that is killed and
started again, or whose trainer is, `tests/integration/test_training_service.py` says the same.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import fsm_rollout as fr
from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.trajectory.journal import JOURNAL
from tests.embedded import tokenizer
from tests.integration.remote_trainer import rows_of
from tests.laws.agents import agents
from tests.laws.world import TEXTS, scripted
from tests.remote import serving

SOON = [
    text for text in TEXTS if "echo" not in text or "hello" in text
]  # other echoes take their time, a real one here
SCRIPTS = st.lists(st.sampled_from([Turn(text=text) for text in SOON]), min_size=1, max_size=6)
STEPS = st.lists(st.sampled_from(["run", "stream", "target", "evaluate", "closed"]), min_size=1, max_size=4)


def rollout(graph: AgentGraph, script: Sequence[Turn], seed: int) -> fr.Rollout:
    """Return a rollout whose engine says what a script says, by what is asked."""

    def engine() -> fr.ScriptedEngine:
        return fr.ScriptedEngine(partial(scripted, script), tokenizer=tokenizer())

    def reward(trajectory: fr.Trajectory) -> float:
        return float(sum(map(len, trajectory.assistant_texts())))

    return fr.Rollout(graph, engine(), engines={"judge": engine()}, seed=seed, reward=reward, concurrency=1)


async def trained(of: fr.Rollout, steps: Sequence[str], n: int) -> list[str]:
    """Train by these steps; return all that came back, in the order in which it did."""
    found, endless = [], (f"What is {number} + {number}?" for number in range(1_000))
    async with of:
        for step in steps:
            match step:
                case "run":
                    found.append(rows_of(await of.arun(["One?", "Two?", "Three?"], n)))
                case "evaluate":
                    found.append(rows_of(await of.aevaluate(["Four?", "Five?"], n)))
                case "target":
                    found.append(rows_of(await of.arun(endless, n, target_groups=2)))
                case _:
                    stream = of.stream(["Six?", "Seven?", "Eight?"], n)
                    async for group in stream:
                        events = [(t.trajectory_id, t.stop_reason, list(t.assistant_texts())) for t in group.all]
                        found.append(f"{group.group_id} {group.index} {events} {rows_of(of.batch([group]))}")
                        if step == "closed":
                            break
                    await stream.aclose()
    return found


@settings(max_examples=max(5, settings().max_examples // 8), deadline=None)
@given(agents(timeouts=False), SCRIPTS, STEPS, st.integers(1, 2), st.integers(0, 3))
def test_what_a_service_gives_is_what_its_rollout_gives_here(
    graph: AgentGraph, script: list[Turn], steps: list[str], n: int, seed: int
) -> None:
    here = asyncio.run(trained(rollout(graph, script, seed), steps, n))
    with tempfile.TemporaryDirectory() as folder, serving(rollout(graph, script, seed), Path(folder)) as url:
        there = asyncio.run(trained(fr.RemoteRollout(url), steps, n))
        assert (Path(folder) / JOURNAL).exists()
    assert there == here
