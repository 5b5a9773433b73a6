"""An engine under check: what may be asked of it, and how long its answers may take.

Invariant: whatever is awaited here ends. A call or an answer that does not come within ``patience`` seconds is a
:class:`ConformanceError` that names it, and so is an exception where the protocol allows none.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from fsm_rollout.engines.protocol import Chunk, Engine, Load, Request, SamplingParams
from fsm_rollout.testing.conformance.engine_answers import Answer, take
from fsm_rollout.testing.conformance.promises import ConformanceError
from fsm_rollout.trajectory.reasons import FinishReason
from fsm_rollout.trajectory.tokens import as_ids

T = TypeVar("T")

TEXTS = ("1", "What is (37 + 58) * 4?", "Count from 1 to 20: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12", "a b c d e f g h")
LONG = 4096
"""Tokens of a request that is to be under way until it is ended; a smaller window cuts it."""
TRIES = 3
"""How often something is tried that an engine may be too quick for: what is to be interrupted may end before."""
LATE = 1.0
"""Seconds after an order within which what comes may have been on its way."""


class Subject:
    """An engine, what it is asked, and what of it has been counted."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]] | None,
        *,
        deterministic: bool,
        patience: float,
        settle: float,
    ) -> None:
        self.engine, self.deterministic, self.patience, self.settle = engine, deterministic, patience, settle
        if prompts is None:
            prompts = [engine.tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
        self.prompts = [as_ids(list(prompt)) for prompt in prompts]
        self.requests = self.tokens = 0
        self.seeds_matter = False
        self._names = itertools.count()
        self._eos_ids = frozenset(engine.eos_ids)
        # Models have more rows than their tokenizers have tokens, for alignment.
        self.every_token = frozenset(range(len(engine.tokenizer) + 4096)) | self._eos_ids

    # -- asking ---------------------------------------------------------------------------------------------------

    def name(self) -> str:
        """Return a request id that is new."""
        return f"check-{next(self._names)}"

    def request(self, prompt: int, max_tokens: int, turn: int = 0, **sampling: Any) -> Request:
        """Return a request whose content depends on the arguments only, under a new id."""
        sampling.setdefault("stop_ids", self._eos_ids)
        return Request(
            self.name(),
            self.prompts[prompt % len(self.prompts)],
            SamplingParams(max_tokens, **sampling),
            trajectory_id=f"check-{prompt}",
            agent="check",
            context="main",
            turn=turn,
        )

    def start(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Start a dispatch."""
        self.requests += len(requests)
        stream = self.engine.generate(requests)
        if inspect.iscoroutine(stream):
            stream.close()
            raise ConformanceError(
                1, "generate() gave a coroutine, which nobody can iterate over; "
                "write 'async def generate' with a 'yield' in it, or 'def generate' that returns an async generator"
            )  # fmt: skip
        if not isinstance(stream, AsyncIterator):
            raise ConformanceError(1, f"generate() gave {stream!r:.80}, which is no async iterator")
        return stream

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The loop's time."""
        return asyncio.get_running_loop().time()

    async def next(self, stream: AsyncIterator[Chunk], until: float) -> Chunk | None:
        """Return the next chunk, ``None`` at the end.

        Raises:
            TimeoutError: there is none at the time ``until``.
        """
        if self.now > until:  # an iterator that never waits lets no timeout through
            raise TimeoutError
        try:
            async with asyncio.timeout_at(None if until == math.inf else until) as limit:
                return await anext(stream)
        except StopAsyncIteration:
            return None
        except TimeoutError as error:
            if limit.expired():
                raise
            raise ConformanceError(1, f"generate() raised TimeoutError: {error}") from error

    async def first(self, stream: AsyncIterator[Chunk], answers: Mapping[str, Answer]) -> Chunk:
        """Take the first chunk of a dispatch; it says that a request was admitted."""
        names = ", ".join(answers)
        try:
            chunk = await self.next(stream, self.now + self.patience)
        except TimeoutError:
            raise ConformanceError(7, f"no first chunk for {names} within {self.patience:g} s") from None
        if chunk is None:
            raise ConformanceError(1, f"the iterator ended without a chunk for {names}")
        take(chunk, answers)
        return chunk

    async def under_way(self) -> tuple[AsyncIterator[Chunk], Answer]:
        """Start a long request, and return its chunks and what has come of it once it is admitted."""
        answer = Answer(self.request(0, LONG, ignore_eos=True))
        stream = self.start([answer.request])
        await self.first(stream, {answer.request.request_id: answer})
        return stream, answer

    async def drain(self, stream: AsyncIterator[Chunk], answers: Mapping[str, Answer], until: float = math.inf) -> None:
        """Take all that comes.

        Raises:
            TimeoutError: it has not ended at the time ``until``.
        """
        while (chunk := await self.next(stream, until)) is not None:
            take(chunk, answers)
            await asyncio.sleep(0)  # chunks without end keep nobody else from running

    async def collect(self, *requests: Request) -> list[Answer]:
        """Get all answers of one dispatch, checking their form."""
        answers = {request.request_id: Answer(request) for request in requests}
        try:
            await self.drain(self.start(requests), answers, self.now + self.patience)
        except TimeoutError:
            late = [name for name, answer in answers.items() if answer.finish_reason is None]
            what = f"no last chunk for {', '.join(late)}" if late else "the iterator did not end after the last chunk"
            raise ConformanceError(1, f"{what} within {self.patience:g} s") from None
        self.whole(answers)
        return list(answers.values())

    @asynccontextmanager
    async def reading(
        self, stream: AsyncIterator[Chunk], answers: Mapping[str, Answer]
    ) -> AsyncIterator[asyncio.Task[None]]:
        """Take what comes meanwhile; gives the task that does so."""
        task = asyncio.get_running_loop().create_task(self.drain(stream, answers))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=LATE)
            if task.done() and not task.cancelled():
                task.exception()  # whoever wanted it has it

    async def end(self, reading: asyncio.Task[None]) -> bool:
        """Wait for the end of what is read; return whether it came in time."""
        await asyncio.wait({reading}, timeout=self.patience)
        if reading.done():
            reading.result()
        return reading.done()

    async def until(self, holds: Callable[[], bool]) -> bool:
        """Wait until something holds; return whether it did in time."""
        last = self.now + self.patience
        while not holds():
            if self.now > last:
                return False
            await asyncio.sleep(self.settle / 10)
        return True

    async def stop_listening(self, stream: AsyncIterator[Chunk]) -> None:
        """Close a dispatch's iterator before its end."""
        aclose = getattr(stream, "aclose", None)  # an async generator, in all engines there are
        if aclose is None:
            raise ConformanceError(
                6, f"generate() gave a {type(stream).__name__} without aclose(): nobody can stop listening to it; "
                "return an async generator"
            )  # fmt: skip
        await self.call(6, aclose, what="aclose() of what generate() gave")

    # -- orders ---------------------------------------------------------------------------------------------------

    async def call(
        self, invariant: int, order: Callable[..., Awaitable[T]], *arguments: Any, what: str | None = None
    ) -> T:
        """Await one of the engine's methods; it must return in time."""
        what = f"{order.__name__}()" if what is None else what
        try:
            async with asyncio.timeout(self.patience) as limit:
                waits_for: Any = order(*arguments)
                if not inspect.isawaitable(waits_for):
                    raise ConformanceError(invariant, f"{what} gave {waits_for!r:.80} at once; write 'async def'")
                result: T = await waits_for
                return result
        except ConformanceError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise ConformanceError(invariant, f"{what} did not return within {self.patience:g} s") from None
            raise ConformanceError(invariant, f"{what} raised {type(error).__name__}: {error}") from error

    def load(self) -> Load:
        """Return the engine's load, checking its form."""
        load = self.engine.load()
        if not isinstance(load, Load) or min(load.running, load.waiting, load.used_tokens) < 0:
            raise ConformanceError(6, f"load() gave {load}")
        return load

    # -- judging --------------------------------------------------------------------------------------------------

    def whole(self, answers: Mapping[str, Answer]) -> None:
        """Check that all have come to a proper end."""
        for answer in answers.values():
            answer.whole(self.engine.max_context)
            self.tokens += len(answer.ids)

    async def as_alone(self, invariant: int, answer: Answer, what: str) -> None:
        """Check that an interrupted request got the tokens that it gets uninterrupted."""
        if not self.deterministic or not answer.ids:
            return
        sampling = replace(answer.request.sampling, max_tokens=len(answer.ids))
        (alone,) = await self.collect(replace(answer.request, request_id=self.name(), sampling=sampling))
        if alone.ids != answer.ids:
            first = next(i for i, pair in enumerate(zip(alone.ids, answer.ids, strict=True)) if pair[0] != pair[1])
            raise ConformanceError(
                invariant, f"a request that was {what} got other tokens than alone: from the {first}. (from 0) on "
                f"{answer.ids[first : first + 8]} instead of {alone.ids[first : first + 8]}"
            )  # fmt: skip

    def good(self, answers: Iterable[Answer]) -> None:
        """Check that none was aborted."""
        for answer in answers:
            if answer.finish_reason == FinishReason.ABORT:
                error = answer.chunks[-1].error
                raise ConformanceError(1, f"'{answer.request.request_id}' ended with 'abort', error {error!r}")


@contextmanager
def within(check: str, invariant: int) -> Iterator[None]:
    """Name the check in every error of the block, and make one of ``invariant`` of what the engine raises there."""
    try:
        yield
    except ConformanceError as error:
        error.args = (f"{error} (check '{check}')",)
        raise
    except Exception as error:
        raise ConformanceError(
            invariant, f"the engine raised {type(error).__name__}: {error} (check '{check}')"
        ) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ConformanceError(
            invariant, f"the engine raised CancelledError, and nobody had cancelled anything (check '{check}')"
        ) from error
