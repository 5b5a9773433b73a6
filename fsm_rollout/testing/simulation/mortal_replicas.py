"""Replicas in this process that can be killed, and what each of them said before it died.

Invariant: the log is the replicas' own: every request that reached one and every chunk that left one, over all lives,
in the order in which that happened. What a life had sampled and not told when it ended was heard by nobody, so it
stands nowhere; what one that still lives has kept to itself stands at the end, where a law finds it in no stream.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fsm_rollout.engines.packing import Flush
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.replicas import EngineFacts, LocalPlacement, LocalReplica, Order, ReplicaLost, Weights
from fsm_rollout.engines.scripted.engine import Logged, ScriptedEngine


class MortalReplica(LocalReplica):
    """One life of a scripted engine; ``log`` is that of all lives."""

    def __init__(self, name: str, engine: ScriptedEngine, log: list[Logged]) -> None:
        super().__init__(name, lambda: engine)
        self.scripted = engine
        self.killed = False
        self._log = log

    async def start(self) -> EngineFacts:
        """Have the engine at once: a thread would end at any step of the loop, and no two runs would be the same."""
        self._engine = self.scripted
        return EngineFacts(self.scripted.max_context, self.scripted.eos_ids, self.scripted.weight_version)

    def kill(self) -> None:
        """End this life as the death of a process does: nothing more leaves it, nothing more reaches it."""
        self.killed = True
        self._wake()

    def submit(self, requests: Sequence[Request]) -> None:
        """Start a dispatch; what is sent to the dead reaches nobody."""
        if not self.killed:
            now = asyncio.get_running_loop().time()
            self._log += [Logged(now, request) for request in requests]
            super().submit(requests)

    async def flush(self) -> Flush:
        """Wait for chunks, failures or the end."""
        flush = await super().flush()
        self._live()
        now = asyncio.get_running_loop().time()
        self._log += [Logged(now, chunk) for chunk in flush.chunks]
        return flush

    async def ping(self) -> None:
        """Answer, as the living do."""
        self._live()

    async def update_weights(self, weights: Weights, version: int) -> None:
        """Hand the weights on."""
        self._live()
        await super().update_weights(weights, version)

    async def order(self, what: Order) -> None:
        """Hand the order on."""
        self._live()
        await super().order(what)

    def _live(self) -> None:
        if self.killed:
            raise ReplicaLost(f"the process of {self.name} was killed")


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

    def replica(self, name: str) -> MortalReplica:
        """Begin another life."""
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
