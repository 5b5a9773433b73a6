"""How much of SGLang's own speed is left when trajectories are driven through the whole stack.

    python benchmarks/bench_sglang.py [--runs 5] [--concurrent 64] [--prompt 60] [--tokens 96] [--waves 4]
                                      [--against CHECKOUT]

Single-turn, fixed lengths (stop tokens are ignored), always ``--concurrent`` requests under way, on the embedded model:

- bare: a loop over ``sglang.Engine.async_generate`` in one process, not streaming, with logprobs;
- stack: ``fsm_rollout.Rollout`` over ``kind: sglang``: chat template, state machine, scheduler, HTTP, events,
  streaming, batches;
- against: the same of another checkout of this repository, say of an earlier commit.

All use the same arguments of SGLang, live in processes of their own, and take turns; a run's ratio is that of its
neighbours, and the median of the runs is what counts. ``tool_user`` (several turns, tool calls) is measured beside it.
On a machine that does other things, too, the times say little; the CPU time per token, printed for each process, does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

import fsm_rollout as fr

CONFIGS = Path(__file__).parent.parent / "configs"
TEXT = "please work out the sum of 12 and 34 then subtract 5 from 67 and say what is left of it all now"
WORDS = TEXT.split()


def prompts(first: int, count: int, words: int) -> list[dict[str, Any]]:
    """Prompts of one length, all different from their first word on, so that no cache helps either side."""
    return [
        {
            "agent": "single",
            "messages": [
                {"role": "user", "content": " ".join([str(i), *(WORDS[(i + k) % len(WORDS)] for k in range(words))])}
            ],
        }
        for i in range(first, first + count)
    ]


def agent(tokens: int) -> Any:
    graph = fr.load_agent(CONFIGS / "agents/single_turn.yaml")
    data = graph.model_dump(mode="json", by_alias=True, exclude_unset=True)
    data["limits"] = {**data.get("limits", {}), "response_tokens": 10 * tokens}
    data["states"]["GENERATING"] = {"sampling": {"max_tokens": tokens, "ignore_eos": True}, "timeout": 600}
    return type(graph).model_validate(data)


# -- what is measured, each in a process that reads a line and writes one --------------------------------------------


def serve_bare(options: argparse.Namespace) -> None:
    """Read prompts' ids, write seconds."""
    from fsm_rollout.engines.sglang import cpu as sglang_cpu
    from fsm_rollout.model import embedded_model

    base = sglang_cpu.prepare(1)
    import sglang

    engine = sglang.Engine(
        **{**base, "model_path": str(embedded_model()), "skip_tokenizer_init": True, "log_level": "error"}
    )
    sampling = {"max_new_tokens": options.tokens, "temperature": 1.0, "ignore_eos": True}

    async def measure(inputs: list[list[int]]) -> float:
        waiting = iter(inputs)

        async def work() -> None:
            for ids in waiting:
                out = await engine.async_generate(input_ids=ids, sampling_params=sampling, return_logprob=True)
                assert len(out["output_ids"]) == options.tokens

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(options.concurrent)))
        return time.perf_counter() - start

    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": engine.loop.run_until_complete(measure(json.loads(line)))}), flush=True)
    engine.shutdown()


def serve_stack(options: argparse.Namespace) -> None:
    """Read the number of the first prompt (or ``tools``), write seconds and what the engine was given."""
    spec = {"kind": "sglang", "threads": 1, "send_every": options.send_every}
    agents = {"single": agent(options.tokens), "tools": fr.load_agent(CONFIGS / "agents/tool_user.yaml")}
    rollout = fr.Rollout(agents, spec, concurrency=options.concurrent)
    lines = (CONFIGS / "data/arithmetic.jsonl").read_text("utf-8").splitlines()[:64]
    with_tools = [{**json.loads(line), "agent": "tools"} for line in lines]
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        if line.strip() == "tools":
            batch = rollout.run(with_tools, n=2)
        else:
            batch = rollout.run(prompts(int(line), options.concurrent * options.waves, options.prompt))
        seconds, data = time.perf_counter() - start, batch.tensordict
        rows = zip(data["prompts"].tolist(), data["attention_mask"].tolist(), strict=True)
        result = {
            "seconds": seconds,
            "tokens": int(data["response_mask"].sum()),
            "turns": int(sum(data["num_turns"])),
            "inputs": [
                [token for token, kept in zip(row, mask[: len(row)], strict=True) if kept] for row, mask in rows
            ],
        }
        print(json.dumps(result), flush=True)
    rollout.close()


