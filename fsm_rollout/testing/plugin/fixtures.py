"""What the plugin's fixtures make; plain functions, so they serve outside of pytest too.

Invariant: everything here is the real thing (scheduler, engine client, engine protocol, the agent's own tools and
handlers); only the engine's words and the time are made up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
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

Agent = AgentGraph | str | Path
ScriptEngine = Callable[..., ScriptedEngine]
MakeScheduler = Callable[..., Scheduler]
RunOne = Callable[..., Trajectory]


class FakeClock:
    """An event loop in virtual time that keeps its clock between runs: sleeping takes no time."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.run = runner.run
        self._loop = runner.get_loop()

    @property
    def now(self) -> float:
        """The virtual time, in seconds."""
        return self._loop.time()


def script_engine(turns: Script, **options: Any) -> ScriptedEngine:
    """Return a scripted engine that keeps a log; ``options`` are those of :class:`ScriptedEngine`."""
    return ScriptedEngine(turns, **{"tokenizer": embedded_tokenizer(), "log": True, **options})


def make_scheduler(
    agent: Agent, turns: Script = (), *, engine: ScriptedEngine | None = None, **options: Any
) -> Scheduler:
    """Return a scheduler for one agent whose engines, whatever their names, all follow one script.

    Args:
        agent: a graph, or its YAML's path.
        turns: what the engine says.
        engine: the engine, instead of one made of ``turns``.
        options: those of :class:`Scheduler`.
    """
    graph = agent if isinstance(agent, AgentGraph) else load_agent(agent)
    return Scheduler({graph.agent: graph}, OneEngine(engine or script_engine(turns)), **options)


def run_one(
    agent: Agent, turns: Script = (), *, prompt: str | Mapping[str, object] | Prompt = "What is 2 + 2?", **options: Any
) -> Trajectory:
    """Run one trajectory of an agent in virtual time, to its end, and return it.

    Args:
        agent: a graph, or its YAML's path.
        turns: what the engine says.
        prompt: a text, or a prompt with its own fields (``interaction_kwargs``, ``tools_kwargs``, …).
        options: those of :class:`Scheduler`.
    """

    async def main() -> Trajectory:
        scheduler = make_scheduler(agent, turns, **options)
        prompts = as_prompts([prompt])
        scheduler.check(prompts)
        (group,) = [group async for group in scheduler.run(prompts)]
        return group.trajectories[0]

    return run_virtual(main())
