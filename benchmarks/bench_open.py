"""What a captured chat call costs over the bare engine call, at 64 foreign agents at a time.

    python benchmarks/bench_open.py [--sessions 64] [--body 0] [--path responses]
    python benchmarks/bench_open.py --first-token [--sessions 16] [--body 40] [--path responses]
    python benchmarks/bench_open.py --serve [--first-token] [...]

Both ask the same scripted engine, which answers at once, for the same turns: once by `handler: generate` and a user who
says the next line, once by agents that speak OpenAI's protocol over HTTP (with `aiohttp`) from a process of their own,
as foreign agents do. The difference is what this process pays for capture: HTTP, the protocol, finding the stream.
`--body` has each call bring so many kB of instructions and tools, as Codex does. With `--first-token` the engine takes
a second for an answer and streams it, and measured is how much later than from the engine its first text comes to the
agent. With `--serve` the agents call `fsm-rollout serve`, which shows the model their tools, instead of the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp

import fsm_rollout as fr
from fsm_rollout.agent.loader import loads
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.jobs.run_config import ServeConfig
from fsm_rollout.model.folders import load_tokenizer, model_folder
from fsm_rollout.serve.server import listening
from fsm_rollout.serve.service import Service

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
# What is served has a state for calls of the tools that callers bring.
SERVED = BARE.replace("INTERACTING: {timeout: 600}}", "INTERACTING: {timeout: 600}, PROCESSING_TOOLS: {timeout: 600}}")
SERVED += """
  - {trigger: tools_done, source: PROCESSING_TOOLS, dest: GENERATING}
""".lstrip("\n")
SERVED = SERVED.replace(
    "  - {trigger: generated, ",
    "  - {trigger: generated, source: GENERATING, dest: PROCESSING_TOOLS, conditions: has_tool_calls}\n"
    "  - {trigger: generated, ",
)
ANSWER = "The answer is 42, as far as anybody knows."


_callers: list[asyncio.subprocess.Process] = []
_waiting: dict[str, asyncio.Future[None]] = {}
_first: dict[str, float] = {}  # when the engine said the first word of an answer, which is its number
_lags: list[float] = []  # how much later it came to the agent


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
        match line.decode().split():
            case ["end", key]:
                _waiting.pop(key).set_result(None)
            case ["first", number, at]:
                _lags.append(float(at) - _first[number])


async def call() -> None:
    """Be the other process: play the agents that it is told of, each as a client with a connection of its own."""

    async def play(base_url: str, key: str, task: str) -> None:
        messages: list[Any] = [*system, {"role": "user", "content": task}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
            for turn in range(turns):
                body = {"model": "bare", key_of_history: messages, "tools": tools, "stream": streams}
                async with http.post(f"{base_url}/{path}", json=body) as answer:
                    if streams:
                        messages.append(await heard(answer))
                    elif path == "responses":
                        messages += (await answer.json())["output"]
                    else:
                        messages.append((await answer.json())["choices"][0]["message"])
                messages.append({"role": "user", "content": f"and {turn}?"})
        print(f"end {key}", flush=True)

    async def heard(answer: aiohttp.ClientResponse) -> dict[str, str]:
        said, at = "", 0.0
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if path == "responses":
                    piece = event["delta"] if event["type"] == "response.output_text.delta" else ""
                else:
                    piece = event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
                at = at or (time.monotonic() if piece else 0.0)
                said += piece
        print(f"first {said.split()[0]} {at}", flush=True)
        return {"role": "assistant", "content": said}

    path, body, turns, streams = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "True"
    key_of_history = "input" if path == "responses" else "messages"
    system = [{"role": "system", "content": "Be brief, and work on. " * (22 * body)}] if body else []
    function = {"description": "It does things. " * (5 * body), "parameters": {"type": "object", "properties": {}}}
    named = [{"name": f"tool_{number}", **function} for number in range(6 if body else 0)]
    tools: list[Any] = [{"type": "function", "function": tool} for tool in named]
    if path == "responses":
        tools = [{"type": "function", **tool} for tool in named]

    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    agents = set()
    async for line in lines:
        agents.add(asyncio.create_task(play(*json.loads(line))))
    await asyncio.gather(*agents)


class SlowEngine(ScriptedEngine):
    """Takes a second for an answer, which begins with its number, and notes when it says that."""

    def __init__(self) -> None:
        self.numbers: dict[str, str] = {}  # of the answers, by their requests
        super().__init__(self.turn, tokenizer=load_tokenizer(model_folder("embedded")))

    def turn(self, request: Request) -> Turn:
        """Return the next answer; begun at different times, they come at different times."""
        number = self.numbers.setdefault(request.request_id, f"no{len(self.numbers)}")
        return Turn(text=f"{number} {ANSWER}", chunks=12, delay=0.1 + len(self.numbers) % 16 / 400)

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Answer, and note when it says an answer's first text."""
        numbers: dict[str, str] = {}
        async for chunk in super().generate(requests):
            if len(chunk.ids) and chunk.request_id not in numbers:
                numbers[chunk.request_id] = self.numbers[chunk.request_id]
                _first[self.numbers[chunk.request_id]] = time.monotonic()
            yield chunk


