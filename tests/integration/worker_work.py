"""What workers run in these tests: an agent with a tool that tells which process it ran in, and a scripted engine."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from fsm_rollout import AgentGraph, Prompt, ScriptedEngine, load_agent
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.kit import ROOT

CALL = '<tool_call>\n{"name": "where", "arguments": {"number": %d}}\n</tool_call>'


def where(number: int) -> str:
    """Say where the call is made.

    Args:
        number: of the turn.
    """
    if folder := os.environ.get("WORKER_PIDS"):
        (Path(folder) / str(os.getpid())).write_text(f"{gc.get_freeze_count()} {'torch' in sys.modules}", "ascii")
    return f"answer {number}"


def agent(tool: str = f"{__name__}:where") -> AgentGraph:
    """Return the agent of the benchmarks, which a tool answers that is called ``where``."""
    tools = {"where": {"use": tool, "timeout": 600}}
    return load_agent(ROOT / "benchmarks/agent.yaml", [f"tools={json.dumps(tools)}"])


def engine(tokenizer: Any, turns: int, delay: float) -> ScriptedEngine:
    def script(request: Request) -> Turn:
        return Turn(text=CALL % request.turn if request.turn < turns else f"Done {request.sampling.seed}.", delay=delay)

    return ScriptedEngine(script, tokenizer=tokenizer)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{i}", messages=({"role": "user", "content": f"Question {i}?"},)) for i in range(count)]


def rows(trajectories: list[Trajectory]) -> dict[str, tuple[Any, ...]]:
    return {
        t.trajectory_id: (
            t.stop_reason,
            t.generations,
            t.calls_seen,
            [(s.tokens.ids.tobytes(), s.tokens.response_mask().tobytes(), s.messages) for s in t.streams],
        )
        for t in trajectories
    }
