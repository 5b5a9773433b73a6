"""A server behind the engine protocol; one URL is one engine.

Invariant: a thread of its own talks to the server (:mod:`fsm_rollout.engines.http.link`), so the engine can be used
from any event loop. What cannot be reached, or answers but not as such a server does, fails with an EngineError that
has the URL. A server that is lost is the end of the engine (:attr:`HTTPEngine.failure`): its owner builds another.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from fsm_rollout.concurrency.cancellation import wait_for
from fsm_rollout.engines.http.endpoint import Endpoint
from fsm_rollout.engines.http.link import OwnProcess, ServerLink
from fsm_rollout.engines.protocol import Chunk, EngineFacts, Load, Request, Weights, basic_facts
from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import config_number, load_tokenizer, stop_tokens_in

T = TypeVar("T")


class HTTPEngine:
    """The engine for a server; the kinds differ in how they come to its endpoint.

    Args:
        folder: the model's, for its tokenizer and what its configuration says.
    """

    _endpoint: Endpoint

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tokenizer = load_tokenizer(folder)  # that of the model folder
        # The stop tokens that the model's generation config names.
        self.eos_ids = stop_tokens_in(folder, self.tokenizer)
        self.vocabulary = config_number(folder, "vocab_size")
        self._closed = False

    def _connect(self, endpoint: Endpoint, replica: str | None, process: OwnProcess | None = None) -> None:
        """Begin to speak to the server, ``process`` is that of one that is ours alone."""
        self._endpoint = endpoint
        name = endpoint.url if replica is None else replica
        self._link = ServerLink(endpoint, name, self.vocabulary, process)
        # Also runs at the interpreter's exit, before daemon threads are frozen wherever they are.
        self._stop = weakref.finalize(self, self._link.stop)

    def _meet(self, meeting: Coroutine[object, object, T]) -> T:
        """Learn what the server is; without that there is no engine."""
        try:
            return wait_for(self._link.do(meeting))
        except BaseException:
            self._stop()
            raise

    @property
    def facts(self) -> EngineFacts:
        """What the model is."""
        return basic_facts(self, self._endpoint.processor, cannot_score="", no_grammar=self._endpoint.no_grammar)

    @property
    def max_context(self) -> int:
        """The longest input plus output, in tokens."""
        return self._endpoint.max_context

    @property
    def weight_version(self) -> int:
        """The server's own number for its weights if it says one, else how many updates went through here."""
        return self._link.version

    @property
    def failure(self) -> EngineError | None:
        """Why the server, or our trust in it, is gone; only another engine can go on then."""
        return self._link.failure

    @property
    def wire_bytes(self) -> int:
        """How many bytes of requests and answers went to the server and back, without headers."""
        return self._endpoint.wire_bytes

    async def ping(self) -> None:
        """Return if the server is there; ReplicaLost if it is not."""
        await asyncio.wrap_future(self._link.do(self._link.ping()))

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Start all requests at once (not at the first ``anext``); see the protocol."""
        return aiter(self._link.submit(requests))

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests soon; what was sampled stays."""
        self._link.abandon(request_ids)

    async def update_weights(self, weights: Weights, version: int | None = None) -> int:
        """Load new weights, of which the server has heard nothing unless they have passed; see the protocol.

        Raises:
            EngineError: they cannot be right, cannot reach the server, or it refuses them. ReplicaLost: it has failed
                half-way, and the engine with it.
        """
        load = await self._endpoint.loader(weights)
        number = self.weight_version + 1 if version is None else version
        await self._step(partial(load, number), number)
        return number

    async def _step(self, work: Callable[[], Awaitable[None]], version: int | None = None) -> None:
        """Have something done of an update; its weights are of this version then, if it is the last of it."""

        async def step() -> int | None:
            await work()
            return version

        await self._order(self._link.update(step))

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._endpoint.url

    async def adopt(self, version: int, *, doubted: bool = False, adapted: bool | None = None) -> None:
        """See :class:`~fsm_rollout.scheduler.shared_servers.SharedServer`."""
        await self._step(partial(self._endpoint.adopt, version, doubted=doubted, adapted=adapted), version)

    async def pause(self) -> None:
        """Sample nothing from now on; when this returns, everything sampled has been handed over."""
        await self._order(self._link.hold("paused"))

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._order(self._link.release("paused"))

    async def sleep(self) -> None:
        """Have the server give memory back until :meth:`wake`; EngineError while requests run and it is not paused."""
        await self._order(self._link.sleep())

    async def wake(self) -> None:
        """Be ready again after :meth:`sleep`."""
        await self._order(self._link.wake())

    def load(self) -> Load:
        """Return how busy the server is with what came from here."""
        return self._link.load()

    async def aclose(self) -> None:
        """End everything with "abort" and with what it has; the server stays, unless it is ours."""
        if not self._closed:
            self._closed = True
            refusal = EngineError(f"the engine for {self._endpoint.url} is closed; build another")
            await asyncio.wrap_future(self._link.do(self._link.close(refusal)))
        await asyncio.to_thread(self._stop)

    async def _order(self, order: Coroutine[object, object, None]) -> None:
        if self._link.failure is not None:
            order.close()
            raise self._link.failure
        await asyncio.wrap_future(self._link.do(order))
