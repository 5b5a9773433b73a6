"""What workers run in these tests: an agent with a tool that tells which process it ran in, and a scripted engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fsm_rollout import Prompt, ScriptedEngine, load_agent
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.trajectory.trajectory import Trajectory

AGENT = """
agent: worked
contexts: {main: {tools: [where]}}
limits: {assistant_turns: 20, tool_calls: 20, response_tokens: 10000, context_tokens: 20000, wall_seconds: 3000}
tools: {where: {use: "tests.integration.worker_work:where", timeout: 600}}
states:
  PENDING: {}
  GENERATING: {sampling: {max_tokens: 100}, timeout: 600}
  PROCESSING_TOOLS: {timeout: 600}
transitions:
  - {trigger: prompted,   source: PENDING,          dest: GENERATING}
  - {trigger: generated,  source: GENERATING,       dest: PROCESSING_TOOLS, conditions: has_tool_calls}
  - {trigger: generated,  source: GENERATING,       dest: TERMINATED}
  - {trigger: tools_done, source: PROCESSING_TOOLS, dest: GENERATING}
"""
CALL = '<tool_call>\n{"name": "where", "arguments": {"number": %d}}\n</tool_call>'


def where(number: int) -> str:
    """Say where the call is made.

    Args:
        number: of the turn.
    """
    if folder := os.environ.get("WORKER_PIDS"):
        (Path(folder) / str(os.getpid())).touch()
    return f"answer {number}"


def agent(folder: Path) -> Any:
    path = folder / "worked.yaml"
    path.write_text(AGENT, encoding="utf-8")
    return load_agent(path)


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
