"""A server that answers in the words of vLLM, over a small random model of its own.

The lines are those that ``completion_stream_generator`` of ``vllm/entrypoints/openai/serving_completion.py`` writes
(repository vllm-project/vllm, commit 00463e627b4cbe549b5e9815a2bdb0100ae88ea9, November 2025, after 0.11): field for
field, with the nulls that ``model_dump_json(exclude_unset=False)`` leaves in.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections.abc import Sequence
from typing import Any

from aiohttp import web

WINDOW = 512
TOKENS = range(20, 36)
"""What the model ever says, beside the stop token."""
STOP = 2


def logits_after(ids: Sequence[int]) -> dict[int, float]:
    """The model: some scores that depend on the last two tokens."""
    rng = random.Random(repr(tuple(ids[-2:])))
    return {token: rng.uniform(0, 3) for token in (*TOKENS, STOP)}


def log_softmax(logits: dict[int, float], temperature: float = 1.0) -> dict[int, float]:
    scaled = {token: value / temperature for token, value in logits.items()}
    total = math.log(sum(math.exp(value) for value in scaled.values()))
    return {token: value - total for token, value in scaled.items()}


def cut(logprobs: dict[int, float], top_k: int, top_p: float) -> dict[int, float]:
    kept: dict[int, float] = {}
    for token, value in sorted(logprobs.items(), key=lambda item: -item[1])[: top_k or None]:
        if sum(math.exp(v) for v in kept.values()) > top_p:
            break
        kept[token] = value
    total = math.log(sum(math.exp(value) for value in kept.values()))
    return {token: value - total for token, value in kept.items()}


class VLLM:
    """The server, in a thread with an event loop of its own."""

    def __init__(self, logprobs_mode: str = "raw_logprobs", token_ids: bool = True) -> None:
        self.logprobs_mode, self.token_ids = logprobs_mode, token_ids
        self.asked: list[dict[str, Any]] = []
        self.broken_off = 0
        """How many answers were broken off by whoever asked."""
        self.lines: list[str] = []
        """Said instead of the next answers."""
        self.version = 0
        self.models = ["tiny"]
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        started.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self, started: threading.Event) -> None:
        async def begin() -> web.AppRunner:
            app = web.Application()
            app.router.add_get("/v1/models", self._models)
            app.router.add_post("/v1/completions", self._completions)
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            return runner

        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(begin())
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        permission = {"id": "modelperm-1", "object": "model_permission", "allow_sampling": True, "organization": "*"}
        cards = [
            {
                "id": name, "object": "model", "created": 1762000000, "owned_by": "vllm", "root": name,
                "parent": None, "max_model_len": WINDOW, "permission": [permission],
            }
            for name in self.models
        ]  # fmt: skip
        return web.json_response({"object": "list", "data": cards})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.asked.append(asked)
        if len(asked["prompt"]) >= WINDOW:
            message = f"This model's maximum context length is {WINDOW} tokens."
            error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response({"error": error}, status=400)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        try:
            async for line in self._lines(asked):
                await answer.write(f"data: {line}\n\n".encode())
        except (asyncio.CancelledError, ConnectionError):
            self.broken_off += 1
            raise
        return answer

    async def _lines(self, asked: dict[str, Any]) -> Any:
        if self.lines:
            yield self.lines.pop(0)
            yield "[DONE]"
            return
        ids, seed = list(asked["prompt"]), asked.get("seed", 0)
        prompt = len(ids)
        while True:
            await asyncio.sleep(0.001)
            token, logprob = self._sample(ids, asked, random.Random(f"{seed}/{len(ids)}"))
            ids.append(token)
            reason = None
            if not asked.get("ignore_eos") and token in asked.get("stop_token_ids", ()):
                reason = "stop"
            elif len(ids) - prompt == asked["max_tokens"] or len(ids) == WINDOW:
                reason = "length"
            choice = {
                "index": 0, "text": "x", "finish_reason": reason,
                "logprobs": {
                    "text_offset": [0], "token_logprobs": [logprob], "tokens": ["x"], "top_logprobs": [{"x": logprob}],
                },
                "stop_reason": token if reason == "stop" else None,
                "prompt_token_ids": asked["prompt"] if len(ids) == prompt + 1 else None,
                "token_ids": [token] if self.token_ids and asked.get("return_token_ids") else None,
            }  # fmt: skip
            line = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": asked["model"]}
            yield json.dumps(line | {"choices": [choice], "usage": None})
            if reason is not None:
                yield "[DONE]"
                return

    def _sample(self, ids: list[int], asked: dict[str, Any], rng: random.Random) -> tuple[int, float]:
        logits = logits_after(ids)
        raw = log_softmax(logits)
        temperature = asked.get("temperature", 1.0)
        if temperature == 0:
            token = max(raw, key=lambda token: raw[token])
            return token, raw[token]
        hot = log_softmax(logits, temperature)
        kept = cut(hot, asked.get("top_k", 0), asked.get("top_p", 1.0))
        (token,) = rng.choices(list(kept), [math.exp(value) for value in kept.values()])
        return token, {"raw_logprobs": raw, "processed_logprobs": kept, "sglang": hot}[self.logprobs_mode][token]
