"""A scripted engine with the memory and the pace of a real server.

Invariant: what is said comes from the script, and when it comes, and how much of a prompt is computed again, from
:mod:`fsm_rollout.engines.scripted.memory`. It runs in virtual time, like the engine that it is. So what a schedule of
trajectories costs can be known without a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsm_rollout.engines.protocol import Load
from fsm_rollout.engines.scripted.engine import Script, ScriptedEngine, _Answer
from fsm_rollout.engines.scripted.memory import Memory, SimulatedServer, TokenCounts

if TYPE_CHECKING:
    import torch


def scripted(turns: Script, *, memory: Memory | None = None, **options: Any) -> ScriptedEngine:
    """Return a scripted engine, which has the memory of a server if one is given."""
    return ScriptedEngine(turns, **options) if memory is None else SimulatedEngine(turns, memory=memory, **options)


class SimulatedEngine(ScriptedEngine):
    """See the module.

    Args:
        turns: the script; its ``delay`` counts for nothing here.
        memory: how much the server keeps, and how long its work takes.
        max_context: the longest input plus output, in tokens; never more than there is room for.
        max_running: how many requests run at once; the others queue.
        unit: how many tokens an id stands for, where a simulation counts in blocks.
        options: as of :class:`ScriptedEngine`.
    """

    def __init__(
        self,
        turns: Script,
        *,
        memory: Memory,
        max_context: int = 32_768,
        max_running: int | None = None,
        unit: int = 1,
        **options: Any,
    ) -> None:
        self._server = SimulatedServer(memory, max_running, unit)
        super().__init__(turns, max_context=min(max_context, self._server.max_context), **options)
        self._asked: dict[str, _Answer] = {}  # those of `_waiting` that the server has
        self._next: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def counts(self) -> TokenCounts:
        """What it has done so far, in tokens."""
        return self._server.counts

    @property
    def evicted_tokens(self) -> int:
        """How many tokens were evicted so far."""
        return self._server.cache.evicted

    def load(self) -> Load:
        """Return how busy the server is, and what it keeps."""
        server = self._server
        running, waiting = server.busy
        return Load(running, waiting, server.used, server.memory.tokens, server.cache.evictable)

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Keep what these have said no longer than what nobody holds."""
        sessions = list(sessions)
        super().end_sessions(sessions)
        self._server.end_sessions(sessions)

    async def pause(self) -> None:
        """Let time stand still for what is under way, and admit nothing."""
        self._catch_up()
        self._paused = True

    async def sleep(self) -> None:
        """See :class:`ScriptedEngine`; what was computed is forgotten."""
        self._catch_up()
        await super().sleep()
        self._server.forget()

    async def update_weights(self, weights: str | Path | Mapping[str, torch.Tensor], version: int | None = None) -> int:
        """See :class:`ScriptedEngine`; what was computed with the old ones is forgotten."""
        self._catch_up()
        self._server.forget()
        self._set_timer(soon=True)
        return await super().update_weights(weights, version)

    async def aclose(self) -> None:
        """End everything with "abort"."""
        await super().aclose()
        self._set_timer()

    # -- the server ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Have the server take what waits, together with what else comes in this pass of the loop."""
        for request_id, answer in self._waiting.items():
            if request_id not in self._asked:
                self._asked[request_id] = answer
                request, answer.plan = answer.request, self._plan(answer.request)
                pieces = [piece[0] for piece in answer.plan.pieces]
                may_say = min(request.sampling.max_tokens, self.max_context - len(request.ids))
                self._server.ask(request_id, request.ids, pieces, may_say, request.session)
                if answer.stream.loop is not self._loop:  # whose clock is another
                    self._loop = answer.stream.loop
                    self._server.skip(self._loop.time())
        self._set_timer(soon=True)

    def _schedule(self, answer: _Answer, delay: float) -> None:
        """Nothing: the server says when the next piece is there."""

    def _go_on(self) -> None:
        if not (self._paused or self._asleep) and self._loop is not None and not self._loop.is_closed():
            self._server.skip(self._loop.time())
            self._admit()

    def _abort(self, request_ids: Iterable[str]) -> None:
        """End these requests now, with what they have said by then, which a server streams."""
        self._catch_up()
        request_ids = list(request_ids)
        for request_id in request_ids:
            answer = self._asked.get(request_id)
            if answer is not None and (said := self._server.unspoken(request_id)):
                ids, logprobs, *_ = answer.plan.pieces[answer.emitted]
                self._emit(answer, ids[:said], logprobs[:said])
        super()._abort(request_ids)

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        self._asked.pop(request_id, None)
        self._server.drop([request_id])

    def _set_timer(self, *, soon: bool = False) -> None:
        """Look at the server when something happens next, or in this pass of the loop."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._paused or self._asleep or self._loop is None:
            return
        at = self._loop.time() if soon else self._server.next_at
        if at is not None:
            self._next = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._catch_up()
        self._set_timer()

    def _catch_up(self) -> None:
        """Give what the server has said by now."""
        if self._paused or self._asleep or self._loop is None or self._loop.is_closed():
            return
        for what, request_id, cached in self._server.advance(self._loop.time()):
            if (answer := self._asked.get(request_id)) is None:
                continue
            if what == "admitted":
                self._running[request_id] = self._waiting.pop(request_id)
                self._emit(answer, cached_tokens=cached)
            else:
                self._next_piece(answer)