def measure(
    text: str, sessions: int, prompt: dict[str, Any], *called: object, slow: bool = False, serve: bool = False
) -> tuple[float, float]:
    """Return the wall and the CPU milliseconds of one call."""
    quick = partial(ScriptedEngine, lambda request: ANSWER, tokenizer=load_tokenizer(model_folder("embedded")))
    engine = SlowEngine() if slow else quick()
    turns = int(str(called[2]))
    graph = loads(text)

    async def main() -> tuple[float, float]:
        pipe = asyncio.subprocess.PIPE
        caller = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--call", *map(str, called), stdin=pipe, stdout=pipe
        )
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
            service = Service(rollout, ServeConfig(port=0), sessions) if serve else None
            async with listening(service) if service is not None else nullcontext(("", None)) as (url, _):
                for n in (4, sessions):  # the first run warms up
                    begun, cpu = time.perf_counter(), time.process_time()
                    if service is not None:
                        tasks, waiting = [f"{n}-{number}" for number in range(n)], service.waiting
                        visits = [SimpleNamespace(base_url=f"{url}/v1", api_key=task, task=task) for task in tasks]
                        await asyncio.gather(*map(asks, visits))
                        assert service.waiting == waiting + n, "each went on with its trajectory"
                        continue
                    async for group in rollout.stream([prompt], n):
                        assert all(t.generations == turns and len(t.streams) == 1 for t in group.trajectories), (
                            group.trajectories
                        )
            calls = sessions * turns
            used = time.process_time() - cpu
            return 1e3 * (time.perf_counter() - begun) / calls, 1e3 * used / calls

    return asyncio.run(main())


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--call"]:
        asyncio.run(call())
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--body", type=int, default=0, help="kB of instructions and tools in each call")
    parser.add_argument("--path", choices=("chat/completions", "responses"), default="chat/completions")
    parser.add_argument("--first-token", action="store_true")
    parser.add_argument("--serve", action="store_true", help="by `fsm-rollout serve` and not by the gateway")
    arguments = parser.parse_args()
    sessions, path, body = arguments.sessions, arguments.path, arguments.body
    question, text = {"role": "user", "content": "What is 20 + 22?"}, SERVED if arguments.serve else CAPTURED
    if arguments.first_token:
        measure(text, sessions, {"messages": [question]}, path, body, 4, True, slow=True, serve=arguments.serve)
        lags = sorted(_lags[16:])  # without the first run, which warms up
        middle, late, worst = (1e3 * lags[int(part * (len(lags) - 1))] for part in (0.5, 0.9, 1.0))
        print(f"{sessions} sessions, {body} kB: first text {middle:.1f} ms after the engine's")
        print(f"for nine of ten within {late:.1f} ms, for all within {worst:.1f} ms")
        return
    system = [{"role": "system", "content": "Be brief, and work on. " * (22 * body)}] if body else []
    said = {"interaction_kwargs": {"turns": [f"and {turn}?" for turn in range(TURNS - 1)]}}
    bare, bare_cpu = measure(BARE, sessions, {"messages": [*system, question]} | said, path, body, TURNS, False)
    captured, captured_cpu = measure(
        text, sessions, {"messages": [question]}, path, body, TURNS, False, serve=arguments.serve
    )
    print(f"{sessions} sessions, {TURNS} turns each, {body} kB; per call, the callers in a process of their own")
    print(f"bare      {bare:6.2f} ms wall, {bare_cpu:6.2f} ms CPU")
    print(f"captured  {captured:6.2f} ms wall, {captured_cpu:6.2f} ms CPU")
    print(f"capture   {captured - bare:6.2f} ms wall, {captured_cpu - bare_cpu:6.2f} ms CPU")


if __name__ == "__main__":
    main()
