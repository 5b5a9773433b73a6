"""What a turn costs the driver in a long context: CPU time per turn at 1k, 8k and 64k tokens, on a scripted engine.

    python benchmarks/bench_context.py

The opening prompt's own encoding (which every rollout pays once) is left out. Prints the median of interleaved runs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from pathlib import Path
from typing import Any

from fsm_rollout import Prompt, ScriptedEngine, load_agent
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.testing.simulation.virtual_time import run_virtual

AGENT = Path(__file__).parent.parent / "configs/agents/tool_agent.yaml"
ROOM = [f"limits.{name}=1000000" for name in ("context_tokens", "response_tokens", "wall_seconds")]
COUNTS = [f"limits.{name}=1000" for name in ("assistant_turns", "tool_calls")]
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": %d, "operator": "+", "right": 2}}\n</tool_call>'


async def cost(tokenizer: Any, tokens: int, *, count: int, turns: int) -> float:
    """Return the CPU seconds per turn, all but the first, of ``count`` trajectories with prompts of ``tokens``."""
    scripted = [Turn(text=text, delay=1.0) for text in [*(CALL % turn for turn in range(turns)), "The answer is 9."]]
    engine = ScriptedEngine(lambda request: scripted[request.turn], tokenizer=tokenizer, max_context=10**6)
    agent = load_agent(AGENT, [*ROOM, *COUNTS])
    scheduler = Scheduler({agent.agent: agent}, {"policy": EngineClient(engine)}, concurrency=count)
    words = "word " * (tokens // len(tokenizer.encode("word " * 8)) * 8)
    marks: list[float] = []

    async def mark() -> None:
        await asyncio.sleep(1.5)  # of virtual time: all are in their second turn
        gc.collect()
        marks.append(time.process_time())

    marker = asyncio.ensure_future(mark())
    prompts = [Prompt(prompt_id=str(i), messages=({"role": "user", "content": words},)) for i in range(count)]
    groups = [group async for group in scheduler.run(prompts)]
    marks.append(time.process_time())
    await marker
    assert all(
        t.stop_reason == "answered" and t.generations == turns + 1 for group in groups for t in group.trajectories
    )
    return (marks[1] - marks[0]) / (count * turns)


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=24)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    from transformers import AutoTokenizer

    from fsm_rollout.model import embedded_model

    tokenizer = AutoTokenizer.from_pretrained(embedded_model())
    sizes = (1_000, 8_000, 64_000)
    measured: dict[int, list[float]] = {size: [] for size in sizes}
    run_virtual(cost(tokenizer, 100, count=options.trajectories, turns=options.turns))  # warm
    for _ in range(options.runs):
        for size in sizes:
            measured[size].append(run_virtual(cost(tokenizer, size, count=options.trajectories, turns=options.turns)))
    base = statistics.median(measured[sizes[0]])
    for size, seconds in measured.items():
        median = statistics.median(seconds)
        print(f"{size:6,} tokens: {1e6 * median:.0f} us CPU per turn, {median / base:.2f} x")


if __name__ == "__main__":
    main()
