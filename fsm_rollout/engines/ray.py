"""Replicas of a pool as Ray actors.

Invariant: an actor holds one engine and adds nothing to it but the transport: blocks of bytes
(:mod:`fsm_rollout.engines.wire`), in order, one call for all that is sent at once. The driver keeps one call open
per busy replica, which returns all its new chunks. :mod:`fsm_rollout.engines.ray_placement` says where actors are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from fsm_rollout.concurrency.ray_session import Remote, answer_to, import_ray
from fsm_rollout.concurrency.tasks import Tasks
from fsm_rollout.engines.adapters import Adapter, load_adapter
from fsm_rollout.engines.chunk_stream import ChunkStream
from fsm_rollout.engines.protocol import (
    Chunk,
    EngineFacts,
    Load,
    ReplicaLost,
    Request,
    SessionKeeper,
    TokenSource,
    facts_of,
)
from fsm_rollout.engines.replica import LocalPlacement, describe, failure_of, ping
from fsm_rollout.engines.weight_sources import load_weights
from fsm_rollout.engines.wire import Contexts, Failure, Flush, pack_flush, pack_requests, unpack_flush, unpack_requests
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason

ray = import_ray()

FAREWELL = 5.0  # seconds that an actor has to close its engine before it is killed


class ReplicaActor:
    """Runs in the actor's process, all of it on one event loop: an engine, and what it has to tell the driver."""

    def __init__(self, name: str, build: Callable[[str], TokenSource]) -> None:
        self._name = name
        self._placement = LocalPlacement(build)
        self._contexts = Contexts()
        self._next_number = 0
        self._early: dict[int, bytes | tuple[str, Sequence[str]]] = {}
        self._chunks: list[Chunk] = []
        self._failures: list[Failure] = []
        self._news = asyncio.Event()
        self._flushed = 0
        self._latest: asyncio.Task[bytes] | None = None
        self._tasks = Tasks()

    async def start(self, with_tokenizer: bool) -> tuple[EngineFacts, int]:
        """Build the engine; return its facts (without its tokenizer, where that is not wanted) and weight version."""
        engine = self._engine = await self._placement.start(self._name)
        facts = facts_of(engine)
        return facts if with_tokenizer else replace(facts, tokenizer=None), engine.weight_version

    async def node(self) -> str:
        """Return the id of the node that it is on."""
        return str(ray.get_runtime_context().get_node_id())

    async def tell(self, number: int, message: bytes | tuple[str, Sequence[str]]) -> None:
        """Take requests, or what to end, in the order of ``number``: Ray may bring a small one before a large one."""
        self._early[number] = message
        while self._next_number in self._early:
            message = self._early.pop(self._next_number)
            self._next_number += 1
            if isinstance(message, bytes):
                self._tasks.begin(self._serve(unpack_requests(message, self._contexts)))
            else:
                self._tasks.begin(self._end(*message))

    async def flush(self, received: int) -> bytes:
        """Wait until there is something to send, and return all of it.

        A caller that has not received the latest flush gets that one again: it may have been on its way to an event
        loop that is closed by now.
        """
        if self._latest is None or received == self._flushed:
            self._flushed += 1
            self._latest = asyncio.ensure_future(self._pack())
        return await asyncio.shield(self._latest)

    async def _pack(self) -> bytes:
        await self._news.wait()
        await asyncio.sleep(0)  # other callbacks of this pass of the loop add their chunks first
        self._news.clear()
        if not (self._chunks or self._failures):
            await ping(self._engine)
        block = pack_flush(Flush(self._chunks, self._failures, self._engine.load()))
        self._chunks, self._failures = [], []
        return block

    async def _serve(self, requests: Sequence[Request]) -> None:
        under_way = dict.fromkeys(request.request_id for request in requests)
        why = "the engine's answer ended without a last chunk"
        try:
            async for chunk in self._engine.generate(requests):
                if chunk.finish_reason is not None:
                    under_way.pop(chunk.request_id, None)
                self._chunks.append(chunk)
                self._news.set()
        except Exception as error:  # whatever an engine raises is the engine's failure
            why = describe(error)
        if under_way:
            if failure_of(self._engine) is None:  # else they are lost with this replica
                self._failures.append(Failure(list(under_way), why))
            self._news.set()

    async def _end(self, what: str, ids: Sequence[str]) -> None:
        """End requests ("abort") or sessions ("end_sessions")."""
        try:
            if what == "abort":
                await self._engine.abort(ids)
            elif isinstance(self._engine, SessionKeeper):
                self._engine.end_sessions(ids)
        except Exception as error:  # an engine that cannot even abort has failed these requests
            self._failures.append(Failure(list(ids), describe(error)))
            self._news.set()

    async def ping(self) -> None:
        """Answer, if the engine is there; raise :class:`ReplicaLost` if it is not."""
        await ping(self._engine)

    async def ask(self, method: str, *arguments: Any) -> None:
        """Call a method of the engine, if it has it; where the engine is gone, the error says so."""
        loads = LOADS.get(method)
        if loads is None and not hasattr(self._engine, method):
            return  # its owner cares for that
        try:
            if loads is not None:
                await loads(self._engine, *arguments)
            else:
                await getattr(self._engine, method)(*arguments)
        except EngineError:
            await self.ping()
            raise


LOADS: Mapping[str, Callable[..., Awaitable[None]]] = {"update_weights": load_weights, "load_adapter": load_adapter}


