"""Several replicas of an engine as one engine: routed, bounded in flight, and whole again when one is lost.

Invariant: a request is at one replica, or waits here in order until one has room. What it has streamed stays: when its
replica is lost or fails it, it goes on elsewhere from there, so no token is lost or sampled twice, and each keeps its
logprob and version. Every request gets its last chunk, or the error that ended the pool: it is tried ``attempts``
times, those included that its caller begins (under the name ``ID#2``, ``ID#3``, …), and replicas are started a bounded
number of times (:mod:`fsm_rollout.engines.supervisor`). One that the router fails is not tried at all: its last chunk
has an error ``RouterFailed: …``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anyio.from_thread import start_blocking_portal

from fsm_rollout.concurrency.interruptible import wait_for
from fsm_rollout.engines.chunk_stream import ChunkStream, check_unique
from fsm_rollout.engines.packing import Flush
from fsm_rollout.engines.pool_members import Member, Passage, PoolTimes, ReplicaStats, Tries
from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.engines.replicas import EngineFacts, Placement
from fsm_rollout.engines.router import Router, StickyRouter, choose
from fsm_rollout.engines.supervisor import ReplicaSupervisor
from fsm_rollout.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

logger = logging.getLogger(__name__)

STRIKES = 2
"""Dispatches that an engine may fail as a whole, with nothing finished between, before its replica is given up."""


class PoolEngine:
    """See the module. It serves one event loop at a time.

    Args:
        placement: where the replicas live.
        count: how many there are.
        router: chooses their requests; default: :class:`StickyRouter`.
        attempts: how often a request is tried before that is its end, whoever tries it again: the pool or its caller.
        restarts: how often a replica that finishes nothing is started again before its place stays empty.
        times: seconds that the pool waits for its replicas.

    Raises:
        EngineError: a replica cannot be built, or does not start in time; none is left behind.
    """

    def __init__(
        self,
        placement: Placement,
        count: int,
        *,
        router: Router | None = None,
        attempts: int = 3,
        restarts: int = 3,
        times: PoolTimes | None = None,
    ) -> None:
        self._router: Router = router or StickyRouter()
        self._attempts = attempts
        self._passages: dict[str, Passage] = {}
        """All requests under way, by id."""
        self._waiting: dict[str, Passage] = {}
        """Those of them that are at no replica, in order."""
        self._aborts: list[Passage] = []
        """Those of which their replicas are told in this turn of the loop that they are to end."""
        self._tries = Tries()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._crew = ReplicaSupervisor(self, placement, count, restarts=restarts, times=times or PoolTimes())
        try:
            with start_blocking_portal() as portal:  # this may be called from within an event loop, or without any
                started: tuple[EngineFacts, Any] = wait_for(portal.start_task_soon(self._crew.start))
            self._facts, self._tokenizer = started
        except BaseException:
            placement.close()
            raise

    # -- the protocol ---------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The replicas' tokenizer."""
        return self._tokenizer

    @property
    def max_context(self) -> int:
        """The longest input plus output that every replica takes, in tokens."""
        return self._facts.max_context

    @property
    def eos_ids(self) -> frozenset[int]:
        """The stop tokens that the model's generation config names."""
        return self._facts.eos_ids

    @property
    def weight_version(self) -> int:
        """How many policy updates the present weights have had."""
        return self._crew.version

    @property
    def replicas(self) -> list[ReplicaStats]:
        """What became of each replica so far."""
        return [member.stats() for member in self._crew.members]

    @property
    def serves_another_loop(self) -> bool:
        """Whether it belongs to an event loop that still lives and is not the running one."""
        return self._loop not in (None, asyncio.get_running_loop()) and not self._loop.is_closed()

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Send the requests to their replicas at once, as far as those have room; see the protocol."""
        loop = self._bind()
        if self._crew.fallen is not None:
            raise self._crew.fallen
        check_unique(requests, self._passages)
        answers = ChunkStream((request.request_id for request in requests), self._abort)
        for request in requests:
            earlier, why = self._tries.before(request.request_id)
            passage = Passage(request, answers, since=loop.time(), earlier=earlier)
            self._passages[request.request_id] = self._waiting[request.request_id] = passage
            if earlier >= self._attempts:
                self._give_up(passage, why)
        self._assign()
        return aiter(answers)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests: at once where they wait, soon where a replica has them."""
        self._abort(request_ids)

    async def update_weights(self, weights: str | Path | Mapping[str, torch.Tensor], version: int | None = None) -> int:
        """Pause all replicas, load the weights everywhere, go on; see the protocol.

        A replica that fails while another one succeeds is lost, and comes back with the new weights.

        Raises:
            EngineError: no replica took them; then nothing has changed.
        """
        self._bind()
        # Shielded: an update that is given up half-way would leave replicas with different weights.
        return await asyncio.shield(self._crew.spawn(self._crew.update(weights, version)))

    async def pause(self) -> None:
        """Sample nothing anywhere until :meth:`resume`."""
        self._bind()
        await self._crew.hold("pause")

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._bind()
        await self._crew.hold("resume")

    async def sleep(self) -> None:
        """Give memory back on every replica.

        Raises:
            EngineError: requests are under way and the pool is not paused.
        """
        self._bind()
        if self._passages and not self._crew.paused:
            raise EngineError(f"{len(self._passages)} request(s) are under way; pause the engine before it sleeps")
        await self._crew.hold("sleep")

    async def wake(self) -> None:
        """Go on after :meth:`sleep`."""
        self._bind()
        await self._crew.hold("wake")

    def load(self) -> Load:
        """Return how busy all replicas are, with ``NAME.running`` and ``NAME.in_flight`` of each in the details."""
        members = self._crew.members
        running = {member.name: min(member.load.running, member.view.in_flight) for member in members}
        total = sum(running.values())
        return Load(
            running=total,
            waiting=len(self._passages) - total,
            used_tokens=sum(member.load.used_tokens for member in members if member.sent),
            max_tokens=sum(member.load.max_tokens or 0 for member in members) or None,
            details={f"{name}.running": count for name, count in running.items()}
            | {f"{member.name}.in_flight": member.view.in_flight for member in members},
        )

    async def aclose(self) -> None:
        """End everything with "abort" and stop every replica."""
        if self._closed:
            return
        self._closed = True
        if self._loop is asyncio.get_running_loop():
            self._abort(list(self._passages))
            if self._passages and self._crew.up:  # they have a moment to send what they have sampled
                self._emptied = self._loop.create_future()
                await asyncio.wait([self._emptied], timeout=self._crew.times.close)
            for passage in list(self._passages.values()):
                self._end(passage, passage.last_chunk("abort"))
        await self._crew.close()

    def _bind(self) -> asyncio.AbstractEventLoop:
        """Belong to the running event loop; what an earlier one left under way has no listener any more."""
        if self._closed:
            raise EngineError("the pool is closed; build another")
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self.serves_another_loop:
                raise EngineError("the pool serves another event loop; close that first, or build a pool for each")
            self._loop = loop
            self._passages.clear()
            self._waiting.clear()
            self._aborts.clear()
            self._crew.bind()
        return loop

    # -- requests -------------------------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Send what waits, in order, as far as replicas have room: one dispatch per replica."""
        if not self._waiting or self._closed or self._crew.in_doubt:
            return
        up = {member.name: member for member in self._crew.up}
        views = [member.view for member in up.values()]
        for view in views:
            view.waiting = 0
        batches: dict[str, list[Passage]] = {}
        refused: list[tuple[Passage, str]] = []
        for passage in self._waiting.values():
            if not any(view.has_room for view in views):
                break
            try:
                chosen = choose(self._router, passage.request, views)
            except EngineError as error:
                refused.append((passage, f"{error.kind}: {error}"))
                continue
            if chosen.has_room:
                batches.setdefault(chosen.name, []).append(passage)
                chosen.in_flight += 1
            else:
                chosen.waiting += 1
        for passage, why in refused:
            self._end(passage, passage.last_chunk("abort", why))
        now = asyncio.get_running_loop().time()
        for name, passages in batches.items():
            for passage in passages:
                del self._waiting[passage.request.request_id]
            up[name].send(passages, now)

    def heard(self, member: Member, flush: Flush) -> None:
        """Take what a replica has to tell, and send it more."""
        for chunk in flush.chunks:
            passage = member.sent.get(chunk.request_id)
            told = None if passage is None else passage.take(chunk, member.name)
            if passage is None or told is None:
                continue
            if told.finish_reason is None:
                passage.answers.put(told)
            else:
                self._end(passage, told)
                if told.error is None:
                    member.strikes = member.losses = 0
                    self._tries.went_well(passage.request.request_id)
                else:
                    tries = passage.earlier + passage.failures + 1
                    self._tries.failed(passage.request.request_id, tries, told.error)
        member.measure(flush, asyncio.get_running_loop().time())
        for request_ids, why in flush.failures:
            failed = [member.sent[request_id] for request_id in request_ids if request_id in member.sent]
            if failed:
                member.strikes += 1
                logger.warning("%s failed a dispatch of %d request(s): %s", member.name, len(failed), why)
                self._elsewhere(failed, why)
                if member.strikes >= STRIKES:
                    self._crew.lose(member, member.replica, f"its engine failed {STRIKES} times in a row: {why}")
        self._assign()

    def lost(self, member: Member, why: str) -> None:
        """Let what a replica had go on elsewhere."""
        self._elsewhere(list(member.sent.values()), why)
        self._assign()

    def joined(self) -> None:
        """Send what waits to those that are there now."""
        self._assign()

    def ended(self, error: EngineError) -> None:
        """End every dispatch with ``error``."""
        for passage in self._passages.values():
            passage.answers.fail(error)
        self._passages.clear()
        self._waiting.clear()

    def _elsewhere(self, passages: Sequence[Passage], why: str) -> None:
        """Let requests that their replica failed go on with another, first of all that wait; or end them."""
        first: dict[str, Passage] = {}
        for passage in passages:
            if passage.member is not None:
                passage.member.moved += 1
                passage.member.forget(passage)
            passage.failures += 1
            done = passage.done()
            if done is not None:
                self._end(passage, passage.last_chunk(done))
            elif passage.earlier + passage.failures >= self._attempts:
                self._give_up(passage, why)
            else:
                first[passage.request.request_id] = passage
                if (told := passage.waiting_chunk()) is not None:
                    passage.answers.put(told)
        self._waiting = {**first, **self._waiting}

    def _give_up(self, passage: Passage, why: str) -> None:
        """End a request that has been tried often enough."""
        tries = passage.earlier + passage.failures
        self._tries.failed(passage.request.request_id, tries, why)
        self._end(passage, passage.last_chunk("abort", f"EngineError: {tries} tries failed, the last one: {why}"))

    def _end(self, passage: Passage, chunk: Chunk) -> None:
        """Give a request its last chunk."""
        request_id = passage.request.request_id
        if passage.member is not None:
            passage.member.forget(passage)
        self._waiting.pop(request_id, None)
        self._passages.pop(request_id, None)
        passage.answers.put(chunk)
        if self._emptied is not None and not self._passages and not self._emptied.done():
            self._emptied.set_result(None)

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            passage = self._passages.get(request_id)
            if passage is None:
                continue
            passage.aborted = True
            if passage.member is None:
                self._end(passage, passage.last_chunk("abort"))
            elif self._loop is not None and not self._loop.is_closed():
                if not self._aborts:  # a cancelled run aborts each of its requests by itself: one message for all
                    self._loop.call_soon(self._send_aborts)
                self._aborts.append(passage)

    def _send_aborts(self) -> None:
        at: dict[Member, list[str]] = {}
        for passage in self._aborts:
            if passage.member is not None:
                at.setdefault(passage.member, []).append(passage.sent_as)
        self._aborts.clear()
        for member, sent_as in at.items():
            member.live.abort(sent_as)
