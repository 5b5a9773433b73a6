"""The books of a pool: its replicas, and the requests on their way through it.

Invariant: ``passage.member is member`` exactly while ``member.sent[passage.sent_as] is passage``, and then
``member.view.in_flight`` counts it. Nothing here waits or decides; :class:`fsm_rollout.engines.pool.PoolEngine` does.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fsm_rollout.engines.chunk_stream import NO_IDS, NO_LOGPROBS, ChunkStream
from fsm_rollout.engines.packing import Flush
from fsm_rollout.engines.protocol import Chunk, FinishReason, Load, Request
from fsm_rollout.engines.replicas import Replica
from fsm_rollout.engines.router import ReplicaView, allowance
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.tokens import Ids

State = Literal["starting", "up", "dead"]
MEMORY = 600.0
"""Seconds of work (of all requests together) after which a replica's pace counts half."""


@dataclass(frozen=True, slots=True)
class PoolTimes:
    """Seconds that a pool waits for its replicas."""

    start: float = 600.0
    """For one to start."""
    silence: float = 300.0
    """For one that has requests and is not held to say anything; then it is given up as hung."""
    ping_every: float = 10.0
    ping: float = 30.0
    """For the answer to a ping; then it is given up."""
    order: float = 60.0
    """For one to pause, resume, sleep or wake."""
    update: float = 600.0
    """For one to load weights."""
    close: float = 2.0
    """For the last tokens of what is under way when the pool is closed."""
    backoff: float = 0.5
    """Before one is started again for the first time; twice as long each time after."""


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What became of a replica so far."""

    name: str
    state: State
    requests: int
    """Sent to it."""
    tokens: int
    """Got from it."""
    restarts: int
    moved: int
    """Requests that it failed and that went on elsewhere."""
    cause: str
    """Why it was last lost."""


class Tries:
    """How often each request has failed, under whatever name: a caller that tries ``ID`` again calls it ``ID#2``, ….

    Only the latest ``memory`` requests that failed are remembered.
    """

    def __init__(self, memory: int = 65_536) -> None:
        self._memory = memory
        self._failed: OrderedDict[str, tuple[int, str]] = OrderedDict()

    def before(self, request_id: str) -> tuple[int, str]:
        """Return how often a request failed under its earlier names, and why the last time."""
        name = _first_name(request_id)
        if name == request_id:  # it is tried for the first time, or all over again
            self._failed.pop(name, None)
        return self._failed.get(name, (0, ""))

    def failed(self, request_id: str, count: int, why: str) -> None:
        """Remember that a request has failed ``count`` times by now."""
        name = _first_name(request_id)
        self._failed[name] = (count, why)
        self._failed.move_to_end(name)
        if len(self._failed) > self._memory:
            self._failed.popitem(last=False)

    def went_well(self, request_id: str) -> None:
        """Forget a request."""
        self._failed.pop(_first_name(request_id), None)


def _first_name(request_id: str) -> str:
    name, mark, number = request_id.rpartition("#")
    return name if mark and number.isdecimal() else request_id


@dataclass(eq=False, slots=True)
class Passage:
    """A request on its way: where it is, and what it has streamed."""

    request: Request
    answers: ChunkStream
    since: float
    sent_at: float = 0.0
    member: Member | None = None
    sent_as: str = ""
    """Its id at its present replica."""
    ids: Ids = field(default_factory=lambda: array("i"))
    version: int = 0
    admitted: bool = False
    aborted: bool = False
    waits: bool = False
    """Whether its caller was told that nobody works on it."""
    failures: int = 0
    earlier: int = 0
    """Failures of the same request under the names that its caller gave it before."""

    def ask(self) -> Request:
        """Return what to ask the next replica for: all of it, or the rest."""
        if not self.failures:
            return self.request
        return self.request.continued(self.ids, f"{self.request.request_id}~{self.failures}")

    def take(self, chunk: Chunk, replica: str) -> Chunk | None:
        """Return the chunk as the pool's own; ``None`` for a second admission that means nothing to the caller."""
        if chunk.ids:
            self.ids.extend(chunk.ids)
        self.version = chunk.weight_version
        queued = chunk.queue_seconds
        if not self.admitted:
            self.admitted = True
            queued += self.sent_at - self.since
        elif not chunk.ids and chunk.finish_reason is None and not self.waits:
            return None
        self.waits = False
        if chunk.request_id == self.request.request_id and chunk.replica == replica and queued == chunk.queue_seconds:
            return chunk
        return replace(chunk, request_id=self.request.request_id, replica=replica, queue_seconds=queued)

    def done(self) -> FinishReason | None:
        """Return how the request has ended, if only its last word was lost."""
        sampling = self.request.sampling
        if self.aborted:
            return "abort"
        if self.ids and not sampling.ignore_eos and self.ids[-1] in sampling.stop_ids:
            return "stop"
        return "length" if len(self.ids) >= sampling.max_tokens else None

    def waiting_chunk(self) -> Chunk | None:
        """Return what tells the caller that nobody works on it; ``None`` when it knows."""
        if self.waits or not self.admitted:
            return None
        self.waits = True
        return Chunk(self.request.request_id, NO_IDS, NO_LOGPROBS, self.version, waits=True)

    def last_chunk(self, reason: FinishReason, error: str | None = None) -> Chunk:
        """Return a last chunk without tokens."""
        name = self.member.name if self.member is not None else ""
        return Chunk(
            self.request.request_id, NO_IDS, NO_LOGPROBS, self.version, reason, error=error, replica=name
        )  # fmt: skip


