"""Answering chat calls over HTTP: bodies in, replies and streams of server-sent events out, in the caller's protocol.

Invariants: a body is bounded in length; what is wrong is said in the protocol's own words, as long as nothing has been
answered yet also by its status. A caller that goes away ends the work on its answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, cast

import msgspec
from aiohttp import web

from fsm_rollout.errors import ConfigError
from fsm_rollout.states.external.chat_request import ChatReply, ChatRequest, ProtocolError, Said, refuse
from fsm_rollout.states.external.origins import origin_of

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_pictures = re.compile(b"base64").search  # three times as fast as `in`, and each body is searched
BACKLOG = 1024  # callers that come at once; those beyond are let wait by the kernel for seconds, and some give up
SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


@dataclass(slots=True)
class Answer:
    """What a call is answered with."""

    reply: ChatReply
    delivered: Callable[[], object] = lambda: None  # to be called when the caller has it


class Thought(str):
    """A piece of what the model thinks before it speaks."""

    __slots__ = ()


# An answer as it comes: pieces of what is thought and of the text, notes for those who asked, and at the end the whole.
Parts = AsyncGenerator["str | Mapping[str, object] | Answer", None]


class Exchange:
    """One request and its answer, as it comes: pieces of text that make up the whole, and exactly one end.

    ``on_first`` is called with the seconds until the first piece of text.
    """

    def __init__(self, chat: ChatRequest, on_first: Callable[[float], object] = lambda seconds: None) -> None:
        self.chat = chat
        self.begun_at = asyncio.get_running_loop().time()
        self.ending: Answer | Exception | None = None  # how it has ended
        self._shown = self._thought = ""
        self._on_first = on_first
        self._parts: deque[str | Mapping[str, object]] = deque()
        self._changed = asyncio.Event()

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return asyncio.get_running_loop().time() - self.begun_at

    def show(self, text: str, thought: str = "") -> None:
        """Send what was not sent of the thought and the text so far; they may not change what was."""
        if len(thought) > len(self._thought) and thought.startswith(self._thought) and not self._shown:
            self._send(Thought(thought[len(self._thought) :]))
            self._thought = thought
        if len(text) > len(self._shown) and text.startswith(self._shown):
            self._send(text[len(self._shown) :])
            self._shown = text

    def _send(self, piece: str) -> None:
        if not (self._shown or self._thought):
            self._on_first(self.seconds)
        if self._parts and type(self._parts[-1]) is (kind := type(piece)):  # not read yet: one event is enough
            piece = kind(f"{self._parts.pop()}{piece}")
        self._parts.append(piece)
        self._changed.set()

    def note(self, **note: object) -> None:
        """Send what happens beside the text, to those who asked for it."""
        if self.chat.notes:
            self._parts.append(note)
            self._changed.set()

    def end(self, ending: Answer | Exception) -> None:
        """End it; only the first end counts."""
        if self.ending is None:
            if isinstance(ending, Answer):
                self.show(ending.reply.text, ending.reply.thought)
            self.ending = ending
            self._changed.set()

    async def parts(self, leave: Callable[[], object] = lambda: None) -> Parts:
        """Yield the answer as it comes; ``leave`` is called at the end, also where nobody reads on."""
        try:
            while True:
                self._changed.clear()
                while self._parts:
                    yield self._parts.popleft()
                if isinstance(self.ending, Exception):
                    raise self.ending
                if self.ending is not None:
                    yield self.ending
                    return
                await self._changed.wait()
        finally:
            leave()


async def respond(request: web.Request, dialect: ModuleType, chat: ChatRequest, parts: Parts) -> web.StreamResponse:
    """Answer a call, whole or by server-sent events; ProtocolError if there is no answer, and nothing was sent."""
    async with aclosing(parts):
        # 1. Whole.
        if not chat.stream:
            async for part in parts:
                if isinstance(part, Answer):
                    response = web.json_response(dialect.whole(part.reply, chat))
                    await response.prepare(request)
                    await response.write_eof()
                    part.delivered()
            return response
        # 2. As it comes. What fails before the first piece is an error like any other.
        part = await anext(parts)
        stream, streamed = web.StreamResponse(headers=SSE), dialect.EVENTS(chat)
        await stream.prepare(request)
        begun: Iterator[Said] = streamed.begin()  # goes out with what comes first
        try:
            while not isinstance(part, Answer):
                await stream.write(_sse(*begun, *_streamed(streamed, part)))
                part = await anext(parts)
        except ConnectionError:
            raise  # the caller has gone
        except Exception as error:  # the status has been sent
            await stream.write(_sse(*begun, *streamed.failed(_told(request, error))))
            return stream
        # 3. The calls, and the end.
        await stream.write(_sse(*begun, *streamed.end(part.reply)) + streamed.last)
        await stream.write_eof()
        part.delivered()
        return stream


def _streamed(events: Any, part: str | Mapping[str, object]) -> Iterator[Said]:
    """Return the events of a part."""
    if isinstance(part, str):
        return cast(Iterator[Said], events.thought(part) if isinstance(part, Thought) else events.text(part))
    return cast(Iterator[Said], events.note(part))


def _sse(*events: Said) -> bytes:
    """Return events as they are sent; named by their types, in protocols where they have one."""
    # Not by msgspec: texts may be no valid Unicode.
    named = ((f"event: {event['type']}\n" if "type" in event else "", json.dumps(event)) for event in events)
    return "".join(f"{name}data: {data}\n\n" for name, data in named).encode()


def models_response(names: Iterable[str], seeing: Container[str]) -> web.Response:
    """Return the list of models, and which of them see pictures."""
    from fsm_rollout.states.external import openai_dialect

    return web.json_response(openai_dialect.models(names, seeing))


def key_of_caller(request: web.Request) -> str:
    """Return the key that a request comes with, in either protocol's header; empty without one."""
    return request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")


