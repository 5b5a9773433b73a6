"""Engines that can be killed, alone and in a pool, and what they know of their failures."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsm_rollout.engines.chunk_stream import ChunkStream
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.replica import PoolTimes
from fsm_rollout.engines.scripted.engine import Logged, ScriptedEngine
from fsm_rollout.engines.scripted.script import Script
from fsm_rollout.testing.simulation.stand_ins import MortalReplica, MortalReplicas
from tests.embedded import tokenizer


@dataclass
class Losses:
    """What the engines know of their own failures: over all lives, as a turn that mends has been tried in all."""

    tries: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How often each turn was asked for that fails a number of times."""
    failed: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    """How many tries of a generation (trajectory, context, turn) an engine has failed, whatever the reason."""

    def add(self, request: Request) -> None:
        self.failed[request.trajectory_id, request.context, request.turn] += 1

    def most(self, trajectory_id: str) -> int:
        """How many tries the unluckiest generation of a trajectory has lost."""
        return max((count for (name, *_), count in self.failed.items() if name == trajectory_id), default=0)


class Mortal(ScriptedEngine):
    """A scripted engine whose process can be killed: every generation under way fails with it."""

    def __init__(self, turns: Script, losses: Losses, **options: Any) -> None:
        super().__init__(turns, tokenizer=tokenizer(), log=True, **options)
        self._failed = losses.tries
        self.losses = losses

    def _next_piece(self, answer: Any) -> None:
        if answer.plan.error is not None and answer.emitted + 1 >= len(answer.plan.pieces):
            self.losses.add(answer.request)
        super()._next_piece(answer)

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        return self._heard(requests, super().generate(requests))

    async def _heard(self, requests: Sequence[Request], chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        """Count what nobody listens to any more as lost: its replica fell for other requests' failures."""
        unended = {request.request_id: request for request in requests}
        try:
            async for chunk in chunks:
                if chunk.finish_reason is not None:
                    unended.pop(chunk.request_id, None)
                yield chunk
        except (asyncio.CancelledError, GeneratorExit):
            for request in unended.values():
                self.losses.add(request)
            raise

    def _crash(self, answers: ChunkStream, message: str) -> None:
        under_way = self._running | self._waiting
        for request_id in answers.request_ids:
            self.losses.add(under_way[request_id].request)
        super()._crash(answers, message)

    def kill(self, number: int) -> None:
        self.crash("killed")

    @property
    def living(self) -> list["Mortal"]:
        return [self]

    @property
    def busy(self) -> list[str]:
        return [*self._running, *self._waiting]

    async def fail(self, request_id: str) -> None:
        """End a request that nobody asked to end."""
        self.losses.add((self._running | self._waiting)[request_id].request)
        await self.abort([request_id])


class MortalPool(EnginePool):
    """A pool of such engines, whose replicas are killed one at a time."""

    def __init__(self, turns: Script, losses: Losses, count: int, **options: Any) -> None:
        self.lives = MortalReplicas(lambda name: Mortal(turns, losses, replica=name, **options))
        super().__init__(self.lives, count, times=PoolTimes(ping_every=7.0, ping=1.0))

    def kill(self, number: int) -> None:
        life = list(self.lives.lives.values())[number % len(self.lives.lives)][-1]
        life.kill()

    @property
    def living(self) -> list["Mortal"]:
        lives = [self.lives.lives[each.name][-1] for each in self.replicas if each.state == "up"]
        return [engine_of(life) for life in lives if life.failure is None]

    @property
    def busy(self) -> list[str]:
        return [request_id for engine in self.living for request_id in engine.busy]

    async def fail(self, request_id: str) -> None:
        await next(engine for engine in self.living if request_id in engine.busy).fail(request_id)

    @property
    def log(self) -> list[Logged]:
        return self.lives.log(each.name for each in self.replicas if each.state == "up")


def engine_of(life: MortalReplica) -> Mortal:
    assert isinstance(life.scripted, Mortal)
    return life.scripted
