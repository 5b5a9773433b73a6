"""A run's way to an engine: what it asks of the pool of that engine's replicas, and nobody else's requests.

Invariant: every submitted :class:`PendingRequest` ends exactly once (:mod:`fsm_rollout.engines.pool` sees to it), and
none is left when the client is drained. Several clients may use one pool: a run's, and one for an evaluation beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, SupportsIndex

from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import EngineFacts, Request, TokenSource, Weights, WeightSource
from fsm_rollout.engines.replica import Placement
from fsm_rollout.engines.stop_strings import StopStrings
from fsm_rollout.engines.thinking_budget import ThinkingBudget
from fsm_rollout.engines.weight_sources import as_source
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.tokens import LAST_VERSION

if TYPE_CHECKING:
    from fsm_rollout.chat import ChatTemplate


class Client(Protocol):
    """What a trajectory needs of an engine, wherever that is."""

    facts: EngineFacts
    chats: dict[object, ChatTemplate]
    """The chat templates of the engine's model, by settings."""
    label: str
    """What the names of its sessions begin with: those of clients of one engine differ."""

    @property
    def weight_version(self) -> int:
        """How many policy updates the present weights have had."""

    def submit(self, request: Request, deadline: Deadline | None = None) -> PendingRequest:
        """Send a request soon (under another id where its own is under way); ``deadline`` runs from its first chunk."""

    async def abort(self, pending: PendingRequest) -> None:
        """End a request soon and wait (a bounded time) for its last tokens; it is done afterwards."""

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Have the engine keep nothing more for these sessions, of which no request is under way, and none follows."""


class EngineClient:
    """The only way to one engine: one that is there already, or the pool of one's replicas.

    All methods are called on the scheduler's event loop.
    """

    def __init__(self, engine: TokenSource | EnginePool) -> None:
        self.pool = engine if isinstance(engine, EnginePool) else EnginePool(Placement(engine))
        self.facts: EngineFacts = self.pool.facts
        self.chats: dict[object, ChatTemplate] = {}  # the chat templates of this engine's model, by settings
        self.label = f"{self.pool.clients}:" if self.pool.clients else ""
        self.pool.clients += 1

    @property
    def weight_version(self) -> int:
        """How many policy updates the present weights have had."""
        return self.pool.weight_version

    def submit(self, request: Request, deadline: Deadline | None = None) -> PendingRequest:
        """See :class:`Client`."""
        pending = PendingRequest(request, asyncio.get_running_loop().time(), deadline, client=self)
        if request.sampling.stop:
            pending.stops = StopStrings.of(request, self.pool.tokenizer)
        if request.sampling.thinking is not None:
            pending.thinking = ThinkingBudget(request, self.pool.tokenizer)
            if pending.thinking.due:  # before anything is sampled
                pending.close_thinking()
                if (ended := pending.ended_as) is not None:
                    asyncio.get_running_loop().call_soon(self.pool.end, pending, ended)
                    return pending
        self.pool.submit(pending, self.label)
        return pending

    async def abort(self, pending: PendingRequest) -> None:
        """See :class:`Client`."""
        await self.pool.abort(pending)

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """See :class:`Client`."""
        self.pool.placing.end(list(sessions))

    async def begin(self, before_dispatch: Callable[[], object] | None = None) -> None:
        """Be used on this event loop until this client is drained; an engine that sleeps between runs is awake then.

        ``before_dispatch`` is called before requests go out; it must not block or raise.

        Raises:
            EngineError: the engine belongs to another event loop, or cannot be woken.
        """
        self.pool.here()
        if before_dispatch is not None:
            self.pool.before_dispatch[self] = before_dispatch
        if self.pool.sleeps:
            self.pool.runs.add(self)
            await self.wake()

    async def drain(self) -> None:
        """End every request of this client; the engine itself stays open (whoever made it closes it)."""
        self.pool.before_dispatch.pop(self, None)
        await self.pool.drain(self)
        if self.pool.sleeps:
            self.pool.runs.discard(self)
            if not self.pool.runs:
                await self.sleep()

    def waits_of(self, trajectory_id: str) -> list[PendingRequest]:
        """Return the requests of a trajectory that have not ended."""
        return [pending for pending in self.pool.under_way(self) if pending.request.trajectory_id == trajectory_id]

    def sampling_since(self) -> dict[tuple[str, str], int]:
        """Return, by trajectory and context, the oldest weight version among the tokens of generations under way."""
        oldest: dict[tuple[str, str], int] = {}
        for pending in self.pool.under_way(self):
            if (version := pending.oldest_version) is not None:
                name = pending.request.trajectory_id, pending.request.context
                oldest[name] = min(version, oldest.get(name, version))
        return oldest

    # -- pauses and weights ---------------------------------------------------------------------------------------

    async def pause(self, reason: str = "asked") -> None:
        """Let the engine sample nothing until :meth:`resume`; timeouts of what waits for it stand still.

        ``reason``: it goes on when every reason has been taken back.
        """
        await self.pool.here().hold(reason)

    async def resume(self, reason: str = "asked") -> None:
        """Take a reason for :meth:`pause` back, and go on if it was the last."""
        await self.pool.here().release(reason)

    async def sleep(self) -> None:
        """Let the engine give its memory back; what is asked of it waits."""
        await self.pool.here().sleep()

    async def wake(self) -> None:
        """Make the engine ready again, and let what waits for it go on."""
        await self.pool.here().wake()

    async def update_weights(self, weights: Weights | WeightSource, version: int | None = None) -> int:
        """Load new weights while everything waits, and return their version.

        ``weights``: a model folder, tensors by name, or a source of these (:class:`fsm_rollout.Tensors`).

        Generations under way go on afterwards, and timeouts stand still meanwhile; tools and interactions go on all
        the time.

        Raises:
            EngineError: they are neither, or older than the present ones, or ``version`` is no int32; or the engine
                could not load them. It goes on with the old ones.
        """
        source = as_source(weights)
        present = self.weight_version
        coming = present + 1 if version is None else version
        if not isinstance(coming, SupportsIndex) or coming.__index__() > LAST_VERSION:
            raise EngineError(f"weight versions are whole numbers up to {LAST_VERSION:,}, got {coming!r}")
        if coming < present:
            raise EngineError(f"weights of version {coming} cannot follow version {present}")
        if self.pool.sleeps:  # they need the memory that was given back, and the run that is to use them comes next
            await self.wake()
        # NumPy has whole numbers of its own. Without one, the engine counts from what it has by then.
        return await self.pool.here().update_weights(source, None if version is None else version.__index__())
