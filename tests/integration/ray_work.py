"""What the tests of Ray pools give their replicas to do."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import NO_IDS, NO_LOGPROBS, Engine, Request, SamplingParams
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn, scripted_logprob
from fsm_rollout.trajectory.tokens import Ids, Logprobs, as_ids, as_logprobs

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


class Spelled:
    """A tokenizer of the texts that a script says and of no other: an actor has it without importing transformers."""

    def __init__(self, eos: int, texts: Mapping[str, list[int]]) -> None:
        self.eos_token_id, self.texts = eos, texts

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.texts[text]


class Calling:
    """Builds engines that call a tool ``turns`` times and then say something that depends on the seed."""

    def __init__(self, tokenizer: Any, call: str, turns: int) -> None:
        self.calls = [call % turn for turn in range(turns)]
        self.ends = [f"Done {number}." for number in range(100)]
        texts = {text: tokenizer.encode(text, add_special_tokens=False) for text in (*self.calls, *self.ends)}
        self.tokenizer = Spelled(tokenizer.eos_token_id, texts)

    def __call__(self, name: str) -> Engine:
        return ScriptedEngine(self.turn, tokenizer=self.tokenizer, replica=name)

    def turn(self, request: Request) -> Turn:
        ended = request.turn >= len(self.calls)
        text = self.ends[request.sampling.seed % 100] if ended else self.calls[request.turn]
        return Turn(text=text, chunks=4, delay=0.02)


class Weighted(ScriptedEngine):
    """Its weights are one number, and so is each logprob: the weights that sampled the token, negated."""

    weight = 0.0

    def __init__(self, name: str) -> None:
        turn = partial(Turn, chunks=60, delay=0.02)
        super().__init__(lambda request: turn(text=TEXT * 4 + request.trajectory_id), tokenizer=Bytes(), replica=name)

    @staticmethod
    def answer(request: Request) -> list[int]:
        return [*Bytes().encode(TEXT * 4 + request.trajectory_id), Bytes.eos_token_id]

    async def update_weights(self, weights: Any, version: int | None = None) -> int:
        self.weight = float((Path(weights) / "weight").read_text())
        return await super().update_weights(weights, version)

    def _emit(self, answer: Any, ids: Ids = NO_IDS, logprobs: Logprobs = NO_LOGPROBS, **end: Any) -> None:
        super()._emit(answer, ids, as_logprobs([-self.weight] * len(ids)), **end)


def ask(index: int, eos: int = 256) -> Request:
    params = SamplingParams(200, stop_ids=frozenset({eos}))
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
    pool: EnginePool, requests: Sequence[Request], meanwhile: Callable[[], Any] = list
) -> list[PendingRequest]:
    """Send everything through a dispatcher; call ``meanwhile`` once each replica has streamed something."""
    dispatcher, before = EngineClient(pool), pool.requests
    tickets = [dispatcher.submit(request) for request in requests]
    async with asyncio.timeout(600):
        while not all(stats.tokens for stats in pool.replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        meanwhile()
        await asyncio.gather(*(ticket.done.wait() for ticket in tickets))
    assert pool.requests == before + len(requests)
    return tickets
