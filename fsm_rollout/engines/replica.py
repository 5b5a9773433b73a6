"""One replica of a pool: where its engine is built, whether it is there, how fast it works.

Invariant: nothing here decides; the pool (:mod:`fsm_rollout.engines.pool`) says which replica is lost and what it does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fsm_rollout.concurrency.threads import DaemonThreads
from fsm_rollout.engines.protocol import Engine, ReplicaLost, Weights
from fsm_rollout.engines.router import FIRST, ReplicaView
from fsm_rollout.errors import EngineError

logger = logging.getLogger(__name__)
PACE_MEMORY = 600.0  # seconds of work (of all requests together) after which a replica's pace counts half
# Loading a model changes process-wide defaults for a while, so engines are built one after another.
_BUILDING = threading.Lock()
# Engines start in these threads; nothing waits for a start that was given up, not even the end of the process.
_threads = DaemonThreads("fsm-rollout-replica")


def failure_of(engine: Engine) -> EngineError | None:
    """Return why an engine is gone: its ``failure``, which one that works in another process may have."""
    failure: EngineError | None = getattr(engine, "failure", None)
    return failure


async def ping(engine: Engine) -> None:
    """Return if an engine is there, or raise ReplicaLost; one in another process has a ``ping``, and is waited for."""
    if (answer := getattr(engine, "ping", None)) is not None:
        await answer()
    if (failure := failure_of(engine)) is not None:
        raise ReplicaLost(str(failure))


def describe(error: BaseException) -> str:
    """Return an error in one line: an engine's own words, or what class it was."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


class LocalPlacement:
    """Where replicas live: in this process, each an engine that ``build`` makes from its name, in a thread."""

    def __init__(self, build: Callable[[str], Engine]) -> None:
        self._build = build

    async def start(self, name: str) -> Engine:
        """Build a replica's engine, or raise EngineError; a start that is cancelled leaves nothing behind."""
        wanted = True

        def build() -> Engine:
            with _BUILDING:
                if not wanted:
                    raise EngineError(f"replica '{name}' was given up before it started")
                return self._build(name)

        try:
            return await asyncio.get_running_loop().run_in_executor(_threads, build)
        finally:
            wanted = False

    def share(self, weights: Weights) -> Weights:
        """Return ``weights`` in the form in which any number of replicas, now and later, are given them.

        Tensors are copied: a replica that starts later must get these, not what training has made of them since. To the
        CPU's memory, because they are kept until others replace them all.
        """
        if isinstance(weights, Mapping):
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        return weights

    def advice(self) -> str:
        """Say what may keep a replica from starting in time, and what to try."""
        return "give it more time with start_timeout"

    def close(self) -> None:
        """Free what the replicas shared; they are closed by now."""


@dataclass(frozen=True, slots=True)
class PoolTimes:
    """Seconds that a pool waits for its replicas."""

    start: float = 600.0  # for one to start
    silence: float = 300.0  # for one that has requests and is not held to say anything; then it is given up as hung
    ping_every: float = 10.0
    ping: float = 30.0  # for the answer to a ping; then it is given up
    order: float = 60.0  # for one to pause, resume, sleep or wake
    update: float = 600.0  # for one to load weights
    close: float = 2.0  # for the last tokens of what is under way when the pool is closed
    backoff: float = 0.5  # before one is started again for the first time; twice as long each time after


@dataclass(eq=False, slots=True)
class Replica(ReplicaView):
    """One slot of a pool: an engine, and after its loss the engine that replaces it."""

    state: Literal["starting", "up", "dead"] = "starting"
    engine: Engine | None = None
    # The tasks that pass on the chunks of its present engine, one per dispatch.
    dispatches: set[asyncio.Task[None]] = field(default_factory=set)
    requests: int = 0  # sent to it
    tokens: int = 0  # got from it
    restarts: int = 0
    moved: int = 0  # requests that it failed and that went on elsewhere
    cause: str = ""  # why it was last lost
    strikes: int = 0  # dispatches it failed since it last finished a request
    losses: int = 0  # lives it lost since it last finished a request
    last_active: float = 0.0  # when it last sent a chunk, was given a request, or was resumed
    worked: float = 0.0  # seconds of work in which it sampled `sampled` tokens, the older ones counted less
    sampled: float = 0.0

    @property
    def live(self) -> Engine:
        """The present engine of a replica that is up."""
        assert self.engine is not None
        return self.engine

    async def open(self, placement: LocalPlacement, seconds: float) -> None:
        """Start a new engine in its place, within so many seconds; EngineError if that fails or takes longer."""
        try:
            async with asyncio.timeout(seconds):
                self.engine = await placement.start(self.name)
        except TimeoutError:
            raise EngineError(f"{self.name} did not start within {seconds:g} s; {placement.advice()}") from None

    async def stop(self, seconds: float) -> None:
        """End its present life; an engine that cannot be closed in so many seconds is logged and left behind."""
        if (engine := self.engine) is None:
            return
        try:
            async with asyncio.timeout(seconds):
                await engine.aclose()
        except Exception as error:  # whatever an engine raises is the engine's failure
            logger.warning("%s did not close, and is left behind: %s", self.name, describe(error))
        if self.engine is engine:
            self.engine = None

    def measure(self, tokens: int, now: float) -> None:
        """Note that it sent ``tokens``, and learn how fast it works."""
        self.tokens += tokens
        self.sampled += tokens
        self.worked += max(1, self.in_flight) * (now - self.last_active)
        self.last_active = now
        if self.worked > 1.0:
            self.pace = self.sampled / self.worked
        if self.worked > PACE_MEMORY:
            self.worked, self.sampled = self.worked / 2, self.sampled / 2

    def begin(self, now: float) -> None:
        """Reset its counts for a new engine or event loop."""
        self.in_flight = self.waiting = self.strikes = 0
        self.allowed = FIRST
        self.pace = self.worked = self.sampled = 0.0
        self.last_active = now
        self.dispatches = set()
