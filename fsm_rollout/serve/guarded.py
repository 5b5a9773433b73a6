"""Who is let in to a server of ours over HTTP, and how it is said that somebody is not.

Invariants: without the right key nothing is answered but what is open to all; a browser lets only this server's own
page speak to it (``Origin``), and one at a loopback address answers to loopback names alone, so that no page from
elsewhere reaches it through a name of its own; what is wrong is said in the protocol's own words.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Container
from contextlib import AbstractAsyncContextManager

from aiohttp import web

from fsm_rollout import __version__
from fsm_rollout.jobs.run_config import ServeConfig
from fsm_rollout.serve.strangers import is_loopback, stranger
from fsm_rollout.states.external.chat_request import ProtocolError
from fsm_rollout.states.external.responding import Handler, able_to_listen, in_words, key_of_caller, listening_at

SHUTDOWN_SECONDS = 5.0  # so long calls have to send their last words


def digest_of(key: str) -> str:
    """Return what stands for a key: it is compared, and it names the caller in the journal."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_free(host: str, port: int) -> None:
    """Raise ConfigError where somebody listens at an address already: before engines start, or a folder is made."""
    with able_to_listen(host, port):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)


class Guarded:
    """Lets in who may come in; ``keys`` are the callers' keys, none of which: everybody is served."""

    open_paths: Container[str] = frozenset({"/health"})  # what is answered without a key

    def __init__(self, serving: ServeConfig, keys: frozenset[str]) -> None:
        self.serving = serving
        self._callers = {digest_of(key) for key in keys}
        self._loopback = is_loopback(serving.host)

    def app(self) -> web.Application:
        """Return what answers, still without routes of its own."""
        return web.Application(client_max_size=self.serving.body_bytes, middlewares=[self._guard])

    def listening(self) -> AbstractAsyncContextManager[str]:
        """Listen; the context is the address. ConfigError if it cannot listen there."""
        app = self.app()
        app.router.add_get("/health", self._health)
        return listening_at(app, self.serving.host, self.serving.port, SHUTDOWN_SECONDS)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in who may come in, and say errors in the protocol's words."""

        async def checked(request: web.Request) -> web.StreamResponse:
            self._check(request)
            return await handler(request)

        return await in_words(request, checked)

    def _check(self, request: web.Request) -> None:
        """Raise ProtocolError for pages from elsewhere, and callers without a key."""
        if (wrong := stranger(request, self._loopback)) is not None:
            raise ProtocolError(403, *wrong)
        keyed = self._callers and request.path not in self.open_paths
        if keyed and digest_of(key_of_caller(request)) not in self._callers:
            raise ProtocolError(401, "invalid_api_key", "send one of the server's API keys")

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "version": __version__})
