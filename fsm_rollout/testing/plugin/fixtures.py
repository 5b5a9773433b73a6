"""What the plugin's fixtures make; plain functions, so they serve outside of pytest too.

Invariant: everything here is the real thing (scheduler, dispatcher, engine protocol, the agent's own tools and
handlers); only the engine's words and the time are given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.loader import load_agent
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.script import Script
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.testing.simulation.simulated import OneEngine
from fsm_rollout.testing.simulation.virtual_time import VirtualTimeLoop, run_virtual
from fsm_rollout.trajectory.prompt import Prompt, as_prompts
from fsm_rollout.trajectory.trajectory import Trajectory

T = TypeVar("T")
Agent = AgentGraph | str | Path
ScriptEngine = Callable[..., ScriptedEngine]
MakeScheduler = Callable[..., Scheduler]
RunOne = Callable[..., Trajectory]


class FakeClock:
    """An event loop in virtual time that keeps its clock between runs."""

    def __init__(self) -> None:
        self._loop = VirtualTimeLoop()

    def __enter__(self) -> FakeClock:
        """Give the clock."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the loop, with what still runs on it."""
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    @property
    def now(self) -> float:
        """The virtual time, in seconds."""
        return self._loop.time()

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine to its end; sleeping takes no time."""
        return self._loop.run_until_complete(coroutine)


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
    made = script_engine(turns) if engine is None else engine
    return Scheduler({graph.agent: graph}, OneEngine(made), **options)


def run_one(
    agent: Agent, turns: Script = (), *, prompt: str | Mapping[str, Any] | Prompt = "What is 2 + 2?", **options: Any
) -> Trajectory:
    """Run one trajectory of an agent in virtual time, to its end, and return it.

    Args:
        agent: a graph, or its YAML's path.
        turns: what the engine says.
        prompt: a text, or a prompt with its own fields (``interaction_kwargs``, ``tools_kwargs``, …).
        options: those of :class:`Scheduler`.
    """

    async def main() -> Sequence[Trajectory]:
        scheduler = make_scheduler(agent, turns, **options)
        prompts = as_prompts([prompt])
        scheduler.check(prompts)
        return [trajectory async for group in scheduler.run(prompts) for trajectory in group.trajectories]

    return run_virtual(main())[0]
