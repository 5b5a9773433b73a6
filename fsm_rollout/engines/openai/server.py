"""What is asked of a server with OpenAI's ``/v1/completions``, and what its answers mean.

Invariant: tokens are ids both ways. A server that answers with text only is refused, with the reason; text is never
encoded again. Closing the connection ends a request, which is how servers of this protocol are told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from enum import StrEnum
from http import HTTPStatus

import aiohttp
import msgspec

from fsm_rollout.engines.sglang.server import Finish, Meta, Server, shown
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason


class LogprobsOf(StrEnum):
    """What distribution a server's logprobs are of; found out by asking it."""

    MODEL = "model"
    """The model's own, before temperature, top_k and top_p (vLLM's default)."""
    TEMPERATURE = "temperature"
    """After temperature, before top_k and top_p (SGLang's)."""
    SAMPLER = "sampler"
    """The one sampled from (vLLM's ``--logprobs-mode processed_logprobs``)."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Event(msgspec.Struct):
    """One line of an answer."""

    choices: list[_Choice] = []
    error: dict[str, object] | str | None = None


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


_encode = msgspec.json.Encoder().encode
_decode_event = msgspec.json.Decoder(_Event).decode


class CompletionsServer(Server):
    """One server; belongs to one event loop, whose thread must close it."""

    name, kind, described = "the server", "server", "a server of OpenAI's protocol"
    health = "/v1/models"

    def __init__(self, url: str, model: str | None, api_key: str | None = None) -> None:
        super().__init__(url.rstrip("/").removesuffix("/v1"), 1, api_key)
        self.model = model or ""  # what the server calls its model
        self._tasks: dict[str, asyncio.Task[object]] = {}  # the tasks that read answers, by request
        self._ended: set[str] = set()  # the requests that were told to end

    async def ask_model(self) -> int | None:
        """Find the model among those that the server has, and return the longest input plus output, if it says that.

        Raises:
            EngineError: it is not there, or has several models and none was named.
        """
        cards = self._read("/v1/models", await self.call("/v1/models"), _Models).data
        names = [card.id for card in cards]
        if not self.model and len(cards) == 1:
            self.model = names[0]
        if self.model not in names:
            wanted = f"has no model '{self.model}'" if self.model else "has several models, so name one by `served_as`"
            raise EngineError(f"{self.url} {wanted}; it has {', '.join(names) or 'none'}")
        return cards[names.index(self.model)].max_model_len

    async def abort(self, rid: str) -> None:
        """End a request: the connection is closed."""
        if (task := self._tasks.get(rid)) is not None and rid not in self._ended:
            self._ended.add(rid)
            task.cancel()

    async def stream(self, body: Mapping[str, object]) -> AsyncIterator[tuple[list[int], Meta]]:
        """Generate, and yield what is new and what is said about it; the last one has a ``finish_reason``.

        ``rid`` is ours, and is not sent.
        """
        rid = str(body["rid"])
        task = asyncio.current_task()
        assert task is not None
        self._tasks[rid] = task
        try:
            async for piece in self._completion({key: value for key, value in body.items() if key != "rid"}):
                yield piece
        except asyncio.CancelledError:
            if rid not in self._ended:
                raise
            task.uncancel()
            yield [], Meta(0, Finish(FinishReason.ABORT))
        finally:
            del self._tasks[rid]
            self._ended.discard(rid)

    async def _completion(self, body: Mapping[str, object]) -> AsyncIterator[tuple[list[int], Meta]]:
        total, finished = 0, False
        path = "/v1/completions"
        try:
            async with self._client.post(self.url + path, data=_encode(body)) as answer:
                if answer.status >= HTTPStatus.BAD_REQUEST:
                    refused = answer.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
                    kind = ValueError if refused else EngineError
                    raise kind(f"{self.url}{path} answered {answer.status}: {shown(await answer.read())}")
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    for choice in self._choices(line[6:]):
                        ids, logprobs = self._tokens(choice, line)
                        total += len(ids)
                        finished = choice.finish_reason is not None
                        yield (
                            ids,
                            Meta(
                                total,
                                Finish(choice.finish_reason) if choice.finish_reason is not None else None,
                                output_token_logprobs=[(p, i, None) for p, i in zip(logprobs, ids, strict=True)],
                            ),
                        )
                        if finished:
                            return
        except (aiohttp.ClientError, OSError) as error:
            raise self.gone(error) from None
        raise self.gone(EOFError("the answer broke off"))

    def _choices(self, text: bytes) -> Iterable[_Choice]:
        try:
            event = _decode_event(text)
        except msgspec.MsgspecError as error:
            raise EngineError(
                f"{self.url}/v1/completions does not answer as OpenAI's protocol says ({error}): {shown(text)}"
            ) from None
        if event.error is not None:
            raise ValueError(event.error if isinstance(event.error, str) else event.error.get("message", event.error))
        return event.choices

    def _tokens(self, choice: _Choice, line: bytes) -> tuple[list[int], list[float]]:
        """Return a choice's ids with their logprobs, or refuse what has text instead."""
        ids = choice.token_ids
        if ids is None:
            raise EngineError(
                f"{self.url} answers with text only: there are no `token_ids` in its answer, though "
                f"`return_token_ids` was asked for. Training needs the sampled ids; text encoded again gives others. "
                f"vLLM (from 0.10.2) and SGLang give them; its answer was {shown(line)}"
            )
        logprobs = [value for value in (choice.logprobs.token_logprobs if choice.logprobs else []) if value is not None]
        if len(logprobs) != len(ids):
            raise EngineError(
                f"{self.url} sent {len(ids)} tokens with {len(logprobs)} logprobs; `logprobs` was asked for, and each "
                f"token needs one"
            )
        return ids, logprobs
