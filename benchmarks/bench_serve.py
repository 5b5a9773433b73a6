"""What `fsm-rollout serve` adds to the time to the first streamed token, over the engine's own.

    python benchmarks/bench_serve.py [--calls 1 64] [--rounds 20]

The engine's time is from the call that asks it to its first tokens; the caller's from sending an HTTP request to the
first piece of text, by a client of `aiohttp` in the same process and on the same core, its own share included. The
difference (of the means, and of the medians) is what parsing, the trajectory's beginning, the journal, rendering and
HTTP take. On a machine that has other work, look at the CPU time of one call at a time until its first text.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import fmean, median

import aiohttp

import fsm_rollout as fr
from fsm_rollout.agent.loader import loads
from fsm_rollout.engines.protocol import Chunk, Engine, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.jobs.run_config import ServeConfig
from fsm_rollout.model.folders import load_tokenizer, model_folder
from fsm_rollout.serve.server import listening
from fsm_rollout.serve.service import Service

AGENT = """
agent: chatting
tools: {calculate: {use: "fsm_rollout.tools.calculator:calculate"}}
interaction: {use: "fsm_rollout.interactions:ScriptedUser"}
limits: {assistant_turns: 1000, user_turns: 1000, tool_calls: 1000, response_tokens: 100000}
states: {PENDING: {}, GENERATING: {timeout: 600, sampling: {max_tokens: 16}}, PROCESSING_TOOLS: {timeout: 600}, INTERACTING: {timeout: 600}}
transitions:
  - {trigger: prompted, source: PENDING, dest: GENERATING}
  - {trigger: generated, source: GENERATING, dest: PROCESSING_TOOLS, conditions: has_tool_calls}
  - {trigger: generated, source: GENERATING, dest: INTERACTING}
  - {trigger: truncated, source: GENERATING, dest: INTERACTING}
  - {trigger: tools_done, source: PROCESSING_TOOLS, dest: GENERATING}
  - {trigger: replied, source: INTERACTING, dest: GENERATING}
  - {trigger: interaction_done, source: INTERACTING, dest: TERMINATED}
"""  # noqa: E501  # YAML
ANSWER = Turn(text="The answer is 42, as far as anybody knows.", chunks=4, delay=0.02)


class Timed:
    """Notes how long an engine takes to its first tokens, by wrapping its ``generate``."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: list[float] = []
        self._generate = engine.generate
        engine.generate = self.generate  # type: ignore[method-assign]

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Pass chunks on."""
        asked, waiting = time.perf_counter(), {request.request_id for request in requests}
        async for chunk in self._generate(requests):
            if chunk.request_id in waiting and len(chunk.ids):
                waiting.remove(chunk.request_id)
                self.seconds.append(time.perf_counter() - asked)
            yield chunk


async def first_text(http: aiohttp.ClientSession, number: int) -> tuple[float, float]:
    """Return the seconds to the first piece of text of one new conversation, and those of CPU meanwhile."""
    messages = [{"role": "user", "content": f"How are you, number {number}?"}]
    sent, cpu = time.perf_counter(), time.process_time()
    async with http.post(
        "/v1/chat/completions", json={"model": "chatting", "messages": messages, "stream": True}
    ) as answer:
        first = 0.0
        async for line in answer.content:
            if not first and b'"content":"' in line and b'"content":""' not in line:
                first, cpu = time.perf_counter() - sent, time.process_time() - cpu
        assert first, answer.status
        return first, cpu


async def measure(calls: int, rounds: int, folder: Path) -> None:
    """Print the figures for so many calls at a time."""
    engine = ScriptedEngine(lambda request: ANSWER, tokenizer=load_tokenizer(model_folder("embedded")))
    timed = Timed(engine)
    async with fr.Rollout(loads(AGENT), engine) as rollout:
        with fr.Journal(folder / f"{calls}.sqlite") as journal:
            rollout.journal = journal
            async with (
                listening(Service(rollout, ServeConfig(port=0), calls)) as (url, _),
                aiohttp.ClientSession(url) as http,
            ):
                await asyncio.gather(*(first_text(http, number) for number in range(calls)))  # warms up
                timed.seconds.clear()
                seen = [
                    seconds
                    for number in range(rounds)
                    for seconds in await asyncio.gather(*(first_text(http, number) for _ in range(calls)))
                ]
    for mean in (fmean, median):
        own, whole = 1e3 * mean(timed.seconds), 1e3 * mean(first for first, _ in seen)
        cpu = f" ({1e3 * mean(cpu for _, cpu in seen):.2f} ms CPU until then)" if calls == 1 else ""
        print(
            f"{calls:3} at a time, {mean.__name__:6}: engine {own:7.2f} ms, caller {whole:7.2f} ms: "
            f"serve adds {whole - own:6.2f} ms{cpu}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    for calls in args.calls:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(measure(calls, args.rounds, Path(folder)))


if __name__ == "__main__":
    main()
