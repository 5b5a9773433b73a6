"""Replicas in this process that can be killed, and what each of them said before it died.

Invariant: the log is the replicas' own: every request that reached one and every chunk that left one, over all lives,
in the order in which that happened. What a life had sampled and not told when it ended was heard by nobody, so it
stands nowhere; what one that still lives has kept to itself stands at the end, where a law finds it in no stream.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from fsm_rollout.engines.pool import LocalPlacement
from fsm_rollout.engines.protocol import Chunk, Engine, Load, ReplicaLost, Request
from fsm_rollout.engines.scripted.engine import Logged, ScriptedEngine


class MortalReplica:
    """One life of a scripted engine; ``log`` is that of all lives."""

    def __init__(self, name: str, engine: ScriptedEngine, log: list[Logged]) -> None:
        self.name = name
        self.scripted = engine
        self.failure: ReplicaLost | None = None
        self.tokenizer, self.max_context, self.eos_ids = engine.tokenizer, engine.max_context, engine.eos_ids
        self._log = log

    @property
    def killed(self) -> bool:
        """Whether this life is over."""
        return self.failure is not None

    @property
    def weight_version(self) -> int:
        """The scripted engine's."""
        return self.scripted.weight_version

    def kill(self) -> None:
        """End this life as the death of a process does: nothing more leaves it, nothing more reaches it."""
        if not self.killed:
            self.failure = ReplicaLost(f"the process of {self.name} was killed")
            self.scripted.crash(str(self.failure))

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Start a dispatch; what is sent to the dead reaches nobody."""
        self._live()
        now = asyncio.get_running_loop().time()
        self._log += [Logged(now, request) for request in requests]
        return self._heard(self.scripted.generate(requests))

    async def _heard(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        loop = asyncio.get_running_loop()
        async for chunk in chunks:
            if not self.killed:  # else the error comes next
                self._log.append(Logged(loop.time(), chunk))
                yield chunk

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Hand the abort on."""
        await self.scripted.abort(request_ids)

    async def update_weights(self, weights: Any, version: int | None = None) -> int:
        """Hand the weights on."""
        self._live()
        return await self.scripted.update_weights(weights, version)

    async def pause(self) -> None:
        """Hand the order on."""
        self._live()
        await self.scripted.pause()

    async def resume(self) -> None:
        """Hand the order on."""
        self._live()
        await self.scripted.resume()

    async def sleep(self) -> None:
        """Hand the order on."""
        self._live()
        await self.scripted.sleep()

    async def wake(self) -> None:
        """Hand the order on."""
        self._live()
        await self.scripted.wake()

    def load(self) -> Load:
        """Return the scripted engine's."""
        return self.scripted.load()

    async def aclose(self) -> None:
        """Close the scripted engine."""
        await self.scripted.aclose()

    def _live(self) -> None:
        if self.failure is not None:
            raise self.failure


class MortalReplicas(LocalPlacement):
    """Makes replicas of engines that keep a log, and knows every life there was.

    Args:
        build: makes the engine of one life from its replica's name; with ``log=True``.
    """

    def __init__(self, build: Callable[[str], ScriptedEngine]) -> None:
        super().__init__(build)
        self.lives: dict[str, list[MortalReplica]] = defaultdict(list)
        self.told: list[Logged] = []
        """What has reached and left them so far."""
        self._scripted = build

    async def start(self, name: str) -> Engine:
        """Begin another life at once: a thread would end at any step of the loop, and no two runs would be the same."""
        life = MortalReplica(name, self._scripted(name), self.told)
        self.lives[name].append(life)
        return life

    def share(self, weights: Any) -> Any:
        """Hand the weights on as they are: scripted engines count updates and look at no tensor."""
        return weights

    def kill(self, number: int) -> None:
        """Kill a replica, counted from 0 and round again; one that is dead stays so until it is started again."""
        names = list(self.lives)
        self.lives[names[number % len(names)]][-1].kill()

    def log(self, up: Iterable[str]) -> list[Logged]:
        """Return the whole log, as it stands while the replicas named in ``up`` take part."""
        heard = {id(line.what) for line in self.told}
        living = [self.lives[name][-1] for name in up]
        return self.told + [
            line
            for life in living
            if not life.killed
            for line in life.scripted.log
            if isinstance(line.what, Chunk) and len(line.what.ids) and id(line.what) not in heard
        ]
