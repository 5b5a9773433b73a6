"""A hosted model behind OpenAI's or Anthropic's chat API: messages out, a message with calls and a usage back.

Invariants: what is asked is what the stream says (:mod:`fsm_rollout.chat.hosted`), so a run goes on, is replayed and
shown as with any engine; an answer comes whole or not at all, with its tokens as the provider counts them. What the
API refuses for good is not asked again, all else is the pool's to try again; meanwhile nothing is asked of an API that
wants to be left alone. The key is read from the environment, and stands nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from fsm_rollout.chat.hosted import END, HostedFormat
from fsm_rollout.engines.chat.apis import APIS, ChatAnswer, NoAnswer
from fsm_rollout.engines.chunk_stream import ChunkStream
from fsm_rollout.engines.protocol import Chunk, EngineFacts, Load, Request
from fsm_rollout.engines.request_tasks import RequestTasks
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import Usage, as_logprobs

PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before an API is asked again that does not say when, doubled each time


class ChatEngine(RequestTasks):
    """See the module; the arguments are the keys of ``kind: chat``. ``tokenizer``: a hosted one.

    Raises:
        EngineError: the API's package is not installed, or there is no key.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: Any,
        api: Literal["openai", "anthropic"] = "openai",
        base_url: str | None = None,
        api_key_env: str | None = None,
        max_context: int = 128_000,
        max_output: int = 16_384,
        max_running: int = 16,
        omit: Sequence[str] = (),
        extra: Mapping[str, object] | None = None,
        timeout: float = 600.0,
    ) -> None:
        super().__init__()
        self._api = APIS[api](model, base_url, api_key_env, omit, extra or {}, timeout)
        self._format = HostedFormat(tokenizer)
        self.tokenizer, self.max_context = tokenizer, max_context
        self.eos_ids = frozenset({tokenizer.convert_tokens_to_ids(END)})
        self.facts = EngineFacts(
            tokenizer, max_context, self.eos_ids, len(tokenizer), text_only=True, max_output=max_output,
            cannot_score="a hosted model reads and writes text, not ids",
        )  # fmt: skip
        self._max_running, self._closed = max_running, False
        self._running = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Any = None
        self._failures = 0  # in a row
        self._not_before = 0.0  # when the API may be asked again, on the loop's clock

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Ask at once (not at the first ``anext``); see the protocol."""
        if self._closed:
            raise EngineError("the chat engine is closed; build another")
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the client and its connections belong to one
            self._loop, self._client, self._not_before = loop, self._api.client(), 0.0
            self._slots = asyncio.Semaphore(self._max_running)
        return super().generate(requests)

    async def _answer(self, request: Request, stream: ChunkStream) -> Chunk:
        """Return the last chunk of a request, whatever happens."""
        try:
            async with self._slots:
                return await self._answered(request, stream)
        except Exception as error:  # of a client, or of a server that answers otherwise than its API says
            return self._failed(request.request_id, self._api.failure(error))

    async def _answered(self, request: Request, stream: ChunkStream) -> Chunk:
        """Return the one chunk of a request."""
        name = request.request_id
        try:
            messages, tools = self._format.read(request.ids)
            body = self._api.body(messages, tools, request.sampling)
        except (ValueError, EngineError) as error:
            return self._failed(name, NoAnswer(f"RequestRefused: {error}"))
        assert self._loop is not None
        while (wait := self._not_before - self._loop.time()) > 0:  # noqa: ASYNC110  # it is a time, and may move on
            await asyncio.sleep(wait)
        stream.put(Chunk(name))
        self._running += 1
        try:
            answer = await self._api.ask(self._client, body)
        finally:
            self._running -= 1
        if isinstance(answer, NoAnswer):
            return self._failed(name, answer)
        self._failures = 0
        return self._chunk(request, answer)

    def _chunk(self, request: Request, answer: ChatAnswer) -> Chunk:
        text = answer.text.encode("utf-8", "replace").decode()  # JSON can hold halves of characters
        ids = self._format.write(text, answer.calls, ended=answer.finish_reason == FinishReason.STOP)
        usage = answer.usage or Usage(len(request.ids), min(len(ids), request.sampling.max_tokens))
        return Chunk(
            request.request_id, ids, as_logprobs([0.0] * len(ids)), finish_reason=answer.finish_reason,
            cached_tokens=usage.cached, replica=answer.model, usage=usage,
        )  # fmt: skip

    def _failed(self, name: str, failure: NoAnswer) -> Chunk:
        """Return the last chunk of a request that failed; the API is left alone for as long as it wants."""
        if failure.again and self._loop is not None:
            wait = failure.retry_after
            wait = min(PAUSE * 2**self._failures, LONGEST_PAUSE) if wait is None else wait
            self._failures += 1
            self._not_before = max(self._not_before, self._loop.time() + wait)
        return Chunk(name, finish_reason=FinishReason.ABORT, error=failure.error)

    def load(self) -> Load:
        """Return how many requests the API has, and how many wait."""
        return Load(running=self._running, waiting=len(self._tasks) - self._running)

    async def aclose(self) -> None:
        """End everything with "abort"."""
        self._closed = True
        tasks = list(self._tasks.values())
        self._abort(list(self._tasks))
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.close()
