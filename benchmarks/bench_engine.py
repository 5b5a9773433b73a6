"""How many tokens per second the transformers engine samples, by concurrency or in a real rollout.

    python benchmarks/bench_engine.py [--model embedded] [--threads 2] [--prompt 150] [--tokens 24]
    python benchmarks/bench_engine.py --dialogues 512 --model embedded:early --threads 1

Every request samples exactly ``--tokens`` tokens (stop tokens are ignored) after a prompt of ``--prompt`` random ones,
all different. Prints one line for each concurrency: seconds, sampled tokens per second, milliseconds per decoding step.

With ``--dialogues`` the dialogues of `configs/agents/tool_user.yaml` are rolled out, eight of each prompt, all at once,
as the GRPO example does. Prints sampled tokens per second of the model's thread, of the process's CPU, and of the wall.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path

import fsm_rollout as fr
from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.trajectory.tokens import as_ids

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


async def measure(engine: TransformersEngine, count: int, prompt: int, tokens: int, concurrent: int) -> None:
    rng = random.Random(count)
    requests = [
        Request(
            f"{count}-{concurrent}-{index}",
            as_ids([rng.randrange(len(engine.tokenizer)) for _ in range(prompt)]),
            SamplingParams(max_tokens=tokens, ignore_eos=True, seed=index),
        )
        for index in range(count)
    ]

    async def one(request: Request) -> int:
        return sum([len(chunk.ids) async for chunk in engine.generate([request])])

    start = time.perf_counter()
    sampled = sum(await asyncio.gather(*map(one, requests)))
    seconds = time.perf_counter() - start
    steps = tokens * -(-count // min(count, concurrent))
    print(
        f"{count:5} requests, at most {concurrent:4} at once: {seconds:6.2f} s, {sampled / seconds:7.0f} tokens/s, "
        f"{1000 * seconds / steps:6.2f} ms per step with its share of prompts"
    )


def roll_out(model: str, threads: int | None, dialogues: int) -> None:
    """Measure a second rollout of the same prompts: the first one learns the template's glue."""
    prompts = fr.read_prompts(CONFIGS / "data/arithmetic_train.jsonl", limit=dialogues // 8)
    engine = {"kind": "transformers", "model": model, "threads": threads, "max_running": dialogues}
    reward = "fsm_rollout.rewards:exact_answer"
    with fr.Rollout(fr.load_agent(CONFIGS / "agents/tool_user.yaml"), engine, reward=reward) as rollout:
        thread = rollout.engines["policy"].replicas[0].engine._thread
        rollout.run(prompts, n=8)
        decoding_clock = time.pthread_getcpuclockid(thread.ident)
        clocks = (time.perf_counter, time.process_time, lambda: time.clock_gettime(decoding_clock))
        before = [clock() for clock in clocks]
        sampled = rollout.run(prompts, n=8).figures["sampled_tokens"]
        wall, cpu, decoding = (clock() - start for clock, start in zip(clocks, before, strict=True))
    print(
        f"{dialogues} dialogues, {sampled:,} sampled tokens: {sampled / decoding:,.0f} per second of the model's "
        f"thread, {sampled / cpu:,.0f} per CPU second, {sampled / wall:,.0f} per second"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompt", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--dialogues", type=int, help="roll out so many dialogues instead")
    options = parser.parse_args()
    if options.dialogues:
        await asyncio.to_thread(roll_out, options.model, options.threads, options.dialogues)
        return
    start = time.perf_counter()
    for concurrent in (1, 16, 64, 256):
        engine = TransformersEngine(options.model, threads=options.threads, max_running=concurrent)
        await measure(engine, 1, options.prompt, 2, concurrent)
        await measure(engine, 4 * concurrent, options.prompt, options.tokens, concurrent)
        await engine.aclose()
    print(f"{time.perf_counter() - start:.1f} s in all")


if __name__ == "__main__":
    asyncio.run(main())
