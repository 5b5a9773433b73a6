"""What tokens' logprobs must be, by a forward pass of transformers; shares no code with the engines."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Chunk, Engine, Request, SamplingParams, Thinking
from fsm_rollout.model import embedded_model
from fsm_rollout.trajectory.tokens import NO_VERSION, as_ids

PROMPTS = ("1", "What is (37 + 58) * 4?", "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10", "a b c d")

PATIENCE = 300.0
"""Seconds for what a busy machine does when it can."""


@cache
def model(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(embedded_model(name), dtype=torch.float32).eval()


def expected(
    name: str, prompt: Sequence[int], ids: Sequence[int], params: SamplingParams, late: int = 0
) -> list[float]:
    """Logprobs of ``ids`` after ``prompt`` under ``name``: penalties, temperature, then top_k, top_p and min_p.

    ``late``: penalties learn so many tokens late what was said, and do not count the prompt, as SGLang's.
    """
    with torch.no_grad():
        logits = model(name)(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double()
    for at, row in enumerate(logits):
        said = list(ids[: max(0, at - late)])
        for token in {*said, *(() if late else prompt)}:
            row[token] *= 1 / params.repetition_penalty if row[token] > 0 else params.repetition_penalty
            row[token] -= said.count(token) * params.frequency_penalty + (token in said) * params.presence_penalty
    logprobs = torch.log_softmax(logits / (params.temperature or 1.0), -1)
    if params.temperature and (params.top_k or params.top_p < 1 or params.min_p):
        order = logprobs.sort(-1, descending=True)
        probs = order.values.exp()
        if params.top_k:
            probs[:, params.top_k :] = 0
        mass_before = probs.cumsum(-1) - probs
        probs[mass_before > params.top_p] = 0
        probs[probs < params.min_p * probs[:, :1]] = 0
        kept = torch.zeros_like(probs).scatter(-1, order.indices, probs)
        logprobs = (kept / kept.sum(-1, keepdim=True)).log()
    return [float(row[token]) for row, token in zip(logprobs, ids, strict=True)]


@dataclass
class Got:
    request: Request
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.ids]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for chunk in self.chunks for logprob in chunk.logprobs]

    @property
    def versions(self) -> list[int]:
        return [chunk.weight_version for chunk in self.chunks for _ in chunk.ids]

    @property
    def reason(self) -> str | None:
        return self.chunks[-1].finish_reason


def request(engine: Engine, name: str, prompt: int = 0, max_tokens: int = 24, **sampling: Any) -> Request:
    ids = engine.tokenizer.encode(PROMPTS[prompt % len(PROMPTS)], add_special_tokens=False)
    sampling.setdefault("stop_ids", engine.eos_ids)
    return Request(name, as_ids(ids), SamplingParams(max_tokens, **sampling))


class Answers(dict[str, Got]):
    """What came for some requests; whoever waits for something of it hears of every chunk."""

    def __init__(self, *requests: Request) -> None:
        super().__init__((request.request_id, Got(request)) for request in requests)
        self._changed = asyncio.Event()

    async def drain(self, stream: AsyncIterator[Chunk]) -> None:
        async for chunk in stream:
            self[chunk.request_id].chunks.append(chunk)
            self._changed.set()

    async def until(self, holds: Callable[[], bool], patience: float = PATIENCE) -> None:
        async with asyncio.timeout(patience):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


async def ask(engine: Engine, *requests: Request, patience: float = PATIENCE) -> list[Got]:
    got = Answers(*requests)
    async with asyncio.timeout(patience):
        await got.drain(engine.generate(requests))
    return list(got.values())


async def closes_thinking(client: EngineClient, asked: Request) -> None:
    """Close the thinking of a turn that begins in it after 7 tokens; each part is what is sampled for it alone."""
    close = as_ids(client.facts.tokenizer.encode("\n</think>\n\n", add_special_tokens=False))
    thinking = Thinking(7, True, "<think>", "</think>", close)
    pending = client.submit(replace(asked, sampling=replace(asked.sampling, thinking=thinking)))
    await asyncio.wait_for(pending.done.wait(), PATIENCE)
    length, version = asked.sampling.max_tokens, client.weight_version
    assert (pending.finish_reason, pending.error) == ("length", None)
    assert pending.versions == [(7, version), (len(close), NO_VERSION), (length - 7 - len(close), version)]
    assert pending.ids[7 : 7 + len(close)] == close
    right = expected("final", list(asked.ids), list(pending.ids), asked.sampling)
    right[7 : 7 + len(close)] = [0.0] * len(close)
    assert pending.logprobs.tolist() == pytest.approx(right, abs=2e-3)
    alone = client.submit(replace(asked, request_id="1st", sampling=replace(asked.sampling, max_tokens=7)))
    rest = client.submit(asked.continued(pending.ids[: 7 + len(close)], "2nd"))
    for part in (alone, rest):
        await asyncio.wait_for(part.done.wait(), PATIENCE)
    assert pending.ids == alone.ids + close + rest.ids


def worst(got: Got, weights: Mapping[int, str]) -> float:
    """How far any logprob is from that of the weights which its version names."""
    tables = {
        version: expected(name, list(got.request.ids), got.ids, got.request.sampling)
        for version, name in weights.items()
    }
    assert len(got.ids) == len(got.logprobs)
    triples = zip(range(len(got.ids)), got.versions, got.logprobs, strict=True)
    return max(abs(tables[version][index] - logprob) for index, version, logprob in triples)
