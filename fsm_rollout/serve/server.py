"""The HTTP side: routes, keys, limits, and errors in each protocol's own words.

Invariants: no file but the page's three is read, and none for a path that a caller names; without the right key nothing
is answered but the page and ``/health``; a browser lets only this server's own page speak to it (``Origin``), and one
at a loopback address answers to loopback names alone, so that no page from elsewhere reaches it through a name of its
own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from importlib.resources import files
from types import ModuleType

from aiohttp import web

from fsm_rollout import __version__
from fsm_rollout.diagrams.palette import css_variables
from fsm_rollout.errors import ConfigError
from fsm_rollout.serve.metrics import CONTENT_TYPE
from fsm_rollout.serve.service import Service
from fsm_rollout.serve.strangers import is_loopback, stranger
from fsm_rollout.states.external import openai_dialect
from fsm_rollout.states.external.chat_request import ChatReply, ProtocolError
from fsm_rollout.states.external.responding import (
    DIALECTS,
    chat_of,
    dialect_of,
    failed,
    key_of_caller,
    named_response,
    refuse_upgrade,
    respond,
)
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.journal import Recorded

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# The chat page.
PAGE = {
    "/": ("chat.html", "text/html"),
    "/chat.css": ("chat.css", "text/css"),
    "/chat.js": ("chat.js", "text/javascript"),
}
OPEN = frozenset({*PAGE, "/health"})  # what is answered without a key
# Sent with the page: it runs its own script alone, and speaks to this server alone.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
SHUTDOWN_SECONDS = 5.0  # so long calls have to send their last words


def digest_of(key: str) -> str:
    """Return what stands for a key: it is compared, and it names the caller in the journal."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Server:
    """Answers HTTP requests from a service; ``keys`` are the callers' keys, none of which: everybody is served."""

    def __init__(self, service: Service, keys: frozenset[str]) -> None:
        self.service = service
        self._callers = {digest_of(key) for key in keys}
        self._loopback = is_loopback(service.serving.host)
        package = files("fsm_rollout.serve") / "page"
        self._page = {path: ((package / name).read_text("utf-8"), kind) for path, (name, kind) in PAGE.items()}
        states = dict.fromkeys(state for graph in service.models.values() for state in graph.states)
        css, kind = self._page["/chat.css"]
        self._page["/chat.css"] = css_variables(tuple(states)) + css, kind

    def runner(self) -> web.AppRunner:
        """Return what serves it."""
        app = web.Application(client_max_size=self.service.serving.body_bytes, middlewares=[self._guard])
        for path in DIALECTS:
            app.router.add_post(path, self._chat(dialect_of(path)))
        for path, handler in (
            ("/v1/models", self._models), ("/health", self._health), ("/metrics", self._metrics),
            ("/v1/responses/{id}", self._again),
        ):  # fmt: skip
            app.router.add_get(path, handler)
        for path in self._page:
            app.router.add_get(path, self._asset)
        return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in who may come in, and say errors in the protocol's words."""
        dialect = dialect_of(request.path)
        try:
            self._check(request)
            refuse_upgrade(request)
            return await handler(request)
        except ProtocolError as error:
            return failed(dialect, error)
        except web.HTTPException as error:
            message = f"{request.method} {request.path}: {error.reason}"
            if error.status in (404, 405):
                message += f"; there is {', '.join(self._paths(request.app))}"
            return failed(dialect, ProtocolError(error.status, str(error.reason).lower().replace(" ", "_"), message))
        except (ConnectionError, OSError):
            raise  # the caller has gone
        except Exception as error:
            logger.exception("%s %s could not be answered", request.method, request.path)
            message = f"the request could not be answered: {type(error).__name__}"
            return failed(dialect, ProtocolError(500, "internal_error", message))

    @staticmethod
    def _paths(app: web.Application) -> list[str]:
        """Return what can be asked for, as ``METHOD /path``."""
        routes = (route for route in app.router.routes() if route.resource and route.method != "HEAD")
        return [f"{route.method} {route.resource.canonical}" for route in routes if route.resource]

    def _check(self, request: web.Request) -> None:
        """Raise ProtocolError for pages from elsewhere, and callers without a key."""
        if (wrong := stranger(request, self._loopback)) is not None:
            raise ProtocolError(403, *wrong)
        if self._callers and request.path not in OPEN and digest_of(key_of_caller(request)) not in self._callers:
            raise ProtocolError(401, "invalid_api_key", "send one of the server's API keys")

    def _chat(self, dialect: ModuleType) -> Handler:
        protocol = dialect.__name__.rpartition(".")[2].removesuffix("_dialect")

        async def answer(request: web.Request) -> web.StreamResponse:
            service, metrics, agent, status = self.service, self.service.metrics, "", 500
            try:
                chat = await chat_of(request, dialect)
                if chat.counts:
                    told = ChatReply(
                        chat.model,
                        {"role": "assistant", "content": ""},
                        FinishReason.STOP,
                        await service.count(chat),
                        0,
                    )
                    status = 200
                    return web.Response(body=dialect.whole(told, chat), content_type="application/json")
                caller = digest_of(key_of_caller(request)) if self._callers else ""
                exchange = service.ask(chat, caller)
                agent = chat.model
                response = await respond(
                    request, dialect, exchange.chat, exchange.parts(lambda: service.leave(exchange))
                )
                status = exchange.ending.status if isinstance(exchange.ending, ProtocolError) else response.status
                metrics.seconds.labels(agent).observe(exchange.seconds)
                return response
            except ProtocolError as error:
                status = error.status
                raise
            except BaseException:
                status = 499  # the caller has gone
                raise
            finally:
                metrics.answers.labels(agent, protocol, str(status)).inc()

        return answer

    async def _again(self, request: web.Request) -> web.Response:
        """Return an answer that the caller has had, by its name."""
        name = named_response(request) or ""
        model, message = self.service.again(digest_of(key_of_caller(request)) if self._callers else "", name)
        body = dialect_of(request.path).again(name, model, message)
        return web.Response(body=body, content_type="application/json")

    async def _models(self, request: web.Request) -> web.Response:
        body = openai_dialect.models(self.service.models, self.service.seeing)
        return web.Response(body=body, content_type="application/json")

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "version": __version__})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.service.metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    async def _asset(self, request: web.Request) -> web.Response:
        text, kind = self._page[request.path]
        return web.Response(text=text, content_type=kind, headers=HEADERS)


@asynccontextmanager
async def listening(
    service: Service, keys: frozenset[str] = frozenset(), recorded: Iterable[Recorded] = ()
) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """Serve, and yield the address and what runs the trajectories; ConfigError if it cannot listen there."""
    host, port = service.serving.host, service.serving.port
    running, runner = asyncio.create_task(service.run(recorded)), Server(service, keys).runner()
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"cannot listen at {host}:{port}: {why}; choose another --port") from error
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{runner.addresses[0][1]}", running
    finally:
        service.close()
        await runner.cleanup()
        if service.serving.keep:
            running.cancel()
        await asyncio.wait({running})
