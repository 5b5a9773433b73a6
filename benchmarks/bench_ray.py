"""The Ray path with scripted engines, side by side with verl's, and what a long context costs the driver.

    python benchmarks/bench_ray.py --workload DIR [--peer-python PYTHON] [--n 512] [--replicas 1] [--reps 3]

``DIR`` holds ``workload.py`` (the neutral work: a tool agent of five generations, with the ids and masks that a correct
system returns) and ``bench_verl.py``; ``PYTHON`` is of an environment with verl. First the wall
time per generation of both, in turns; without either the part is skipped and says why. Then the CPU time of the driver
per turn at 1k, 8k and 64k tokens of context, once the first prompt has been tokenized and sent.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsm_rollout import Prompt, Rollout, load_agent
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pool import PoolEngine
from fsm_rollout.engines.protocol import Engine, Request
from fsm_rollout.engines.ray import RayOptions, RayPlacement
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.model.folders import load_tokenizer, model_folder
from fsm_rollout.scheduler.scheduler import Scheduler

TURNS = 40
AGENT = Path(__file__).parent / "agent.yaml"


async def lookup(key: str, count: int) -> str:
    """Look up a value in the table.

    Args:
        key: The key to look up.
        count: How many rows to return.
    """
    return importlib.import_module("workload").tool_answer({"key": key, "count": count})


def agent(tool: str) -> Any:
    """Return the agent with one tool, a function of this file."""
    return load_agent(
        AGENT, [f'tools={{"{tool}": {{"use": "bench_ray:{tool}", "timeout": 60, "response_tokens": 1000}}}}']
    )


def started(build: Callable[[str], Engine], replicas: int) -> PoolEngine:
    return PoolEngine(RayPlacement(build, replicas, RayOptions(cpus=0.5)), replicas)


# -- wall time per generation, beside verl -------------------------------------------------------------------------


def peer(options: argparse.Namespace) -> float:
    """Return verl's microseconds per generation, one run of it."""
    command = [options.peer_python, "bench_verl.py", "--mode", "ray", "--n", str(options.n), "--reps", "3", "--check"]
    # It builds its tokenizer in the folder that this benchmark uses, and its actors import what lies beside it.
    environment = {**os.environ, "BENCH_ASSETS": str(options.assets), "RAY_ADDRESS": "local"}
    done = subprocess.run(command, cwd=options.workload, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"verl's benchmark failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    assert not any(line["wrong_trajectories"] for line in lines)
    return min(line["us_wall_per_gen"] for line in lines)


def ours(options: argparse.Namespace, graph: Any, pool: PoolEngine, work: Any) -> tuple[float, float]:
    """Return our microseconds of wall time and of the driver's CPU time per generation; checks every token."""
    prompts = [Prompt(prompt_id=str(i), messages=tuple(work.prompt(i))) for i in range(options.n)]
    rollout = Rollout(graph, pool, concurrency=options.n)

    async def run() -> tuple[float, float, Any]:
        wall, cpu = time.perf_counter(), time.process_time()
        batch = await rollout.arun(prompts, prompt_width=512, response_width=1024)
        return time.perf_counter() - wall, time.process_time() - cpu, batch

    gc.collect()
    wall, cpu, batch = asyncio.run(run())
    tensors = batch.tensordict
    for i in range(options.n):
        _, ids, mask = work.expected(i)
        assert tensors["responses"][i][: len(ids)].tolist() == ids, i
        assert tensors["response_mask"][i].tolist() == mask + [0] * (1024 - len(mask)), i
    generations = options.n * (work.turns + 1)
    return 1e6 * wall / generations, 1e6 * cpu / generations


def beside_verl(options: argparse.Namespace, graph: Any) -> None:
    if options.workload is None or not (options.workload / "workload.py").is_file():
        print(f"skipped: wall time per generation (no workload.py in {options.workload}; give --workload)")
        return
    workload = importlib.import_module("workload")
    workload.build_assets(str(options.assets))
    work = workload.Workload(str(options.assets))
    assets = str(options.assets)

    def build(name: str) -> Engine:
        there = importlib.import_module("workload").Workload(assets)

        def script(request: Request) -> Turn:
            return Turn(ids=tuple(there.script(int(request.group_id))[request.turn]), logprob=-0.5)

        return ScriptedEngine(script, tokenizer=there.tok, replica=name)

    theirs, walls = [], []
    for rep in range(options.reps):
        if options.peer_python:
            theirs.append(peer(options))
        pool = started(build, options.replicas)
        try:
            ours(options, graph, pool, work)  # warm
            wall, cpu = min(ours(options, graph, pool, work) for _ in range(3))
            walls.append(wall)
        finally:
            asyncio.run(pool.aclose())
        said = f"verl {theirs[-1]:.0f} us, " if theirs else ""
        print(f"{rep + 1}: {said}ours {wall:.0f} us per generation ({cpu:.0f} us of the driver's CPU)", flush=True)
    if theirs:
        ratio = statistics.median(walls) / statistics.median(theirs)
        print(f"ratio {ratio:.3f} (target 0.25), n={options.n}, replicas={options.replicas}, medians of {options.reps}")
    else:
        print("skipped: verl beside it (give --peer-python)")


# -- the driver's cost by length of the context --------------------------------------------------------------------


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
        await pool.pause()

        async def run() -> None:
            async for group in scheduler.run(prompts):
                assert group.trajectories[0].stop_reason == "answered", group.trajectories[0]

        running = asyncio.create_task(run())
        while pool.load().waiting < options.chats:  # noqa: ASYNC110  # it is only known by asking
            await asyncio.sleep(0.1)
        gc.collect()
        before = time.process_time()
        await pool.resume()
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
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--peer-python")
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9, help="for the cost by context")
    parser.add_argument("--chats", type=int, default=32, help="conversations at once, for the cost by context")
    parser.add_argument("--only", choices=["wall", "context"])
    options = parser.parse_args()
    here = [str(Path(__file__).parent), *([str(options.workload)] if options.workload else [])]
    sys.path[:0] = here
    os.environ["PYTHONPATH"] = os.pathsep.join([*here, os.environ.get("PYTHONPATH", "")])  # the actors', too
    with tempfile.TemporaryDirectory() as folder:
        options.assets = Path(folder) / "assets"
        if options.only != "context":
            beside_verl(options, agent("lookup"))
        if options.only != "wall":
            by_context(options)


if __name__ == "__main__":
    main()
