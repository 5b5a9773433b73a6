"""How many tokens per second the transformers engine samples, by concurrency.

    python benchmarks/bench_engine.py [--model embedded] [--threads 2] [--prompt 150] [--tokens 24]

Every request samples exactly ``--tokens`` tokens (stop tokens are ignored) after a prompt of ``--prompt`` random ones,
all different. Prints one line for each concurrency: seconds, sampled tokens per second, milliseconds per decoding step.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.trajectory.tokens import as_ids


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


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompt", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    start = time.perf_counter()
    for concurrent in (1, 16, 64, 256):
        engine = TransformersEngine(options.model, threads=options.threads, max_running=concurrent)
        await measure(engine, 1, options.prompt, 2, concurrent)
        await measure(engine, 4 * concurrent, options.prompt, options.tokens, concurrent)
        await engine.aclose()
    print(f"{time.perf_counter() - start:.1f} s in all")


if __name__ == "__main__":
    asyncio.run(main())
