"""What a long context costs the driver of engines on Ray: its CPU time per turn at 1k, 8k and 64k tokens.

    python benchmarks/bench_ray.py [--replicas 1] [--rounds 9] [--chats 32]

The first prompt has been tokenized and sent by then. (Wall time beside verl: ``overhead.py --mode ray``.)
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsm_rollout import Prompt, load_agent
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Engine, Request
from fsm_rollout.engines.ray_placement import RayOptions, RayPlacement
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.model.folders import load_tokenizer, model_folder
from fsm_rollout.scheduler.scheduler import Scheduler

TURNS = 40
AGENT = Path(__file__).parent / "agent.yaml"


def agent(tool: str) -> Any:
    """Return the agent with one tool, a function of this file."""
    return load_agent(
        AGENT, [f'tools={{"{tool}": {{"use": "bench_ray:{tool}", "timeout": 60, "response_tokens": 1000}}}}']
    )


def started(build: Callable[[str], Engine], replicas: int) -> EnginePool:
    return EnginePool(RayPlacement(build, replicas, RayOptions(cpus=0.5)), replicas)


def by_context(options: argparse.Namespace) -> None:
    """Measure the driver alone: its CPU time does not count the actors'."""
    graph = agent("echo")
    call = '<tool_call>\n{"name": "echo", "arguments": {"text": "a few words for the tool to say again"}}\n</tool_call>'

    def build(name: str) -> Engine:
        def script(request: Request) -> Turn:
            return Turn(text=call if request.turn < TURNS else "Done.")

        tokenizer = load_tokenizer(model_folder("embedded"))
        return ScriptedEngine(script, tokenizer=tokenizer, max_context=200_000, replica=name)

    tokenizer = load_tokenizer(model_folder("embedded"))
    word = len(tokenizer.encode(" 7" * 1000, add_special_tokens=False)) / 1000
    pool = started(build, options.replicas)

    async def cost(tokens: int) -> float:
        """Return the CPU seconds of some conversations, from when their first prompts are with the replicas."""
        text = " 7" * int(tokens / word)
        prompts = [
            Prompt(prompt_id=f"{tokens}-{i}", messages=({"role": "user", "content": text},))
            for i in range(options.chats)
        ]
        scheduler = Scheduler({"bench": graph}, {"policy": EngineClient(pool)}, concurrency=options.chats)
        await EngineClient(pool).pause()

        async def run() -> None:
            async for group in scheduler.run(prompts):
                assert group.trajectories[0].stop_reason == "answered", group.trajectories[0]

        running = asyncio.create_task(run())
        while len(pool.under_way()) < options.chats:  # noqa: ASYNC110  # it is only known by asking
            await asyncio.sleep(0.1)
        gc.collect()
        before = time.process_time()
        await EngineClient(pool).resume()
        await running
        return time.process_time() - before

    async def measure() -> None:
        sizes = [1_000, 8_000, 64_000]
        for tokens in sizes:
            await cost(tokens)  # warm
        rounds = []
        for _ in range(options.rounds):  # side by side, each size first and last in turn: shared machines drift
            sizes.reverse()
            rounds.append({tokens: 1e6 * await cost(tokens) / (options.chats * TURNS) for tokens in sizes})
        medians = {tokens: statistics.median(found[tokens] for found in rounds) for tokens in sorted(sizes)}
        ratio = statistics.median(found[64_000] / found[1_000] for found in rounds)
        print("driver's CPU per turn: " + ", ".join(f"{t // 1000}k {us:.0f} us" for t, us in medians.items()))
        print(f"64k against 1k: {ratio:.2f} (target 1.2), medians of {options.rounds} rounds")
        await pool.aclose()

    asyncio.run(measure())


async def echo(text: str) -> str:
    """Say it again.

    Args:
        text: what to say.
    """
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chats", type=int, default=32, help="conversations at once")
    options = parser.parse_args()
    here = str(Path(__file__).parent)
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])  # the actors', too
    by_context(options)


if __name__ == "__main__":
    main()
