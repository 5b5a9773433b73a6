"""One replica of a pool: where its engine is built, whether it is there, how fast it works.

Invariant: nothing here decides; :mod:`fsm_rollout.engines.replicas` says which replica is lost, and
:mod:`fsm_rollout.engines.pool` what it does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from fsm_rollout.concurrency.threads import DaemonThreads
from fsm_rollout.engines.protocol import Load, OverWire, Process, ReplicaLost, SessionKeeper, TokenSource, WeightSource
from fsm_rollout.engines.router import FIRST, ReplicaView
from fsm_rollout.errors import EngineError

logger = logging.getLogger(__name__)
SILENCE = 600.0  # seconds that an engine which says nothing is waited for, unless it is said
PING_EVERY = 10.0  # seconds between two looks whether a replica is there
PACE_MEMORY = 600.0  # seconds of work (of all requests together) after which a replica's pace counts half
# Loading a model changes process-wide defaults for a while, so engines are built one after another.
_BUILDING = threading.Lock()
# Engines start in these threads; nothing waits for a start that was given up, not even the end of the process.
_threads = DaemonThreads("fsm-rollout-replica")


Rows: TypeAlias = list[dict[str, Any]]  # what is known of replicas, as plain data


def failure_of(engine: TokenSource) -> EngineError | None:
    """Return why an engine is gone, which one that works in another process may be."""
    return engine.failure if isinstance(engine, Process) else None


async def ping(engine: TokenSource) -> None:
    """Return if an engine is there, or raise ReplicaLost; one in another process is waited for."""
    if isinstance(engine, Process):
        await engine.ping()
        if engine.failure is not None:
            raise ReplicaLost(str(engine.failure))


def model_of(engine: TokenSource) -> tuple[object, ...]:
    """Return what tells an engine's model from others."""
    return engine.max_context, *sorted(engine.eos_ids)


def describe(error: BaseException) -> str:
    """Return an error in one line: an engine's own words, or what class it was."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


class Placement:
    """Where the replicas of a pool come from: one engine that is there already, which has one life."""

    restarts = False
    """Whether an engine that is lost can be started again."""
    urls: list[str] | None = None
    """Those of the replicas, where they are servers that others started."""
    follows = False
    """Whether there are to be as many replicas as there is room for."""
    count = 0
    """How many there is room for at first, where it is the placement that says so."""

    def __init__(self, engine: TokenSource) -> None:
        self.engine = engine

    async def start(self, name: str) -> TokenSource:
        """Return a replica's engine, or raise EngineError; a start that is cancelled leaves nothing behind."""
        return self.engine

    def share(self, source: WeightSource) -> WeightSource:
        """Check new weights, and return them in the form in which the engines, now and later, are given them."""
        source.check()
        return source

    @property
    def starts_afresh(self) -> bool:
        """Whether a replica that starts again has the weights that it was built with; a server of others has others."""
        return True

    def admit(self, url: str | None) -> None:
        """Have a place for one more replica, a server at ``url`` or one that is started; EngineError: there is none.

        A place keeps its number, and so its url, also when its replica does not come or has left.
        """
        raise EngineError("this pool is of one engine that was given; give an engine's spec to have replicas that come")

    @property
    def waiting(self) -> AbstractSet[str]:
        """The names of those that are to start, and have no place yet."""
        return frozenset()

    def room(self) -> int:
        """Return how many more replicas would find a place now. Blocks."""
        return 0

    def decline(self, name: str) -> None:
        """Leave the place of a replica empty."""

    def advice(self) -> str:
        """Say what may keep a replica from starting in time, and what to try."""
        return "give it more time with start_timeout"

    def close(self) -> None:
        """Free what the replicas shared; they are closed by now."""


class LocalPlacement(Placement):
    """Replicas in this process, each an engine that ``build`` makes from its name, in a thread.

    Args:
        build: makes one.
        urls: those of the replicas, in the order of their numbers, where they are servers that others started;
            ``build`` looks them up.
    """

    restarts = True

    def __init__(self, build: Callable[[str], TokenSource], urls: list[str] | None = None) -> None:
        self._build, self.urls = build, urls

    @property
    def starts_afresh(self) -> bool:
        """See :class:`Placement`."""
        return self.urls is None

    def admit(self, url: str | None) -> None:
        """See :class:`Placement`."""
        if (url is None) != (self.urls is None):
            raise EngineError(
                "replicas of this engine are started here, and have no url of their own"
                if self.urls is None
                else "a replica of this engine is a server that others started; say its url"
            )
        if self.urls is not None and url is not None:
            self.urls.append(url)

    async def start(self, name: str) -> TokenSource:
        """Build a replica's engine."""
        wanted = True

        def build() -> TokenSource:
            with _BUILDING:
                if not wanted:
                    raise EngineError(f"replica '{name}' was given up before it started")
                return self._build(name)

        try:
            return await asyncio.get_running_loop().run_in_executor(_threads, build)
        finally:
            wanted = False


@dataclass(frozen=True, slots=True)
class PoolTimes:
    """Seconds that a pool waits for its replicas."""

    start: float = 600.0  # for one to start
    # For one that has work and is not held to say anything; also for the first chunk of a request that it has.
    silence: float = SILENCE
    ping_every: float = PING_EVERY
    ping: float = 30.0  # for the answer to a ping; then it is given up
    order: float = 60.0  # for one to pause, resume, sleep or wake
    update: float = 600.0  # for one to load weights
    close: float = 2.0  # for the last tokens of what is under way when the pool is closed
    backoff: float = 0.5  # before one is started again for the first time; twice as long each time after


