"""What a captured chat call costs over the bare engine call, at 64 foreign agents at a time.

    python benchmarks/bench_open.py [--sessions 64]

Both ask the same scripted engine, which answers at once, for the same turns: once by `handler: generate` and a user who
says the next line, once by agents that speak OpenAI's protocol over HTTP (with `aiohttp`) from a process of their own,
as foreign agents do. The difference is what this process pays for capture: HTTP, the protocol, finding the stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
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
  EXTERNAL: {handler: external, use: "__main__:asks", timeout: 600}
transitions:
  - {trigger: returned, source: EXTERNAL, dest: TERMINATED}
"""
ANSWER = "The answer is 42, as far as anybody knows."


_callers: list[asyncio.subprocess.Process] = []
_waiting: dict[str, asyncio.Future[None]] = {}


async def asks(visit: Any) -> None:
    """Have the other process go on with one history for so many turns."""
    caller = _callers[0]
    assert caller.stdin is not None
    _waiting[visit.api_key] = asyncio.get_running_loop().create_future()
    caller.stdin.write(json.dumps([visit.base_url, visit.api_key, visit.task]).encode() + b"\n")
    await _waiting[visit.api_key]


async def hear() -> None:
    """Note which agents of the other process have come to their ends."""
    assert _callers[0].stdout is not None
    async for line in _callers[0].stdout:
        _waiting.pop(line.decode().strip()).set_result(None)


async def call() -> None:
    """Be the other process: play the agents that it is told of, each as a client with a connection of its own."""

    async def play(base_url: str, key: str, task: str) -> None:
        messages: list[Any] = [{"role": "user", "content": task}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
            for turn in range(TURNS):
                body = {"model": "m", "messages": messages}
                async with http.post(f"{base_url}/chat/completions", json=body) as answer:
                    messages.append((await answer.json())["choices"][0]["message"])
                messages.append({"role": "user", "content": f"and {turn}?"})
        print(key, flush=True)

    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    agents = set()
    async for line in lines:
        agents.add(asyncio.create_task(play(*json.loads(line))))
    await asyncio.gather(*agents)


def measure(text: str, sessions: int, prompt: dict[str, Any]) -> tuple[float, float]:
    """Return the wall and the CPU milliseconds of one call."""
    engine = ScriptedEngine(lambda request: ANSWER, tokenizer=load_tokenizer(model_folder("embedded")))
    graph = loads(text)

    async def main() -> tuple[float, float]:
        pipe = asyncio.subprocess.PIPE
        caller = await asyncio.create_subprocess_exec(sys.executable, __file__, "--call", stdin=pipe, stdout=pipe)
        _callers[:] = [caller]
        hearing = asyncio.create_task(hear())
        try:
            return await timed()
        finally:
            assert caller.stdin is not None
            caller.stdin.close()
            await caller.wait()
            await hearing

    async def timed() -> tuple[float, float]:
        async with fr.Rollout(graph, engine) as rollout:
            for n in (4, sessions):  # the first run warms up
                begun, cpu = time.perf_counter(), time.process_time()
                async for group in rollout.stream([prompt], n):
                    assert all(t.generations == TURNS and len(t.streams) == 1 for t in group.trajectories), (
                        group.trajectories
                    )
            calls = sessions * TURNS
            used = time.process_time() - cpu
            return 1e3 * (time.perf_counter() - begun) / calls, 1e3 * used / calls

    return asyncio.run(main())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--call", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.call:
        asyncio.run(call())
        return
    sessions = arguments.sessions
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 20 + 22?"}]}
    said = {"interaction_kwargs": {"turns": [f"and {turn}?" for turn in range(TURNS - 1)]}}
    bare, bare_cpu = measure(BARE, sessions, prompt | said)
    captured, captured_cpu = measure(CAPTURED, sessions, prompt)
    print(f"{sessions} sessions, {TURNS} turns each; per call, the callers in a process of their own")
    print(f"bare      {bare:6.2f} ms wall, {bare_cpu:6.2f} ms CPU")
    print(f"captured  {captured:6.2f} ms wall, {captured_cpu:6.2f} ms CPU")
    print(f"capture   {captured - bare:6.2f} ms wall, {captured_cpu - bare_cpu:6.2f} ms CPU")


if __name__ == "__main__":
    main()