async def body_of(request: web.Request) -> dict[str, object]:
    """Return a request's body, or raise ProtocolError for one that is no JSON object or too long."""
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise ProtocolError(413, "body_too_large", f"the body is too long: {error.text}") from None
    try:
        try:
            body = msgspec.json.decode(raw)
        except (msgspec.DecodeError, ValueError):  # halves of characters, other encodings; or it is wrong
            body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise refuse(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise refuse(f"the body must be a JSON object, got {type(body).__name__}")
    return body


# The paths that are answered: the protocol of each, whose module is loaded when somebody asks there, and what of that
# reads a body.
DIALECTS = {
    "/v1/chat/completions": ("openai", "read"),
    "/v1/responses": ("responses", "read"),
    "/v1/responses/compact": ("responses", "read_compaction"),
    "/v1/messages": ("anthropic", "read"),
    "/v1/messages/count_tokens": ("anthropic", "read_count"),
}


def dialect_of(path: str) -> ModuleType:
    """Return the protocol of a path; OpenAI's for those that are of none."""
    name, _ = DIALECTS.get(path, ("openai", ""))
    return import_module(f"fsm_rollout.states.external.{name}_dialect")


async def chat_of(request: web.Request, dialect: ModuleType) -> ChatRequest:
    """Return what a request asks for, or raise ProtocolError for one that is not as its protocol has it."""
    body = await body_of(request)
    try:
        read = getattr(dialect, DIALECTS[request.path][1])
        if _pictures(await request.read()):  # which are decoded in a thread
            chat = await asyncio.to_thread(read, body)
        else:
            chat = read(body)
    # Something in it is of another kind, or missing, or has a picture in a picture in a picture.
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise refuse(f"the body is not as the protocol has it: {type(error).__name__}: {error}") from None
    chat.origin = origin_of(request.headers)
    return cast(ChatRequest, chat)


def _told(request: web.Request, error: Exception) -> ProtocolError:
    """Return what a caller is told of an error; one that is not meant for callers is logged."""
    if isinstance(error, ProtocolError):
        return error
    logger.error("%s %s could not be answered", request.method, request.path, exc_info=error)
    return ProtocolError(500, "internal_error", f"the request could not be answered: {type(error).__name__}")


async def in_words(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return what a request is answered with; what is wrong is said in the words of its path's protocol."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except web.HTTPException as error:
        headers |= {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        message = f"{request.method} {request.path}: {error.reason}"
        if error.status in (404, 405):
            routes = (route for route in request.app.router.routes() if route.resource and route.method != "HEAD")
            paths = [f"{route.method} {route.resource.canonical}" for route in routes if route.resource]
            message += f"; there is {', '.join(paths)}"
        told = ProtocolError(error.status, str(error.reason).lower().replace(" ", "_"), message)
        if request.headers.get("Upgrade", "").lower() == "websocket":  # told so, a client falls back to HTTP
            told = ProtocolError(
                426, "websocket_not_supported", "there are no WebSockets here; send the request by POST"
            )
    except ConnectionError:
        raise  # the caller has gone
    except Exception as error:
        told = _told(request, error)
    if told.retry_after is not None:
        headers["Retry-After"] = str(told.retry_after)
    return web.json_response(dialect_of(request.path).failure(told), status=told.status, headers=headers)


@contextmanager
def able_to_listen(host: str, port: int) -> Iterator[None]:
    """Raise ConfigError where the block finds that it cannot listen at an address."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        hint = "; choose another --port" if port else ""
        raise ConfigError(f"cannot listen at {host}:{port}: {why}{hint}") from error


@asynccontextmanager
async def listening_at(app: web.Application, host: str, port: int, shutdown_seconds: float) -> AsyncIterator[str]:
    """Listen, and yield the address; ConfigError if it cannot listen there. Long calls have so long to end."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_seconds)
    try:
        await runner.setup()
        with able_to_listen(host, port):
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