class Member:
    """One place in a pool: a replica, and when that is lost, the next one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.view = ReplicaView(name)
        self.replica: Replica | None = None
        self.state: State = "starting"
        self.sent: dict[str, Passage] = {}
        self.load = Load()
        self.listener: asyncio.Task[None] | None = None
        self.heard = 0.0
        """When it last told something, was given something to do, or was let go on."""
        self.strikes = 0
        """Dispatches it failed since it last finished a request."""
        self.losses = 0
        """Lives it lost since it last finished a request."""
        self.requests = self.tokens = self.restarts = self.moved = 0
        self.cause = ""
        self._worked = self._sampled = self._measured = 0.0

    @property
    def live(self) -> Replica:
        """The present replica.

        Raises:
            EngineError: there is none yet.
        """
        if self.replica is None:
            raise EngineError(f"{self.name} has not been started")
        return self.replica

    def send(self, passages: Sequence[Passage], now: float) -> None:
        """Dispatch requests, which the view has counted."""
        if not self.sent:
            self.heard = self._measured = now
        asked = [passage.ask() for passage in passages]
        for passage, request in zip(passages, asked, strict=True):
            passage.member, passage.sent_as, passage.sent_at = self, request.request_id, now
            self.sent[request.request_id] = passage
        self.requests += len(asked)
        self.live.submit(asked)

    def forget(self, passage: Passage) -> None:
        """Take a request off the books."""
        if self.sent.pop(passage.sent_as, None) is not None:
            self.view.in_flight -= 1
        passage.member = None

    def measure(self, flush: Flush, now: float) -> None:
        """Learn from a flush how busy the replica is and how fast it works."""
        count = sum(len(chunk.ids) for chunk in flush.chunks)
        self.tokens += count
        self._sampled += count
        self._worked += max(1, self.view.in_flight) * (now - self._measured)
        self.heard = self._measured = now
        if self._worked > 1.0:
            self.view.pace = self._sampled / self._worked
        if self._worked > MEMORY:
            self._worked, self._sampled = self._worked / 2, self._sampled / 2
        self.load = flush.load
        self.view.allowed = allowance(flush.load)

    def clear(self, now: float) -> None:
        """Begin with clean books."""
        self.sent.clear()
        self.view = ReplicaView(self.name)
        self.load = Load()
        self.strikes = 0
        self.heard = self._measured = now
        self._worked = self._sampled = 0.0

    def leave(self, why: str) -> None:
        """Take part no more."""
        self.state = "starting"
        self.cause = why
        self.losses += 1
        self.restarts += 1
        if self.listener is not None and self.listener is not asyncio.current_task():
            self.listener.cancel()

    def stats(self) -> ReplicaStats:
        """Return what became of it."""
        return ReplicaStats(
            self.name, self.state, self.requests, self.tokens, self.restarts, self.moved, self.cause
        )  # fmt: skip
