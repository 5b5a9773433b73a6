"""How much of SGLang's own speed is left when trajectories are driven through the whole stack.

    python benchmarks/bench_sglang.py [--runs 5] [--concurrent 64] [--prompt 150] [--tokens 96] [--waves 4]

Single-turn, fixed lengths (stop tokens are ignored), always ``--concurrent`` requests under way, on the embedded model:

- bare: a loop over ``sglang.Engine.async_generate`` in one process, not streaming, with logprobs;
- stack: ``fsm_rollout.Rollout`` over ``SGLangEngine``: chat template, state machine, scheduler, dispatch, events,
  streaming, batches.

Both use the same arguments of SGLang, live in processes of their own, and take turns; a run's ratio is that of its two
neighbours, and the median of the runs is what counts. ``tool_user`` (several turns, tool calls) is measured beside it.
On a machine that does other things, too, the times say little; the CPU time per token, printed for each process, does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

import fsm_rollout as fr
from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.model import embedded_model
from fsm_rollout.trajectory.prompt import Prompt

CONFIGS = Path(__file__).parent.parent / "configs"
TEXT = "please work out the sum of 12 and 34 then subtract 5 from 67 and say what is left of it all now"
WORDS = TEXT.split()


def prompts(count: int, words: int) -> list[dict[str, Any]]:
    """Prompts of one length, all different from their first word on, so that no cache helps either side."""
    return [
        {
            "messages": [
                {"role": "user", "content": " ".join([str(i), *(WORDS[(i + k) % len(WORDS)] for k in range(words))])}
            ]
        }
        for i in range(count)
    ]


def agent(tokens: int) -> AgentGraph:
    graph = fr.load_agent(CONFIGS / "agents/single_turn.yaml")
    data = graph.model_dump(mode="json", by_alias=True, exclude_unset=True)
    data["limits"] = {**data.get("limits", {}), "response_tokens": 10 * tokens}
    data["states"]["GENERATING"] = {"sampling": {"max_tokens": tokens, "ignore_eos": True}, "timeout": 600}
    return AgentGraph.model_validate(data)


def bare(options: argparse.Namespace) -> None:
    """Serve measurements of the bare loop on standard input and output: a line with ids in, seconds out."""
    from fsm_rollout.engines.sglang import cpu as sglang_cpu

    base = sglang_cpu.prepare(1)
    import sglang

    engine = sglang.Engine(
        **{**base, "model_path": str(embedded_model()), "skip_tokenizer_init": True, "log_level": "error"}
    )
    sampling = {"max_new_tokens": options.tokens, "temperature": 1.0, "ignore_eos": True}

    async def measure(inputs: list[list[int]]) -> float:
        left = iter(inputs)

        async def work() -> None:
            for ids in left:
                out = await engine.async_generate(input_ids=ids, sampling_params=sampling, return_logprob=True)
                assert len(out["output_ids"]) == options.tokens

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(options.concurrent)))
        return time.perf_counter() - start

    print("ready", flush=True)
    for line in sys.stdin:
        print(engine.loop.run_until_complete(measure(json.loads(line))), flush=True)
    engine.shutdown()


def cpu_seconds(root: psutil.Process, without: psutil.Process | None = None) -> dict[str, float]:
    """CPU seconds by the role of a process, of ``root`` and all below it, but not of ``without`` and below it."""
    leave = set() if without is None else {without, *without.children(recursive=True)}
    found: dict[str, float] = {}
    for process in {root, *root.children(recursive=True)} - leave:
        title = " ".join(process.cmdline())
        role = "scheduler" if "scheduler" in title else "host" if "sglang_host" in title else "rest"
        times = process.cpu_times()
        found[role if process != root else "main"] = found.get(role, 0.0) + times.user + times.system
    return found


def per_token(before: dict[str, float], after: dict[str, float], tokens: int) -> str:
    spent = {role: 1e6 * (after[role] - before.get(role, 0.0)) / tokens for role in sorted(after)}
    return ", ".join(f"{role} {cost:.0f}" for role, cost in spent.items()) + f", together {sum(spent.values()):.0f}"


def measure_stack(rollout: fr.Rollout, items: list[Prompt | dict[str, Any]], n: int = 1) -> tuple[float, int, Any]:
    start = time.perf_counter()
    batch = rollout.run(items, n=n)
    return time.perf_counter() - start, int(batch.tensordict["response_mask"].sum()), batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=60, help="words")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--send-every", type=int, default=8)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare(options)
        return
    count = options.concurrent * options.waves
    arguments = [
        sys.executable,
        __file__,
        "--bare",
        "--concurrent",
        str(options.concurrent),
        "--tokens",
        str(options.tokens),
    ]
    other = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None
    engine = SGLangEngine("embedded", threads=1, send_every=options.send_every)
    while other.stdout.readline().strip() != "ready":
        pass
    single = fr.Rollout(agent(options.tokens), engine, concurrency=options.concurrent)
    seen = 0
    ratios = []
    sampled = 0
    me, its = psutil.Process(), psutil.Process(other.pid)
    for run in range(-1, options.runs):  # the first warms both up
        items = prompts(seen + count, options.prompt)[seen:]
        seen += count
        seconds, tokens, batch = measure_stack(single, items)
        inputs = [
            prompt_of(row, mask)
            for row, mask in zip(batch.tensordict["prompts"], batch.tensordict["attention_mask"], strict=True)
        ]
        other.stdin.write(json.dumps(inputs) + "\n")
        other.stdin.flush()
        bare_seconds = float(other.stdout.readline())
        assert tokens == count * options.tokens, f"{tokens} tokens instead of {count * options.tokens}"
        if run < 0:
            before = cpu_seconds(me, its), cpu_seconds(its)
        else:
            sampled += tokens
            ratios.append(bare_seconds / seconds)
            print(
                f"run {run + 1}: stack {tokens / seconds:6.0f} tokens/s, bare {tokens / bare_seconds:6.0f} tokens/s, "
                f"ratio {ratios[-1]:.3f}",
                flush=True,
            )
    after = cpu_seconds(me, its), cpu_seconds(its)
    print("CPU microseconds per token, stack:", per_token(before[0], after[0], sampled))
    print("CPU microseconds per token, bare: ", per_token(before[1], after[1], sampled))
    other.stdin.close()
    other.wait(60)
    print(
        f"median ratio {statistics.median(ratios):.3f} "
        f"({count} requests, {options.concurrent} at once, {options.tokens} tokens each)"
    )
    tools = fr.Rollout(fr.load_agent(CONFIGS / "agents/tool_user.yaml"), engine, concurrency=options.concurrent)
    seconds, tokens, batch = measure_stack(
        tools, list(fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=64)), n=2
    )
    turns = int(sum(batch.tensordict["num_turns"]))
    print(
        f"tool_user: {len(batch)} trajectories, {turns} turns, {tokens / seconds:.0f} trained tokens/s, "
        f"{turns / seconds:.0f} turns/s"
    )
    single.close()
    tools.close()
    asyncio.run(engine.aclose())


def prompt_of(row: Any, mask: Any) -> list[int]:
    width = len(row)
    return [int(token) for token, kept in zip(row, mask[:width], strict=True) if kept]


if __name__ == "__main__":
    main()
