"""What the plugin's fixture ``fsm_trajectory`` is: a plain function, so it serves outside of pytest too.

Invariant: everything here is the real thing (scheduler, engine client, engine protocol, the agent's own tools and
handlers); only the engine's words and the time are made up.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.loader import load_agent
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.script import Script
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.testing.simulation.stand_ins import OneEngine
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.trajectory.prompt import Prompt, as_prompts
from fsm_rollout.trajectory.trajectory import Trajectory


def run_one(
    agent: AgentGraph | str | Path, turns: Script = (), *,
    prompt: str | Mapping[str, object] | Prompt = "What is 2 + 2?", **options: Any,
) -> Trajectory:  # fmt: skip
    """Run one trajectory of an agent in virtual time, to its end, and return it.

    Args:
        agent: a graph, or its YAML's path.
        turns: what the engines say, whatever their names.
        prompt: a text, or a prompt with its own fields (``interaction_kwargs``, ``tools_kwargs``, …).
        options: those of :class:`Scheduler`.
    """
    graph = agent if isinstance(agent, AgentGraph) else load_agent(agent)

    async def main() -> Trajectory:
        engine = ScriptedEngine(turns, tokenizer=embedded_tokenizer())
        scheduler = Scheduler({graph.agent: graph}, OneEngine(engine), **options)
        prompts = as_prompts([prompt])
        scheduler.check(prompts)
        (group,) = [group async for group in scheduler.run(prompts)]
        return group.trajectories[0]

    return run_virtual(main())
