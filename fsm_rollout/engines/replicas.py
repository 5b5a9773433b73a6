"""What a pool needs of one replica, and the replica that lives in this process.

Invariant: a replica is one life of one engine. It is started once; what it is asked arrives in the order it was asked;
what it has to tell comes out of :meth:`Replica.flush`, in order, all there is at a time. When anything it is asked
raises, that life is over: the pool stops it and starts another one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from fsm_rollout.concurrency.threads import DaemonThreads
from fsm_rollout.engines.packing import Flush
from fsm_rollout.engines.protocol import Chunk, Engine, Request
from fsm_rollout.errors import EngineError

if TYPE_CHECKING:
    import torch

Weights = str | Path | Mapping[str, "torch.Tensor"]
_BUILDING = threading.Lock()
"""Loading a model changes process-wide defaults for a while, so engines are built one after another."""
Order = Literal["pause", "resume", "sleep", "wake"]


class ReplicaLost(EngineError):
    """A replica is gone, or in an unknown state; what it was asked may be asked of another."""


@runtime_checkable
class Mortal(Protocol):
    """An engine that may be gone for good while the process that uses it lives on."""

    @property
    def failure(self) -> EngineError | None:
        """Why it is gone, once it is."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What never changes about an engine; replicas of a pool agree on it."""

    max_context: int
    eos_ids: frozenset[int]
    weight_version: int


class Replica(Protocol):
    """One engine, here or elsewhere. All but :meth:`flush` return soon; only one caller may wait in that."""

    name: str

    async def start(self) -> EngineFacts:
        """Build the engine; called once, before everything else.

        Raises:
            EngineError: it cannot be built.
        """

    async def tokenizer(self) -> Any:
        """Return the engine's tokenizer."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Start all ``requests`` as one dispatch."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Have these requests end soon; each still gets its last chunk."""

    async def flush(self) -> Flush:
        """Wait until there is something to tell, and return all of it.

        Raises:
            ReplicaLost: see there.
        """

    async def ping(self) -> None:
        """Return if the replica is there at all."""

    async def update_weights(self, weights: Any, version: int) -> None:
        """Load what :meth:`Placement.share` has made of some weights.

        Raises:
            ReplicaLost: see there.
            EngineError: the engine does not take these weights; nothing has changed.
        """

    async def order(self, what: Order) -> None:
        """Carry out ``pause``, ``resume``, ``sleep`` or ``wake``."""

    async def stop(self) -> None:
        """End this life and free everything, also while it starts; never raises and does not take long."""


class Placement(Protocol):
    """Where a pool's replicas live."""

    def replica(self, name: str) -> Replica:
        """Return a new replica, not started."""

    def share(self, weights: Weights) -> Any:
        """Return ``weights`` in the form in which any number of replicas, now and later, are given them."""

    def advice(self) -> str:
        """Say what may keep a replica from starting in time, and what to try."""

    def close(self) -> None:
        """Free what the replicas shared; they are stopped by now."""


_threads = DaemonThreads("fsm-rollout-replica")
"""Whoever gives a start up need not wait for it, not even to end the process."""


