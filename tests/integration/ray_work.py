"""What the tests of Ray pools give their replicas to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fsm_rollout.engines.client import EngineClient, PendingRequest
from fsm_rollout.engines.pool import PoolEngine
from fsm_rollout.engines.protocol import Engine, Request, SamplingParams
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn, scripted_logprob
from fsm_rollout.trajectory.tokens import as_ids

TEXT = "hello, wonderful world"
PIECES = 8


class Bytes:
    """As much of a tokenizer as a scripted engine needs; an actor has it at once, without importing transformers."""

    eos_token_id = 256

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def __len__(self) -> int:
        return 257


class ByTrajectory:
    """Builds engines that answer each trajectory with a text of its own, in eight pieces."""

    def __init__(self, delay: float) -> None:
        self.delay = delay

    def __call__(self, name: str) -> Engine:
        return ScriptedEngine(self.turn, tokenizer=Bytes(), replica=name)

    def turn(self, request: Request) -> Turn:
        return Turn(text=f"{request.trajectory_id}: {TEXT}", chunks=PIECES, delay=self.delay)


def ask(index: int, eos: int = 256) -> Request:
    params = SamplingParams(100, stop_ids=frozenset({eos}))
    return Request(f"r{index}", as_ids([65, 66]), params, trajectory_id=f"t{index}", group_id=f"{index}", agent="x")


def right(ticket: PendingRequest) -> None:
    """Check that a ticket holds what the script says, once."""
    start = len(ticket.request.ids)
    expected = [*Bytes().encode(f"{ticket.request.trajectory_id}: {TEXT}"), 256]
    assert ticket.error is None
    assert ticket.finish_reason == "stop"
    assert list(ticket.ids) == expected
    assert list(ticket.logprobs) == [scripted_logprob(token, start + i) for i, token in enumerate(expected)]


async def through(
    pool: PoolEngine, requests: Sequence[Request], meanwhile: Callable[[], Any] = list
) -> list[PendingRequest]:
    """Send everything through a dispatcher; call ``meanwhile`` once each replica has streamed something."""
    dispatcher = EngineClient(pool)
    tickets = [dispatcher.submit(request) for request in requests]
    async with asyncio.timeout(60):
        while not all(stats.tokens for stats in pool.replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        meanwhile()
        await asyncio.gather(*(ticket.done.wait() for ticket in tickets))
    assert dispatcher.requests == len(requests)
    return tickets
