"""The answers of one dispatch on their way from an engine to whoever iterates over them.

Invariant: chunks come out in the order in which they went in, until every request has had its last one; then the
iteration ends. Closing the iteration early tells the engine which requests have no reader any more, so that it stops
sampling for them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Container, Iterable, Sequence

import numpy as np

from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.errors import EngineError


def refusal(request: Request, max_context: int, vocabulary: int | None = None) -> str | None:
    """Return the ``error`` of a request that can only fail (a token outside the vocabulary, say); None: a good one."""
    if len(request.ids) + 1 > max_context:
        return (
            f"PromptTooLong: {len(request.ids)} tokens and one to sample do not fit into a window of {max_context}; "
            f"shorten the prompt, set limits.context_tokens, or reset the context"
        )
    if not len(request.ids):
        return "EngineError: a request has no ids; give at least one token"
    if request.sampling.max_tokens < 1:
        return f"EngineError: max_tokens is {request.sampling.max_tokens}; ask for at least one token"
    if vocabulary is not None:
        highest = int(np.frombuffer(request.ids, np.uint32).max())  # a negative one is very high
        if highest >= vocabulary:
            return (
                f"EngineError: token {np.uint32(highest).astype(np.int32)} is none of the model's {vocabulary}; is the "
                f"tokenizer its own?"
            )
    return None


class ChunkStream:
    """The chunks of one dispatch. Belongs to one event loop; only :meth:`__aiter__`'s consumer awaits it.

    Args:
        requests: the dispatch.
        abandon: called with the ids of requests that have no reader any more.
        under_way: the ids of the engine's other requests.

    Raises:
        EngineError: an id is under way already, or twice in the dispatch.
    """

    def __init__(
        self, requests: Iterable[Request], abandon: Callable[[list[str]], object], under_way: Container[str] = ()
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._open: dict[str, None] = {}
        for request in requests:
            name = request.request_id
            if name in under_way or name in self._open:
                raise EngineError(f"request id '{name}' is under way already; give every request its own")
            self._open[name] = None
        self._chunks: deque[Chunk] = deque()
        self._error: EngineError | None = None
        self._news = asyncio.Event()  # set when a chunk has come, or the error
        self._abandon = abandon

    @property
    def request_ids(self) -> list[str]:
        """The requests that have not had their last chunk yet, in the order of the dispatch."""
        return list(self._open)

    def put(self, chunk: Chunk) -> None:
        """Add a chunk. One that follows its request's last is dropped: nobody listens."""
        if chunk.request_id not in self._open:
            return
        if chunk.finish_reason is not None:
            del self._open[chunk.request_id]
        self._chunks.append(chunk)
        self._news.set()

    def fail(self, error: EngineError) -> None:
        """End the iteration with ``error``, after the chunks that are there."""
        self._error = error
        self._open.clear()
        self._news.set()

    async def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks; raise the error given to :meth:`fail`."""
        try:
            while True:
                while self._chunks:
                    yield self._chunks.popleft()
                if self._error is not None:
                    raise self._error
                if not self._open:
                    return
                self._news.clear()
                await self._news.wait()
        finally:
            abandoned, self._open = list(self._open), {}
            if abandoned:
                self._abandon(abandoned)


# Called with an event loop that is closed, to which nothing can be delivered.
Unheard = Callable[[asyncio.AbstractEventLoop], object]


def hand_over(parts: Iterable[tuple[ChunkStream, Chunk | EngineError]], unheard: Unheard) -> None:
    """Put chunks, or errors that end them, into streams from another thread, in one callback for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[ChunkStream, Chunk | EngineError]]] = defaultdict(list)
    for stream, part in parts:
        by_loop[stream.loop].append((stream, part))
    for loop, pairs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, pairs)
        except RuntimeError:
            unheard(loop)


def _put_all(pairs: Sequence[tuple[ChunkStream, Chunk | EngineError]]) -> None:
    for stream, part in pairs:
        stream.fail(part) if isinstance(part, EngineError) else stream.put(part)