# -- the measurement ------------------------------------------------------------------------------------------------


class Side:
    """One process, and the CPU time that it and all below it have spent."""

    def __init__(self, name: str, kind: str, checkout: Path) -> None:
        self.name = name
        self.rates: list[float] = []
        self.spent: dict[str, float] = {}
        self.process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--serve", kind],
            env={**os.environ, "PYTHONPATH": str(checkout)},
            cwd=checkout,  # what it starts with `-m` comes from there, too
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def line(self) -> str:
        """Return what it writes next."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"{self.name} has ended (exit code {self.process.wait()})")
        return line

    def ask(self, question: str) -> dict[str, Any]:
        """Have it measure once."""
        assert self.process.stdin is not None
        before = self._cpu_seconds()
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.line())
        self.latest = {role: spent - before.get(role, 0.0) for role, spent in self._cpu_seconds().items()}
        return answer

    def count(self, tokens: int, seconds: float) -> None:
        """Let the latest measurement count."""
        self.rates.append(tokens / seconds)
        for role, spent in self.latest.items():
            self.spent[role] = self.spent.get(role, 0.0) + spent

    def _cpu_seconds(self) -> dict[str, float]:
        """CPU seconds by the role of a process."""
        main, found = psutil.Process(self.process.pid), dict[str, float]()
        for process in (main, *main.children(recursive=True)):
            title = " ".join(process.cmdline())
            role = "main" if process == main else "scheduler" if "scheduler" in title else "rest"
            times = process.cpu_times()
            found[role] = found.get(role, 0.0) + times.user + times.system
        return found

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=60, help="words")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--send-every", type=int, default=8)
    parser.add_argument("--against", type=Path, help="another checkout, whose stack is measured beside this one's")
    parser.add_argument("--serve", choices=["bare", "stack"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        (serve_bare if options.serve == "bare" else serve_stack)(options)
        return
    here = Path(__file__).resolve().parent.parent
    stack, bare = Side("stack", "stack", here), Side("bare", "bare", here)
    sides = [stack, bare]
    if options.against is not None:
        sides.append(Side("against", "stack", options.against.resolve()))
    for side in sides:
        while side.line().strip() != "ready":
            pass
    count = options.concurrent * options.waves
    tokens = count * options.tokens
    for run in range(-1, options.runs):  # the first warms all up
        first = (run + 1) * count
        inputs = ""
        for side in sides:
            answer = side.ask(inputs if side is bare else str(first))
            if side is not bare:
                assert answer["tokens"] == tokens, f"{answer['tokens']} tokens instead of {tokens}"
                inputs = json.dumps(answer["inputs"])
            if run >= 0:
                side.count(tokens, answer["seconds"])
        if run >= 0:
            rates = ", ".join(f"{side.name} {side.rates[-1]:6.0f}" for side in sides)
            print(f"run {run + 1}: tokens/s: {rates}; stack/bare {stack.rates[-1] / bare.rates[-1]:.3f}", flush=True)
    for side in sides:
        costs = {role: 1e6 * spent / (tokens * options.runs) for role, spent in sorted(side.spent.items())}
        roles = ", ".join(f"{role} {cost:.0f}" for role, cost in costs.items())
        print(f"CPU microseconds per token, {side.name}: {roles}, together {sum(costs.values()):.0f}")
    for side in sides[1:]:
        ratio = statistics.median(mine / its for mine, its in zip(stack.rates, side.rates, strict=True))
        print(
            f"median ratio stack/{side.name} {ratio:.3f} "
            f"({count} requests, {options.concurrent} at once, {options.tokens} tokens each)"
        )
    answer = stack.ask("tools")
    print(
        f"tool_user: {answer['turns']} turns, {answer['tokens'] / answer['seconds']:.0f} trained tokens/s, "
        f"{answer['turns'] / answer['seconds']:.0f} turns/s"
    )
    for side in sides:
        side.close()


if __name__ == "__main__":
    main()
