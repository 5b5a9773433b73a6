"""The engines of a run as a worker sees them.

Invariant: a worker speaks to no engine. Its requests go to the run's client of the engine, which keeps the one ledger;
what comes back is whether a request's deadline runs, and how the request ended, with all its tokens.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.engines.engine_ids import ABORT_GRACE
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import EngineFacts, Request
from fsm_rollout.engines.wire import Contexts, pack_requests
from fsm_rollout.errors import EngineError
from fsm_rollout.scheduler.worker_link import Link
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import Note, Usage

MOST_UNSENT = 32  # so many requests wait at most for others of the same pass of the event loop


class EngineState(msgspec.Struct, frozen=True):
    """What a worker is told of an engine of the run."""

    facts: EngineFacts
    weight_version: int


class RemoteClient:
    """The run's client of one engine, as a worker sees it. The run keeps the one ledger: it batches and retries.

    What is sent of a request: that somebody works on it or nobody (its deadline runs or stands still), and how it
    ended, with all its tokens.
    """

    def __init__(self, name: str, engine: EngineState, link: Link) -> None:
        self.facts, self.weight_version = engine.facts, engine.weight_version
        self.chats: dict[object, ChatTemplate] = {}
        self._name, self._link = name, link
        self._contexts = Contexts()
        self._numbers = itertools.count()
        self._under_way: dict[int, PendingRequest] = {}
        self._unsent: list[tuple[int, Request]] = []

    def submit(self, request: Request, deadline: Deadline | None = None) -> PendingRequest:
        """Send a request soon; see :meth:`fsm_rollout.engines.client.EngineClient.submit`."""
        loop = asyncio.get_running_loop()
        pending = PendingRequest(request, loop.time(), deadline, request_id=request.request_id)
        pending.keep_time()
        number = next(self._numbers)
        self._under_way[number] = pending
        self._unsent.append((number, request))
        if len(self._unsent) == 1:
            loop.call_soon(self._send)
        elif len(self._unsent) == MOST_UNSENT:  # the engine works on these while this pass goes on
            self._send()
            self._link.flush()
        return pending

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not unsent:
            return
        block = pack_requests((request for _, request in unsent), self._contexts)
        self._link.send("submit", self._name, [number for number, _ in unsent], block)

    def keep_time(self, number: int, held: bool) -> None:
        """Let a request's deadline stand still, or run."""
        pending = self._under_way.get(number)
        if pending is not None:
            if pending.admitted_at is None and not held:
                pending.admitted_at = asyncio.get_running_loop().time()
            pending.waits = held
            pending.keep_time()

    def end_request(self, number: int, ending: Ending) -> None:
        """Give a request all its tokens, and its end."""
        pending = self._under_way.pop(number, None)
        if pending is not None:
            pending.ids.frombytes(ending.ids)
            pending.logprobs.frombytes(ending.logprobs)
            pending.versions += ending.versions
            pending.notes += ending.notes
            pending.admitted_at = ending.admitted_at
            pending.cached_tokens, pending.usage, pending.replica = ending.cached_tokens, ending.usage, ending.replica
            pending.end(ending.finish_reason, ending.error)

    async def abort(self, pending: PendingRequest) -> None:
        """End a request soon and wait (a bounded time) for its last tokens; it is done afterwards."""
        if pending.done.happened:
            return
        pending.aborted = True
        number = next(number for number, other in self._under_way.items() if other is pending)
        self._link.send("abort", self._name, number)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * ABORT_GRACE):
                    await pending.done.wait()
        finally:
            self._under_way.pop(number, None)
            pending.end(FinishReason.ABORT)

    async def drain(self) -> None:
        """End every request here; the run ends those of workers that are gone."""
        for pending in self._under_way.values():
            pending.end(FinishReason.ABORT)
        self._under_way.clear()


class Ending(msgspec.Struct, frozen=True, gc=False):
    """How a request ended: tokens and log-probs as bytes, the rest as in :class:`PendingRequest`."""

    ids: bytes
    logprobs: bytes
    versions: list[tuple[int, int]]
    notes: list[Note]
    finish_reason: FinishReason
    error: EngineError | None
    admitted_at: float | None
    cached_tokens: int
    replica: str
    usage: Usage | None


def remote_clients(engines: Mapping[str, EngineState], link: Link) -> dict[str, RemoteClient]:
    """Return clients of the run's engines."""
    return {name: RemoteClient(name, engine, link) for name, engine in engines.items()}
