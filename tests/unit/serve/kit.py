"""Agents that are served on an engine which says what it is told, and what asks them over real HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

import fsm_rollout as fr
from fsm_rollout.agent.loader import loads
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.memory import Memory
from fsm_rollout.engines.scripted.simulated import scripted
from fsm_rollout.jobs.run_config import ServeConfig
from fsm_rollout.serve.server import listening
from fsm_rollout.serve.service import Service
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.journal import Journal, recordings
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import FILES
from tests.foreign import check_exact

CHATTING = FILES["chats"]


SINGLE = FILES["single"]


Chat = list[dict[str, Any]]


@dataclass
class Served:
    """A server with what it did."""

    url: str
    service: Service
    engine: ScriptedEngine
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    key: str = "none"

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(600):
            while not holds():  # noqa: ASYNC110  # what is waited for happens in other tasks' steps
                await asyncio.sleep(0.005)

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    async def ask(self, messages: Chat | str, *, key: str = "none", model: str = "chatting", **options: Any) -> Any:
        """Ask by OpenAI's client, and take the answer into the history."""
        history: Chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        async with self.openai(key) as client:
            answer = await client.chat.completions.create(model=model, messages=history, **options)  # type: ignore[call-overload]
        history.append({"role": "assistant", "content": answer.choices[0].message.content})
        return answer

    async def stream(self, messages: Chat, model: str = "chatting", **options: Any) -> list[Any]:
        async with self.openai() as client:
            chunks = await client.chat.completions.create(  # type: ignore[call-overload]
                model=model, messages=messages, stream=True, **options
            )
            return [chunk async for chunk in chunks]


@asynccontextmanager
async def served(
    turns: Any, *, agents: str = CHATTING, calls: int = 64, keys: tuple[str, ...] = (), journal: Path | None = None,
    rollout: dict[str, Any] | None = None, processor: Any = None, memory: Memory | None = None, **serving: Any,
) -> AsyncIterator[Served]:  # fmt: skip
    """Serve an agent on a scripted engine; at the end its rows must be what the engine has sampled."""
    tokenizer = processor.tokenizer if processor is not None else embedded_tokenizer()
    engine = scripted(turns, tokenizer=tokenizer, processor=processor, log=True, memory=memory)
    again = journal is not None and journal.exists()  # noqa: ASYNC240  # a test may
    earlier = list(recordings(journal, unfinished=True)) if journal is not None and again else []
    async with asyncio.timeout(600), fr.Rollout(loads(agents), engine, **(rollout or {})) as own:
        with nullcontext() if journal is None else Journal(journal, append=again) as writing:
            own.journal = writing
            service = Service(own, ServeConfig(port=0, **serving), calls)
            result = Served("", service, engine)
            listeners = own.scheduler.recorder.listeners

            def note(trajectory: Trajectory, event: AnyEvent) -> None:
                result.trajectories[trajectory.trajectory_id] = trajectory

            own.scheduler.recorder.listeners = (*listeners, note)
            async with listening(service, frozenset(keys), earlier) as (url, _):
                result.url = url
                yield result
    if not earlier:
        check_exact(list(result.trajectories.values()), engine)


def words(chunks: list[Any]) -> list[str]:
    return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]


async def refused(server: Served, **options: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await server.ask(options.pop("messages", "What is 20 + 22?"), **options)
    return caught.value
