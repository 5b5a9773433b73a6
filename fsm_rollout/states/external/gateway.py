"""The server that foreign agents speak to: one for each event loop, on the loopback interface.

Invariants: a key opens the one visit that it was made for, while that visit lasts; a body is at most
:data:`MOST_BYTES` long; no file is read and no address is asked for anybody. A caller that goes away ends its call, and
what was sampled for it until then is recorded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from weakref import WeakKeyDictionary

from aiohttp import web

from fsm_rollout.states.external.chat_request import ChatRequest, ProtocolError, refuse
from fsm_rollout.states.external.conversations import Answer, Conversations
from fsm_rollout.states.external.text_stream import TextStream

logger = logging.getLogger(__name__)

MOST_BYTES = 32 * 2**20
"""The longest body of a call."""
SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

_gateways: WeakKeyDictionary[asyncio.AbstractEventLoop, Gateway] = WeakKeyDictionary()


class Session:
    """One visit as its foreign agent sees it."""

    def __init__(self, conversations: Conversations, dialect: ModuleType, model: str) -> None:
        self.conversations, self.dialect, self.model = conversations, dialect, model
        self.tasks: set[asyncio.Task[object]] = set()
        """The calls under way."""


class Gateway:
    """Routes calls to visits by their keys."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self.url = ""

    @asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """Serve a visit; yield the server's address and the visit's key. Calls that are left are ended with it."""
        async with self._starting:
            if self._runner is None:
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
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        host, port = runner.addresses[0][:2]
        self._runner, self.url = runner, f"http://{host}:{port}"

    async def _stop(self) -> None:
        async with self._starting:
            if self._runner is not None and not self._sessions:
                runner, self._runner = self._runner, None
                await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        """Answer one HTTP request; what is wrong with it is said in the words of the session's protocol."""
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        session = self._sessions.get(key)
        if session is None:
            error = {"message": "no such key; it is that of one visit, while it lasts", "type": "authentication_error"}
            return web.json_response({"type": "error", "error": error | {"code": "invalid_api_key"}}, status=401)
        task = asyncio.current_task()
        assert task is not None
        session.tasks.add(task)
        try:
            return await self._call(request, session)
        except ProtocolError as error:
            return failed(session.dialect, error)
        except (web.HTTPException, ConnectionError):
            raise
        except Exception as error:
            logger.exception("a call of a foreign agent could not be answered")
            told = f"the call could not be answered: {type(error).__name__}: {error}"
            return failed(session.dialect, ProtocolError(500, "internal_error", told))
        finally:
            session.tasks.discard(task)

    async def _call(self, request: web.Request, session: Session) -> web.StreamResponse:
        from fsm_rollout.states.external import openai_dialect

        if request.path == "/v1/models" and request.method == "GET":
            return web.Response(body=openai_dialect.models([session.model]), content_type="application/json")
        if request.path != session.dialect.PATH or request.method != "POST":
            told = f"there is no {request.method} {request.path} here; there is POST {session.dialect.PATH}"
            raise ProtocolError(404, "not_found", told)
        chat = session.dialect.read(await body_of(request))
        if not chat.stream:
            answer = await session.conversations.answer(chat)
            response = web.Response(body=session.dialect.whole(answer.reply), content_type="application/json")
            await response.prepare(request)
            await response.write_eof()
            answer.delivered()
            return response
        return await stream_answer(request, session, chat)


async def stream_answer(request: web.Request, session: Session, chat: ChatRequest) -> web.StreamResponse:
    """Answer by server-sent events, as the tokens come."""
    conversations, dialect = session.conversations, session.dialect
    arrived = asyncio.Event()
    texts: list[str] = []
    streams: list[TextStream] = []

    def on_tokens(pending: object) -> None:
        if not streams:
            streams.append(TextStream(conversations.ctx.context(pending.request.context)))  # type: ignore[attr-defined]
        if new := streams[0].new(pending):  # type: ignore[arg-type]
            texts.append(new)
            arrived.set()

    work: asyncio.Task[Answer] = asyncio.create_task(conversations.answer(chat, on_tokens))
    work.add_done_callback(lambda _: arrived.set())
    response = web.StreamResponse(headers=SSE)
    streamed = dialect.Streamed(f"chatcmpl-{secrets.token_hex(8)}", chat)
    try:
        # 1. What is refused at once is an error like any other; so is what fails before there is any text.
        await arrived.wait()
        if work.done() and not texts:
            work.result()
        await response.prepare(request)
        await _write(response, streamed.begin())
        # 2. The text, as far as it can be shown.
        while True:
            arrived.clear()
            while texts:
                await _write(response, streamed.text(texts.pop(0)))
            if work.done():
                break
            await arrived.wait()
        # 3. The rest, and the calls.
        try:
            answer = work.result()
        except ProtocolError as error:
            await _write(response, streamed.failed(error))
            return response
        if rest := streams[0].rest(answer.reply.text) if streams else answer.reply.text:
            await _write(response, streamed.text(rest))
        await _write(response, streamed.end(answer.reply))
        await response.write_eof()
        answer.delivered()
        return response
    except BaseException:
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
        raise


async def _write(response: web.StreamResponse, pieces: object) -> None:
    await response.write(b"".join(pieces))  # type: ignore[arg-type]  # an iterator of bytes


async def body_of(request: web.Request) -> dict[str, object]:
    """Return a request's body, or raise ProtocolError for one that is no JSON object or too long."""
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise ProtocolError(413, "body_too_large", f"the body is longer than {MOST_BYTES:,} bytes") from None
    except (ValueError, RecursionError) as error:
        raise refuse(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise refuse(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def failed(dialect: ModuleType, error: ProtocolError) -> web.Response:
    """Return an error as the protocol has it."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    body = dialect.failure(error)
    return web.Response(status=error.status, body=body, content_type="application/json", headers=headers)


def gateway() -> Gateway:
    """Return the gateway of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _gateways:
        _gateways[loop] = Gateway()
    return _gateways[loop]
