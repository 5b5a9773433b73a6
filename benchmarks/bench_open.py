"""What a captured chat call costs over the bare engine call, at 64 foreign agents at a time.

    python benchmarks/bench_open.py [--sessions 64]

Both ask the same scripted engine, which answers at once, for the same turns: once by `handler: generate` and a user who
says the next line, once by a function that speaks OpenAI's protocol over HTTP, with a client of `aiohttp` in the same
process and on the same core. The difference is the price of capture: HTTP both ways, the protocol, finding the stream.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import time
from typing import Any

import aiohttp

import fsm_rollout as fr
from fsm_rollout.agent.loader import loads
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.model.folders import load_tokenizer, model_folder

TURNS = 20
BARE = """
agent: bare
interaction: {use: "fsm_rollout.interactions:ScriptedUser"}
limits: {assistant_turns: 1000, user_turns: 1000}
states: {PENDING: {}, GENERATING: {timeout: 600}, INTERACTING: {timeout: 600}}
transitions:
  - {trigger: prompted, source: PENDING, dest: GENERATING}
  - {trigger: generated, source: GENERATING, dest: INTERACTING}
  - {trigger: replied, source: INTERACTING, dest: GENERATING}
  - {trigger: interaction_done, source: INTERACTING, dest: TERMINATED}
"""
CAPTURED = """
agent: captured
initial: EXTERNAL
limits: {assistant_turns: 1000}
states:
  EXTERNAL: {handler: external, use: "bench_open:asks", timeout: 600}
transitions:
  - {trigger: returned, source: EXTERNAL, dest: TERMINATED}
"""
ANSWER = "The answer is 42, as far as anybody knows."


async def asks(visit: Any) -> None:
    """Go on with one history for so many turns."""
    messages: list[Any] = [{"role": "user", "content": visit.task}]
    headers = {"Authorization": f"Bearer {visit.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        for turn in range(TURNS):
            body = {"model": "m", "messages": messages}
            async with http.post(f"{visit.base_url}/chat/completions", json=body) as answer:
                messages.append((await answer.json())["choices"][0]["message"])
            messages.append({"role": "user", "content": f"and {turn}?"})


def measure(text: str, sessions: int, prompt: dict[str, Any]) -> tuple[float, float]:
    """Return the wall and the CPU milliseconds of one call."""
    engine = ScriptedEngine(lambda request: ANSWER, tokenizer=load_tokenizer(model_folder("embedded")))
    graph = loads(text)

    async def main() -> tuple[float, float]:
        async with fr.Rollout(graph, engine) as rollout:
            for n in (4, sessions):  # the first run warms up
                begun, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
                async for group in rollout.stream([prompt], n):
                    assert all(t.generations == TURNS and len(t.streams) == 1 for t in group.trajectories), (
                        group.trajectories
                    )
            calls = sessions * TURNS
            used = resource.getrusage(resource.RUSAGE_SELF).ru_utime - cpu
            return 1e3 * (time.perf_counter() - begun) / calls, 1e3 * used / calls

    return asyncio.run(main())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    sessions = parser.parse_args().sessions
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 20 + 22?"}]}
    said = {"interaction_kwargs": {"turns": [f"and {turn}?" for turn in range(TURNS - 1)]}}
    bare, bare_cpu = measure(BARE, sessions, prompt | said)
    captured, captured_cpu = measure(CAPTURED, sessions, prompt)
    print(f"{sessions} sessions, {TURNS} turns each; per call, the caller's own share included")
    print(f"bare      {bare:6.2f} ms wall, {bare_cpu:6.2f} ms CPU")
    print(f"captured  {captured:6.2f} ms wall, {captured_cpu:6.2f} ms CPU")
    print(f"capture   {captured - bare:6.2f} ms wall, {captured_cpu - bare_cpu:6.2f} ms CPU")


if __name__ == "__main__":
    main()
