"""The HTTP side: routes, keys, limits, and errors in each protocol's own words.

Invariant: no file but the page's three is read, and none for a path that a caller names; without the right key nothing
is answered but the page and ``/health``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from importlib.resources import files

from aiohttp import web

from fsm_rollout.diagrams.palette import css_variables
from fsm_rollout.serve.guarded import Guarded, digest_of
from fsm_rollout.serve.metrics import CONTENT_TYPE
from fsm_rollout.serve.service import Service
from fsm_rollout.states.external.chat_request import ChatReply, ProtocolError
from fsm_rollout.states.external.responding import (
    DIALECTS,
    chat_of,
    dialect_of,
    key_of_caller,
    models_response,
    respond,
)
from fsm_rollout.trajectory.journal import Recorded

# The chat page.
PAGE = {
    "/": ("chat.html", "text/html"),
    "/chat.css": ("chat.css", "text/css"),
    "/chat.js": ("chat.js", "text/javascript"),
}
# Sent with the page: it runs its own script alone, and speaks to this server alone.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Server(Guarded):
    """Answers HTTP requests from a service."""

    open_paths = frozenset({*PAGE, "/health"})

    def __init__(self, service: Service, keys: frozenset[str]) -> None:
        super().__init__(service.serving, keys)
        self.service = service
        package = files("fsm_rollout.serve") / "page"
        self._page = {path: ((package / name).read_text("utf-8"), kind) for path, (name, kind) in PAGE.items()}
        states = dict.fromkeys(state for graph in service.models.values() for state in graph.states)
        css, kind = self._page["/chat.css"]
        self._page["/chat.css"] = css_variables(tuple(states)) + css, kind

    def app(self) -> web.Application:
        """See there."""
        app = super().app()
        for path in DIALECTS:
            dialect_of(path)  # so that nobody waits for it to be loaded
            app.router.add_post(path, self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        for path in self._page:
            app.router.add_get(path, self._asset)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        service, metrics, dialect = self.service, self.service.metrics, dialect_of(request.path)
        agent, status = "", 500
        try:
            chat = await chat_of(request, dialect)
            if chat.counts:
                told, status = ChatReply.of_count(chat, await service.count(chat)), 200
                return web.json_response(dialect.whole(told, chat))
            exchange = service.ask(chat, digest_of(key_of_caller(request)) if self._callers else "")
            agent = chat.model
            response = await respond(request, dialect, exchange.chat, exchange.parts(lambda: service.leave(exchange)))
            status = exchange.ending.status if isinstance(exchange.ending, ProtocolError) else response.status
            metrics.seconds.labels(agent).observe(exchange.seconds)
            return response
        except ProtocolError as error:
            status = error.status
            raise
        except (ConnectionError, asyncio.CancelledError):
            status = 499  # the caller has gone
            raise
        finally:
            metrics.answers.labels(agent, DIALECTS[request.path][0], str(status)).inc()

    async def _models(self, request: web.Request) -> web.Response:
        return models_response(self.service.models, self.service.seeing)

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
    running, server = asyncio.create_task(service.run(recorded)), Server(service, keys)
    try:
        async with server.listening() as url:
            try:
                yield url, running
            finally:
                service.close()
    finally:
        service.close()
        if service.serving.keep:
            running.cancel()
        await asyncio.wait({running})