class RayEngine:
    """The driver's end of one actor, as an engine. It serves one event loop after another."""

    facts: EngineFacts
    weight_version: int

    def __init__(self, name: str, actor: Remote) -> None:
        self.actor = actor
        self.failure: EngineError | None = None  # why the actor is gone, once it is
        self._name = name
        self._tell = actor.tell.options(num_returns=0)
        self._contexts = Contexts()
        self._sent = self._received = self.wire_bytes = 0  # the last: of requests and answers
        self._load = Load()
        self._streams: dict[str, ChunkStream] = {}  # the dispatch of each request under way
        self._listener: asyncio.Task[None] | None = None

    async def node(self) -> str:
        """Wait until the actor has found a place, and return the id of its node."""
        return str(await _answer(self.actor.node.remote()))

    async def start(self, tokenizer: object) -> None:
        """Build the engine in the actor; ``tokenizer`` is another replica's, if there is one, and is not sent again."""
        facts, self.weight_version = await _answer(self.actor.start.remote(tokenizer is None))
        self.facts = facts if tokenizer is None else replace(facts, tokenizer=tokenizer)
        self.tokenizer, self.max_context, self.eos_ids = self.facts.tokenizer, facts.max_context, facts.eos_ids

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Send all requests in one call."""
        if self.failure is not None:
            raise self.failure
        stream = ChunkStream(requests, self._abort)
        if self._listener is None or self._listener.done() or self._listener.get_loop() is not stream.loop:
            self._streams.clear()  # whatever an earlier loop has left
            self._listener = stream.loop.create_task(self._listen())
        self._streams |= dict.fromkeys(stream.request_ids, stream)
        self._send(pack_requests(requests, self._contexts))
        return aiter(stream)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Send the abort after all that was sent before."""
        self._abort(list(request_ids))

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Hand it on, after all that was sent before."""
        if self.failure is None:
            self._send(("end_sessions", list(sessions)))

    async def update_weights(self, weights: object, version: int | None = None) -> int:
        """Let the actor read the weights from the object store or a folder."""
        await self._ask("update_weights", weights, version)
        self.weight_version = self.weight_version + 1 if version is None else version
        return self.weight_version

    async def load_adapter(self, adapter: Adapter, version: int) -> None:
        """Let the actor read an adapter from its folder."""
        await self._ask("load_adapter", adapter, version)
        self.weight_version = version

    async def pause(self) -> None:
        """Hand the order on."""
        await self._ask("pause")

    async def resume(self) -> None:
        """Hand the order on."""
        await self._ask("resume")

    async def sleep(self) -> None:
        """Hand the order on."""
        await self._ask("sleep")

    async def wake(self) -> None:
        """Hand the order on."""
        await self._ask("wake")

    async def ping(self) -> None:
        """Wait for an answer."""
        await _answer(self.actor.ping.remote())

    def load(self) -> Load:
        """Return how busy the engine was when it last told something, with what it was asked for since."""
        load = self._load
        return msgspec.structs.replace(load, waiting=max(load.waiting, len(self._streams) - load.running))

    async def aclose(self) -> None:
        """Let the engine close if it still can, then kill the actor."""
        actor, self.actor = self.actor, None
        if actor is None:
            return
        self.failure = self.failure or EngineError(f"{self._name} is closed")
        if self._listener is not None and not self._listener.get_loop().is_closed():
            self._listener.cancel()
        for request_id, stream in list(self._streams.items()):
            if stream.loop is asyncio.get_running_loop():
                end = FinishReason.ABORT
                stream.put(Chunk(request_id, weight_version=self.weight_version, finish_reason=end))
        self._streams.clear()
        if hasattr(self, "facts"):  # it has started
            with suppress(Exception):
                async with asyncio.timeout(FAREWELL):
                    await answer_to(actor.ask.remote("aclose"))
        with suppress(Exception):
            ray.kill(actor)

    async def _listen(self) -> None:
        """Keep one call open, which returns all new chunks and failures."""
        while True:
            try:
                block = await _answer(self.actor.flush.remote(self._received))
            except EngineError as error:
                self.failure = error
                for stream in {id(stream): stream for stream in self._streams.values()}.values():
                    stream.fail(error)
                return
            flush = unpack_flush(block)
            self._load, self._received = flush.load, self._received + 1
            self.wire_bytes += len(block)
            for chunk in flush.chunks:
                if (addressee := self._streams.get(chunk.request_id)) is not None:
                    addressee.put(chunk)
                    if chunk.finish_reason is not None:
                        del self._streams[chunk.request_id]
            for failure in flush.failures:
                for failed in [self._streams.pop(request_id, None) for request_id in failure.request_ids]:
                    if failed is not None:
                        failed.fail(EngineError(failure.why))

    async def _ask(self, method: str, *arguments: object) -> None:
        await _answer(self.actor.ask.remote(method, *arguments))

    def _abort(self, request_ids: Sequence[str]) -> None:
        if self.failure is None:
            self._send(("abort", request_ids))

    def _send(self, message: bytes | tuple[str, Sequence[str]]) -> None:
        self.wire_bytes += len(message) if isinstance(message, bytes) else 0
        self._tell.remote(self._sent, message)  # a dead actor is noticed by the call that is open
        self._sent += 1


async def _answer(reference: object) -> Remote:
    """Wait for a call's result; its errors as they were raised there, Ray's own as :class:`ReplicaLost`."""
    try:
        return await answer_to(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise ReplicaLost(str(error)) from None
    except ray.exceptions.RayActorError as error:
        raise ReplicaLost(" ".join(str(error).split())[:500]) from None
    except ray.exceptions.RayError as error:
        raise ReplicaLost(f"{type(error).__name__}: {error}") from None
