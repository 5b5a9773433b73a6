"""The server that foreign agents speak to: one for each event loop, on the loopback interface.

Invariants: a key opens the one visit that it was made for, while that visit lasts; a body is at most
:data:`MOST_BYTES` long; no file is read and no address is asked for anybody. A caller that goes away ends its call, and
what was sampled for it until then is recorded.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from weakref import WeakKeyDictionary

from aiohttp import web

from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.states.external.agent_histories import AgentHistories
from fsm_rollout.states.external.chat_request import ChatReply, ChatRequest, ProtocolError
from fsm_rollout.states.external.responding import (
    DIALECTS,
    Answer,
    Exchange,
    Handler,
    Parts,
    chat_of,
    dialect_of,
    in_words,
    key_of_caller,
    listening_at,
    models_response,
    respond,
)
from fsm_rollout.states.external.text_stream import TextStream

MOST_BYTES = 32 * 2**20  # the longest body of a call

_gateways: WeakKeyDictionary[asyncio.AbstractEventLoop, Gateway] = WeakKeyDictionary()


class AgentSession:
    """One visit as its foreign agent sees it."""

    def __init__(self, histories: AgentHistories, model: str) -> None:
        self.histories, self.model = histories, model
        self.tasks: set[asyncio.Task[object]] = set()  # the calls under way


class Gateway:
    """Routes calls to visits by their keys."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._listening: AbstractAsyncContextManager[str] | None = None
        self._starting = asyncio.Lock()
        self.url = ""

    @asynccontextmanager
    async def session(self, session: AgentSession) -> AsyncIterator[tuple[str, str]]:
        """Serve a visit; yield the server's address and the visit's key. Calls that are left are ended with it."""
        async with self._starting:
            if self._listening is None:
                await self._start()
        key = f"fsm-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        try:
            yield self.url, key
        finally:
            del self._sessions[key]
            for task in session.tasks:
                task.cancel()
            if session.tasks:
                await asyncio.wait(session.tasks)
            if not self._sessions:
                await self._stop()

    async def _start(self) -> None:
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._guard])
        for path in DIALECTS:
            app.router.add_post(path, self._chat)
        app.router.add_get("/v1/models", self._models)
        listening = listening_at(app, "127.0.0.1", 0, 1.0)
        self.url = await listening.__aenter__()
        self._listening = listening  # only now: where it could not, or was cancelled, the next visit begins anew

    async def _stop(self) -> None:
        async with self._starting:
            if self._listening is not None and not self._sessions:
                listening, self._listening = self._listening, None
                await listening.__aexit__(None, None, None)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in who has the key of a visit, for as long as that lasts."""

        async def within(request: web.Request) -> web.StreamResponse:
            if (session := self._sessions.get(key_of_caller(request))) is None:
                raise ProtocolError(401, "invalid_api_key", "no such key; it is that of one visit, while it lasts")
            task = asyncio.current_task()
            assert task is not None
            session.tasks.add(task)
            try:
                return await handler(request)
            finally:
                session.tasks.discard(task)

        return await in_words(request, within)

    async def _models(self, request: web.Request) -> web.Response:
        session = self._sessions[key_of_caller(request)]
        return models_response([session.model], [session.model] if session.histories.sees else [])

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        dialect = dialect_of(request.path)
        histories, chat = self._sessions[key_of_caller(request)].histories, await chat_of(request, dialect)
        return await respond(request, dialect, chat, _parts(histories, chat))


async def _parts(histories: AgentHistories, chat: ChatRequest) -> Parts:
    """Yield an answer as it comes."""
    if chat.counts:
        yield Answer(ChatReply.of_count(chat, await histories.count(chat)))
        return
    if not chat.stream:
        yield await histories.answer(chat)
        return
    exchange, streams = Exchange(chat), list[TextStream]()

    def on_tokens(pending: PendingRequest) -> None:
        if not streams:
            streams.append(histories.text_stream(pending, chat.sampling.stop or ()))
        if streams[0].new(pending):
            exchange.show(streams[0].shown, streams[0].thought)

    async def work() -> None:
        try:
            exchange.end(await histories.answer(chat, on_tokens))
        except Exception as error:  # whatever it is, the caller's request has it
            exchange.end(error)

    task = asyncio.create_task(work())
    try:
        async with aclosing(exchange.parts()) as parts:
            async for part in parts:
                yield part
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def gateway() -> Gateway:
    """Return the gateway of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _gateways:
        _gateways[loop] = Gateway()
    return _gateways[loop]