@dataclass(eq=False, slots=True)
class Replica(ReplicaView):
    """One slot of a pool: an engine, and after its loss the engine that replaces it."""

    state: Literal["starting", "up", "dead", "left"] = "starting"
    leaving: bool = False  # whether it is given nothing more
    task: asyncio.Task[None] | None = None  # what starts it again
    engine: TokenSource | None = None
    process: Process | None = None  # the engine again, if it works in another process and so may be gone
    keeper: SessionKeeper | None = None  # the engine again, if it keeps something for sessions
    requests: int = 0  # sent to it
    tokens: int = 0  # got from it
    earlier_bytes: int = 0  # that its earlier engines have moved
    restarts: int = 0
    moved: int = 0  # requests that it failed and that went on at another replica, or in its next life
    cause: str = ""  # why it was last lost
    failures: int = 0  # dispatches it failed since it last finished a request
    losses: int = 0  # lives it lost since it last finished a request
    last_active: float = 0.0  # when it last sent a chunk, was given a request, or was resumed
    worked: float = 0.0  # seconds of work in which it sampled `sampled` tokens, the older ones counted less
    sampled: float = 0.0
    mixed: frozenset[str] | None = frozenset()  # tensors that it may have of an update that failed; `None`: any
    asked_by: int = 0  # when its present engine was asked how busy it is, so many pools shared it; 0: it was not
    looked_at: bool = False  # whether nothing has come from it, or has ended there, since it was asked how busy it is
    load_failed: bool = False  # whether it was logged that its engine does not say how busy it is

    @property
    def live(self) -> TokenSource:
        """The present engine of a replica that is up."""
        assert self.engine is not None
        return self.engine

    @property
    def wire_bytes(self) -> int:
        """How many bytes of requests and answers its engines have moved to other processes and back."""
        return self.earlier_bytes + (self.engine.wire_bytes if isinstance(self.engine, OverWire) else 0)

    def live_on(self, engine: TokenSource | None) -> None:
        """Have another engine, or none."""
        self.earlier_bytes = self.wire_bytes
        self.engine, self.process, self.asked_by = engine, engine if isinstance(engine, Process) else None, 0
        self.keeper = engine if isinstance(engine, SessionKeeper) else None

    @property
    def failure(self) -> EngineError | None:
        """Why its engine is gone; ``None``: it is there, as far as is known."""
        return None if self.process is None else self.process.failure

    def busy(self) -> Load:
        """Return how busy its engine says it is; one that fails to say so, or has no :class:`Load`, says nothing."""
        try:
            load = self.live.load()
            if isinstance(load, Load):
                return load
            why = f"it returned {load!r:.120}"
        except Exception as error:  # whatever an engine raises is the engine's failure
            why = describe(error)
        if not self.load_failed:
            self.load_failed = True
            logger.warning("the engine does not say how busy it is (%s); it is given few requests at a time", why)
        return Load()

    async def open(self, placement: Placement, seconds: float) -> None:
        """Start a new engine in its place, within so many seconds; EngineError if that fails or takes longer."""
        try:
            async with asyncio.timeout(seconds):
                self.live_on(await placement.start(self.name))
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
            self.live_on(None)

    def mix(self, names: frozenset[str] | None) -> None:
        """Learn that it may have some of these tensors of an update that failed."""
        self.mixed = None if names is None or self.mixed is None else self.mixed | names

    def measure_pace(self, tokens: int, now: float) -> None:
        """Learn how fast it works: it has just sent ``tokens``."""
        self.sampled += tokens
        self.worked += max(1, self.in_flight) * (now - self.last_active)
        if self.worked > 1.0:
            self.pace = self.sampled / self.worked
        if self.worked > PACE_MEMORY:
            self.worked, self.sampled = self.worked / 2, self.sampled / 2

    def begin(self, now: float) -> None:
        """Reset its counts for a new engine or event loop."""
        self.in_flight = self.waiting = self.failures = 0
        self.allowed = FIRST
        self.pace = self.worked = self.sampled = 0.0
        self.last_active = now


def rows_of(replicas: Sequence[Replica], urls: Sequence[str] | None) -> Rows:
    """Return what is known of replicas, as plain data, for who looks at a run from elsewhere."""
    names = ("name", "state", "in_flight", "requests", "tokens", "restarts", "cause")
    rows = [{name: getattr(replica, name) for name in names} for replica in replicas]
    for row, replica, url in zip(rows, replicas, urls or [""] * len(replicas), strict=True):
        row |= {"url": url, "weight_version": None if replica.engine is None else replica.engine.weight_version}
        if replica.leaving and replica.state != "left":
            row["state"] = "leaving"
    return rows


class RequestHolder(Protocol):
    """Who has the requests: what is told of the replicas' lives."""

    def replica_lost(self, replica: Replica, why: str) -> None:
        """Take back what a replica has."""

    def replicas_changed(self) -> None:
        """Send what waits: a replica has come, or it is known which ones are there."""

    def hold_changed(self) -> None:
        """Let time stand still while all are held, or go on."""

    def all_lost(self, error: EngineError) -> None:
        """End everything: no replica will ever come back."""
