"""What tests of the pool share: requests, replicas that things may be done to, and runs in virtual time."""

import asyncio
import inspect
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Chunk, Engine, ReplicaLost, Request, SamplingParams, TokenSource
from fsm_rollout.engines.replica import LocalPlacement, Placement, PoolTimes
from fsm_rollout.engines.retries import Tries
from fsm_rollout.engines.scripted.engine import Script, ScriptedEngine, Turn, scripted_logprob
from fsm_rollout.errors import EngineError
from fsm_rollout.testing import run_virtual
from fsm_rollout.trajectory.tokens import as_ids
from tests.embedded import tokenizer

TEXT = "hello, wonderful world"
EOS = tokenizer().eos_token_id
TIMES = PoolTimes(start=50, silence=40, ping_every=5, ping=10, order=10, update=20, close=2, backoff=1)


NOTICED = TIMES.ping_every + TIMES.ping + 5
"""Seconds in which a loss is seen, and mended."""


def script(request: Request) -> Turn:
    """Say the text after the request's name, in eight seconds."""
    return Turn(text=f"{request.trajectory_id}: {TEXT}", chunks=8, delay=1.0)


class Fragile(ScriptedEngine):
    """A scripted engine that a test may do things to."""

    def __init__(self, turns: Script = script, **options: Any) -> None:
        super().__init__(turns, tokenizer=tokenizer(), log=True, **options)
        self.failure: EngineError | None = None
        self.stuck = self.stopped = False
        self.refuses: set[str] = set()

    @property
    def asked(self) -> list[Request]:
        """All requests that it was ever asked for."""
        return [line.what for line in self.log if isinstance(line.what, Request)]

    def die(self) -> None:
        """End as a process does that is killed."""
        if self.failure is None:
            self.failure = ReplicaLost("its process is gone")
            self.crash("its process is gone")

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        self._check("generate")
        return self._unless_stuck(super().generate(requests))

    async def _unless_stuck(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            if self.stuck:
                await asyncio.Event().wait()
            yield chunk

    async def ping(self) -> None:
        if self.stuck:
            await asyncio.Event().wait()

    async def update_weights(self, weights: Any, version: int | None = None) -> int:
        self._check("update", "a shape does not fit")
        return await super().update_weights(weights, version)

    async def pause(self) -> None:
        self._check("pause")
        await super().pause()

    async def sleep(self) -> None:
        self._check("sleep")
        await super().sleep()

    async def aclose(self) -> None:
        self.stopped = True
        await super().aclose()

    def _check(self, what: str, refusal: str = "") -> None:
        if self.failure is not None:
            raise self.failure
        if what in self.refuses:
            raise EngineError(refusal or f"will not {what}")


class Place(LocalPlacement):
    """Starts fragile replicas, and keeps every one of them. ``build`` makes one, from its name."""

    def __init__(self, build: Callable[[str], Fragile] = lambda _: Fragile()) -> None:
        super().__init__(build)
        self.build = build
        self.lives: dict[str, list[Fragile]] = defaultdict(list)
        self.failing_starts = 0
        self.starts: Counter[str] = Counter()
        self.places, self.news = math.inf, asyncio.Event()  # how many there are, and what is set when that changes
        self.waits, self.declined = set[str](), 0

    @property
    def waiting(self) -> set[str]:
        return self.waits

    @property
    def taken(self) -> int:
        return sum(not life.stopped and life.failure is None for life in self.all)

    def room(self) -> int:
        return max(0, int(self.places) - self.taken - self.declined)

    def decline(self, name: str) -> None:
        self.declined += 1

    async def start(self, name: str) -> Engine:
        self.starts[name] += 1
        self.waits.add(name)
        try:
            while self.taken >= self.places:
                self.news.clear()
                await self.news.wait()
        finally:
            self.waits.discard(name)
        if self.failing_starts > 0:
            self.failing_starts -= 1
            raise EngineError("no memory left")
        life = self.build(name)
        self.lives[name].append(life)
        return life

    def last(self, index: int = 0) -> Fragile:
        return self.lives[f"replica-{index}"][-1]

    @property
    def all(self) -> list[Fragile]:
        return [life for lives in self.lives.values() for life in lives]

    @property
    def asked(self) -> list[int]:
        """How many requests each life was ever asked for."""
        return [len(life.asked) for life in self.all]


def ask(name: str, turn: int = 0, ids: int = 3, max_tokens: int = 100, **sampling: Any) -> Request:
    """Return a request whose names are all ``name``."""
    params = SamplingParams(max_tokens, stop_ids=frozenset({EOS}), **sampling)
    names = {"trajectory_id": name, "group_id": name, "context": "main", "session": name}
    return Request(name, as_ids(range(65, 65 + ids)), params, turn=turn, **names)


async def done(*asked: PendingRequest) -> list[str | None]:
    """Wait for all of them, and return how they ended."""
    for pending in asked:
        await pending.done.wait()
    return [pending.finish_reason for pending in asked]


async def answers(client: EngineClient, *names: str) -> list[PendingRequest]:
    """Ask for all of them at once, and wait."""
    asked = [client.submit(ask(name)) for name in names]
    await done(*asked)
    return asked


def soon(client: EngineClient, *names: str) -> asyncio.Task[list[PendingRequest]]:
    """Ask for all of them at once, beside what else is done."""
    return asyncio.create_task(answers(client, *names))


def right(answer: PendingRequest, text: str | None = None) -> None:
    """Whether an answer is what the script says, with the logprobs of the right positions."""
    start = len(answer.request.ids)
    expected = [*tokenizer().encode(f"{answer.request.trajectory_id}: {TEXT}" if text is None else text), EOS]
    assert list(answer.ids) == expected
    assert list(answer.logprobs) == [scripted_logprob(token, start + i) for i, token in enumerate(expected)]
    assert (answer.finish_reason, answer.error) == ("stop", None)


def make(
    source: Placement | TokenSource, count: int = 1, *, router: Any = None, restarts: int = 3, silence: float = 40.0,
    sleeps: bool = False, **tries: Any,
) -> EnginePool:  # fmt: skip
    """Return a pool of replicas, or of an engine that is there already."""
    placement = source if isinstance(source, Placement) else Placement(source)
    times = replace(TIMES, silence=silence)
    return EnginePool(
        placement, count, times=times, router=router, restarts=restarts, sleeps=sleeps, tries=Tries(**tries)
    )


def run(source: Placement | TokenSource, body: Callable[[EngineClient], Any], count: int = 1, **options: Any) -> Any:
    """Run ``body(client)`` in virtual time and close the pool; no replica may be left."""

    async def main() -> Any:
        pool = make(source, count, **options)
        try:
            return await body(EngineClient(pool))
        finally:
            await pool.aclose()

    result = run_virtual(main())
    assert not isinstance(source, Place) or all(life.stopped for life in source.all)
    return result


def pooled(
    count: int = 1, turns: Script = script, engine: dict[str, Any] | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of ``async def test(client, place, …)``: on so many replicas, with ``options`` of :func:`make`.

    Arguments of the test that are called as options are these; ``engine`` are those of each replica's engine.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @wraps(body)
        def test(**arguments: Any) -> None:
            place = Place(lambda _: Fragile(turns, **engine or {}))
            chosen = {"count": count} | options
            run(
                place,
                lambda client: body(client, place, **arguments),
                **chosen | {name: value for name, value in arguments.items() if name in chosen},
            )

        signature = inspect.signature(body)
        of_pytest = [each for name, each in signature.parameters.items() if name not in ("client", "place")]
        test.__signature__ = signature.replace(parameters=of_pytest, return_annotation=None)  # type: ignore[attr-defined]
        return test

    return decorate


def scripted(*turns: Turn, **options: Any) -> ScriptedEngine:
    """Return an engine for a pool that has no other."""
    return ScriptedEngine(list(turns), tokenizer=tokenizer(), log=True, **options)


def now() -> float:
    """Return the virtual time."""
    return asyncio.get_running_loop().time()


def states(client: EngineClient) -> list[str]:
    """Return where the replicas' lives stand."""
    return [replica.state for replica in client.pool.replicas]


def restarts(client: EngineClient) -> list[int]:
    """Return how often each replica was started again."""
    return [replica.restarts for replica in client.pool.replicas]
