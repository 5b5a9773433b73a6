"""Foreign agents for tests, by what they do; an agent with such a state; and what its rows must be."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from openai import AsyncOpenAI

import fsm_rollout as fr
from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.loader import loads
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.states.external.handler import ForeignVisit
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.tools import tool_schema
from fsm_rollout.tools.calculator import calculate
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import FILES

YAML = FILES["foreign"]
CALCULATOR = tool_schema(calculate)
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": 20, "operator": "+", "right": 22}}\n</tool_call>'


def agent(keys: str, **limits: int) -> AgentGraph:
    """Return an agent with one foreign state; ``keys`` are those of the state."""
    graph = loads(YAML.replace("AGENT", keys))
    return graph.model_copy(update={"limits": graph.limits.model_copy(update=limits)}) if limits else graph


Visitor = Callable[[ForeignVisit], Any]
SEEN: list[Any] = []
"""What the visitors of the present test have noted."""


def visited_by(visitor: Visitor, keys: str = "", **limits: int) -> AgentGraph:
    """Return an agent whose state is a function, wherever that stands: this module holds the present one."""
    globals()["visitor"] = visitor
    return agent(f"use: '{__name__}:visitor'{keys and ', '}{keys}", **limits)


def run(
    graph: AgentGraph | Visitor, turns: Any, *, n: int = 1, tokenizer: Any = None, processor: Any = None,
    check: bool = True, **options: Any,
) -> tuple[list[Trajectory], ScriptedEngine]:  # fmt: skip
    """Run a foreign agent on a script or a scripted engine, and hold its rows to the engine's log."""
    SEEN.clear()
    tokenizer = tokenizer or (embedded_tokenizer() if processor is None else processor.tokenizer)
    engine = turns
    if not isinstance(turns, ScriptedEngine):
        engine = ScriptedEngine(turns, tokenizer=tokenizer, processor=processor, log=True)
    trajectories: list[Trajectory] = []

    async def main() -> None:
        its = graph if isinstance(graph, AgentGraph) else visited_by(graph)
        async with fr.Rollout(its, engine, **options) as rollout, asyncio.timeout(600):
            async for group in rollout.stream(["What is 20 + 22?"], n):
                trajectories.extend(group.trajectories)

    asyncio.run(main())
    if check:
        check_exact(trajectories, engine)
    return trajectories, engine


def client(visit: ForeignVisit) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=visit.base_url, api_key=visit.api_key, max_retries=0)


def check_exact(trajectories: Sequence[Trajectory], engine: ScriptedEngine) -> None:
    """Compare with the engine's own log: each token that it sampled stands in one stream, trained, behind the very ids
    that it was asked to go on from; and nothing else is trained."""
    streams = [stream.tokens for trajectory in trajectories for stream in trajectory.streams]
    ids = [list(tokens.ids) for tokens in streams]
    trained = [[0] * tokens.prompt_length + tokens.response_mask().tolist() for tokens in streams]
    asked: dict[str, list[int]] = {}
    sampled: dict[str, list[int]] = {}
    for entry in engine.log:
        if isinstance(entry.what, Request):
            asked[entry.what.request_id], sampled[entry.what.request_id] = list(entry.what.ids), []
        elif isinstance(entry.what, Chunk):
            sampled[entry.what.request_id] += entry.what.ids
    for request_id, before in asked.items():
        places = range(len(before), len(before) + len(sampled[request_id]))
        if places:
            found = [
                number
                for number, stream in enumerate(ids)
                if stream[: places.stop] == before + sampled[request_id] and all(trained[number][i] for i in places)
            ]
            assert found, (request_id, before, sampled[request_id])
            for place in places:
                trained[found[0]][place] = 0
    assert not any(map(any, trained))


Transcript = list[dict[str, Any]]


async def chat(openai: AsyncOpenAI, messages: Transcript, **options: Any) -> Any:
    reply = await openai.chat.completions.create(model="any", messages=messages, **options)  # type: ignore[call-overload]
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message


async def tool_user(visit: ForeignVisit) -> None:
    """Ask, carry out the calls, ask again: until there are none. Its history only grows."""
    async with client(visit) as openai:
        messages: Transcript = [dict(message) for message in visit.messages]
        while calls := (await chat(openai, messages, tools=[CALCULATOR])).tool_calls:
            for call in calls:
                result = calculate(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


class EngineLog:
    """Notes what an engine is asked and says, by wrapping its ``generate``."""

    def __init__(self, engine: Any) -> None:
        self.asked: dict[str, list[int]] = {}
        self.sampled: dict[str, list[int]] = {}
        self._generate = engine.generate
        engine.generate = self.generate

    async def generate(self, requests: Sequence[Request]) -> Any:
        for request in requests:
            self.asked[request.request_id], self.sampled[request.request_id] = list(request.ids), []
        async for chunk in self._generate(requests):
            self.sampled[chunk.request_id] += chunk.ids
            yield chunk

    def check_one_row(self, trajectory: Trajectory, least: int = 2) -> None:
        """Hold the one stream of an agent whose history only grew to the engine's log, of ``least`` calls or more."""
        (stream,) = trajectory.streams
        ids = list(stream.tokens.ids)
        mask = [0] * stream.tokens.prompt_length + stream.tokens.response_mask().tolist()
        own = {key: out for key, out in self.sampled.items() if key.startswith(f"{trajectory.trajectory_id}/")}
        assert len(own) == trajectory.generations >= least
        assert sum(mask) == sum(map(len, own.values()))
        for request_id, out in own.items():
            before = self.asked[request_id]
            assert ids[: len(before) + len(out)] == before + out
            assert all(mask[len(before) : len(before) + len(out)])
