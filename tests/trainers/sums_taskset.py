"""Tasksets as a user of verifiers writes them, over a real dataset of reasoning-gym."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import reasoning_gym
import verifiers.v1 as vf

CLOSED: list[str] = []
"""Which trajectories' toolsets were closed, by the expression of their task."""


class SumsData(vf.TaskData):
    entry: dict[str, Any]


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    """One for each trajectory: it knows the task and counts."""

    async def setup_task(self, task: SumsData) -> None:
        self.task, self.calls = task, 0
        self._exit_stack.callback(lambda: CLOSED.append(task.entry["metadata"]["expression"]))

    @vf.tool
    async def add(self, a: int, b: int = 1) -> str:
        """Add two numbers."""
        self.calls += 1
        return f"{self.task.entry['metadata']['expression']}: call {self.calls} gives {a + b}"


class Facts(vf.Toolset[vf.SharedToolsetConfig]):
    """Shared by all trajectories."""

    TOOL_PREFIX = None
    made = 0

    async def setup(self) -> None:
        Facts.made += 1
        self.asked = 0

    @vf.tool(name="fact")
    def look_up(self) -> str:
        """Tell a fact."""
        self.asked += 1
        return f"fact {self.asked}"


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=2.0)
    async def correct(self, task: SumsData, trace: vf.Trace) -> float:
        return float(sums().score_answer(trace.last_reply, task.entry))

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(sum(len(m.tool_calls or ()) for m in trace.assistant_messages))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[Any]:
        return [Calculator(vf.ToolsetConfig())]


def sums(size: int = 8) -> Any:
    return reasoning_gym.create_dataset("chain_sum", seed=42, size=size, min_terms=2, max_terms=2)


class SumsConfig(vf.TasksetConfig):
    size: int = 8
    container: bool = False


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> Iterator[SumsTask]:
        for entry in sums(self.config.size):
            image = "python:3.12" if self.config.container else None
            data = SumsData(prompt=entry["question"], system_prompt="Answer with a number.", entry=entry, image=image)
            yield SumsTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[Any]:
        return [Facts(vf.SharedToolsetConfig())]


__all__ = ["SumsTaskset"]