class LocalReplica:
    """An engine in this process, built by ``build`` in a thread."""

    def __init__(self, name: str, build: Callable[[], Engine]) -> None:
        self.name = name
        self._build = build
        self._engine: Engine | None = None
        self._stopped = False
        self._chunks: list[Chunk] = []
        self._failures: list[tuple[Sequence[str], str]] = []
        self._listener: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> EngineFacts:
        """Build the engine."""
        engine = self._engine = await asyncio.get_running_loop().run_in_executor(_threads, self._build_alone)
        return EngineFacts(engine.max_context, engine.eos_ids, engine.weight_version)

    def _build_alone(self) -> Engine:
        with _BUILDING:
            if self._stopped:
                raise EngineError(f"replica '{self.name}' was stopped before it started")
            return self._build()  # when it has been stopped by then, nobody takes the engine, which ends it

    async def tokenizer(self) -> Any:
        """Return the engine's tokenizer."""
        return self.engine.tokenizer

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            EngineError: the replica has not been started.
        """
        if self._engine is None:
            raise EngineError(f"replica '{self.name}' has no engine yet")
        return self._engine

    @property
    def _death(self) -> EngineError | None:
        return self._engine.failure if isinstance(self._engine, Mortal) else None

    def submit(self, requests: Sequence[Request]) -> None:
        """Start a dispatch; its chunks go to the next flushes."""
        self._spawn(self._serve(requests))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Hand the abort on."""
        self._spawn(self._abort(request_ids))

    async def flush(self) -> Flush:
        """Wait for chunks or failures; an engine that has much to say at once says it in one flush."""
        if not (self._chunks or self._failures or self._death):
            self._listener = asyncio.get_running_loop().create_future()
            await self._listener
        await asyncio.sleep(0)  # whoever else has something to say in this turn of the loop says it now
        if not (self._chunks or self._failures) and (death := self._death) is not None:
            raise ReplicaLost(str(death))
        flush = Flush(self._chunks, self._failures, self.engine.load())
        self._chunks, self._failures = [], []
        return flush

    async def ping(self) -> None:
        """Return at once, if the engine is not gone: the loop that runs this is the loop that asks."""
        if (death := self._death) is not None:
            raise ReplicaLost(str(death))

    async def update_weights(self, weights: Weights, version: int) -> None:
        """Hand the weights on."""
        await self._ask(self.engine.update_weights(weights, version))

    async def order(self, what: Order) -> None:
        """Hand the order on."""
        engine = self.engine
        orders = {"pause": engine.pause, "resume": engine.resume, "sleep": engine.sleep, "wake": engine.wake}
        await self._ask(orders[what]())

    async def _ask(self, answer: Coroutine[Any, Any, object]) -> None:
        try:
            await answer
        except EngineError:
            if (death := self._death) is not None:
                raise ReplicaLost(str(death)) from None
            raise

    async def stop(self) -> None:
        """Close the engine; requests under way are told no more."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._engine is not None:
            await self._engine.aclose()

    def _wake(self) -> None:
        if self._listener is not None and not self._listener.done():
            self._listener.set_result(None)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, requests: Sequence[Request]) -> None:
        under_way = {request.request_id for request in requests}
        why = "EngineError: the engine's answer ended without a last chunk"
        try:
            async for chunk in self.engine.generate(requests):
                if chunk.finish_reason is not None:
                    under_way.discard(chunk.request_id)
                self._chunks.append(chunk)
                self._wake()
        except Exception as error:  # whatever an engine raises is the engine's failure
            why = f"{type(error).__name__}: {error}"
        if under_way:
            if self._death is None:  # else they are lost with this replica
                self._failures.append((sorted(under_way), why))
            self._wake()

    async def _abort(self, request_ids: Iterable[str]) -> None:
        try:
            await self.engine.abort(request_ids)
        except Exception as error:  # an engine that cannot even abort has failed these requests
            self._failures.append((list(request_ids), f"{type(error).__name__}: {error}"))
            self._wake()


class LocalPlacement:
    """Replicas in this process, each with an engine that ``build`` makes from its name."""

    def __init__(self, build: Callable[[str], Engine]) -> None:
        self._build = build

    def replica(self, name: str) -> LocalReplica:
        """Return a new replica."""
        return LocalReplica(name, lambda: self._build(name))

    def share(self, weights: Weights) -> Weights:
        """Copy tensors: a replica that starts later must get these, not what training has made of them since.

        To the CPU's memory: they are kept until others replace them all, which is no use to make of a GPU's.
        """
        if isinstance(weights, Mapping):
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        return weights

    def advice(self) -> str:
        """Say what to try."""
        return "give it more time with start_timeout"

    def close(self) -> None:
        """Nothing is shared."""
