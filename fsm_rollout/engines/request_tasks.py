"""Engines that ask for each request on its own, and wait for its answer in a task.

Invariant: each request has exactly one last chunk: what its task returns, or, where that is cancelled (perhaps before
it has begun) or fails, an abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial

from fsm_rollout.engines.chunk_stream import ChunkStream
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.errors import describe
from fsm_rollout.trajectory.enums import FinishReason


class RequestTasks:
    """See the module."""

    weight_version = 0

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Chunk]] = {}

    async def _answer(self, request: Request, stream: ChunkStream) -> Chunk:
        """Put all chunks of a request but the last into the stream, and return that."""
        raise NotImplementedError

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Ask at once (not at the first ``anext``); see the protocol."""
        stream = ChunkStream(requests, self._abort, self._tasks)
        for request in requests:
            task = asyncio.get_running_loop().create_task(self._answer(request, stream))
            self._tasks[request.request_id] = task
            task.add_done_callback(partial(self._end, request.request_id, stream))
        return aiter(stream)

    def _end(self, name: str, stream: ChunkStream, task: asyncio.Task[Chunk]) -> None:
        del self._tasks[name]
        failure = None if task.cancelled() else task.exception()
        if task.cancelled() or failure is not None:
            error = None if failure is None else describe(failure)
            stream.put(Chunk(name, weight_version=self.weight_version, finish_reason=FinishReason.ABORT, error=error))
        else:
            stream.put(task.result())

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if (task := self._tasks.get(request_id)) is not None:
                task.cancel()

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests now; what a server has said of them by then, or goes on to say, is not known."""
        self._abort(request_ids)
