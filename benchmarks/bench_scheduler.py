"""The driver's own cost: many trajectories on a scripted engine in one process, in virtual time.

    python benchmarks/bench_scheduler.py --trajectories 10000

Prints the CPU time per generation, the transitions per CPU second, and what one trajectory under way holds in memory
besides its tokens (resident memory while all of them wait for their second turn, less ids and logprobs).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import time
from pathlib import Path

from fsm_rollout import Prompt, ScriptedEngine, load_agent
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.testing.simulation.virtual_time import run_virtual

CONFIGS = Path(__file__).parent.parent / "configs"
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": %d, "operator": "+", "right": 2}}\n</tool_call>'


def resident() -> int:
    """Return this process's resident memory in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def bench(count: int, turns: int) -> None:
    """Run ``count`` trajectories of ``turns`` calls and an answer each."""
    from transformers import AutoTokenizer

    from fsm_rollout.model import embedded_model

    tokenizer = AutoTokenizer.from_pretrained(embedded_model())
    texts = [CALL % turn for turn in range(turns)] + ["The answer is 9."]
    scripted = [Turn(text=text, delay=1.0) for text in texts]
    engine = ScriptedEngine(lambda request: scripted[request.turn], tokenizer=tokenizer)
    agent = load_agent(CONFIGS / "agents/tool_agent.yaml", ["limits.wall_seconds=100000"])
    dispatcher = EngineClient(engine)
    scheduler = Scheduler({agent.agent: agent}, {"policy": dispatcher}, concurrency=count)
    prompts = [
        Prompt(prompt_id=str(i), messages=({"role": "user", "content": f"What is {i} + 2?"},)) for i in range(count)
    ]
    gc.collect()
    before = resident()
    measured: list[tuple[int, int]] = []

    async def measure() -> None:
        await asyncio.sleep(1.5)
        gc.collect()
        tokens = sum(
            8 * len(stream.tokens) for live in scheduler.samples.running.values() for stream in live.trajectory.streams
        )
        measured.append((resident() - before - tokens, len(scheduler.samples.running)))

    watcher = asyncio.ensure_future(measure())
    started = time.process_time()
    transitions = 0
    async for group in scheduler.run(prompts):
        for trajectory in group.trajectories:
            assert trajectory.stop_reason == "answered", trajectory
            transitions += trajectory.transitions
    seconds = time.process_time() - started
    await watcher
    held, running = measured[0]
    generations = dispatcher.pool.requests
    print(f"{count} trajectories, {generations} generations in {dispatcher.pool.dispatches} dispatches")
    print(f"{1e6 * seconds / generations:.0f} us CPU per generation, {transitions / seconds:,.0f} transitions a CPU s")
    print(f"{held / running / 1024:.1f} kB per trajectory under way ({running} at once), besides its tokens")


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    run_virtual(bench(options.trajectories, options.turns))


if __name__ == "__main__":
    main()
