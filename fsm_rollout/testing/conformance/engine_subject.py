"""An engine under check: what may be asked of it, what each answer must look like, and how long it may take.

Invariant: whatever is awaited here ends. A call or an answer that does not come within ``patience`` seconds is a
:class:`ConformanceError` that names it, and so is an exception where the protocol allows none. Every rule of an answer
follows from the request, the engine's window and :mod:`fsm_rollout.engines.protocol` alone.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fsm_rollout.engines.protocol import Chunk, Engine, Load, Request, SamplingParams
from fsm_rollout.testing.conformance.runner import ConformanceError, demand
from fsm_rollout.trajectory.reasons import FinishReason
from fsm_rollout.trajectory.tokens import as_ids

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

TEXTS = ("1", "What is (37 + 58) * 4?", "Count from 1 to 20: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12", "a b c d e f g h")
LONG = 4096
"""Tokens of a request that is to be under way until it is ended; a smaller window cuts it."""
TRIES = 3
"""How often something is tried that an engine may be too quick for: what is to be interrupted may end before."""
LATE = 1.0
"""Seconds after an order within which what comes may have been on its way."""


@dataclass(slots=True)
class Answer:
    """All chunks of one request so far."""

    request: Request
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [token for chunk in self.chunks for token in chunk.ids]

    @property
    def logprobs(self) -> list[float]:
        """All logprobs."""
        return [logprob for chunk in self.chunks for logprob in chunk.logprobs]

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended, ``None`` while it has not."""
        return self.chunks[-1].finish_reason if self.chunks else None

    def take(self, chunk: Chunk) -> None:
        """Append a chunk, checking it."""
        name, ids, logprobs = f"'{self.request.request_id}'", chunk.ids, chunk.logprobs
        # 1. Its form.
        demand(self.finish_reason is None, 1, f"{name} got another chunk after its last one: {chunk}")
        are_tokens = isinstance(ids, array) and ids.typecode == "i" and all(i >= 0 for i in ids)
        demand(are_tokens, 1, f"{name}: ids must be an array('i') of tokens, got {ids!r:.80}")
        are_floats = isinstance(logprobs, array) and logprobs.typecode == "f"
        demand(are_floats, 2, f"{name}: logprobs must be an array('f'), got {logprobs!r:.80}")
        demand(len(ids) == len(logprobs), 2, f"{name} got {len(ids)} ids with {len(logprobs)} logprobs")
        version = chunk.weight_version
        demand(isinstance(version, int), 8, f"{name}: weight_version must be an int, got {version!r}")
        wrong = next((p for p in logprobs if not (math.isfinite(p) and p <= 0)), None)
        demand(wrong is None, 2, f"{name} got the logprob {wrong}; it must be finite and at most 0")
        # 2. Its end.
        reason = chunk.finish_reason
        demand(reason in (None, *FinishReason), 1, f"{name} ended with finish_reason '{reason}'")
        explained = chunk.error is None or reason == FinishReason.ABORT
        demand(explained, 1, f"{name} got an error with finish_reason '{reason}', not 'abort'")
        # 3. Its place among the others.
        admitted = bool(self.chunks) or not len(ids) or chunk.error is not None
        demand(admitted, 7, f"{name}: the first chunk has tokens; an empty one must say it was admitted")
        only_waits = not chunk.waits or not (len(ids) or reason is not None)
        demand(only_waits, 7, f"{name} got a chunk that `waits` and brings something; it must be an empty one")
        renewed = not self.chunks or version >= self.chunks[-1].weight_version
        demand(renewed, 8, f"{name}: the weight version went back to {version}")
        self.chunks.append(chunk)

    def check_whole(self, max_context: int) -> None:
        """Check the answer now that it should have come to its end."""
        name, sampling, ids, reason = (
            f"'{self.request.request_id}'", self.request.sampling, self.ids, self.finish_reason,
        )  # fmt: skip
        # 1. Its length.
        demand(reason is not None, 1, f"the iterator ended, and {name} has had no last chunk")
        room = min(sampling.max_tokens, max_context - len(self.request.ids))
        fits = len(ids) <= room or self.chunks[-1].error is not None
        demand(fits, 1, f"{name} got {len(ids)} tokens; max_tokens and the window allow {room}")
        full = reason != FinishReason.LENGTH or len(ids) == room
        demand(full, 1, f"{name} ended with 'length' after {len(ids)} tokens; {room} were allowed")
        if sampling.ignore_eos:
            demand(reason != FinishReason.STOP, 3, f"{name} stopped, though ignore_eos was asked for")
            return
        # 2. Its stop token.
        if reason == FinishReason.STOP and sampling.stop_ids and (not ids or ids[-1] not in sampling.stop_ids):
            last = f"is {ids[-1]}" if ids else "does not exist"
            raise ConformanceError(3, f"{name} stopped, and its last token {last}: the stop token was dropped")
        early = next((i for i, token in enumerate(ids[:-1]) if token in sampling.stop_ids), None)
        if early is not None or (reason != FinishReason.STOP and ids and ids[-1] in sampling.stop_ids):
            where = len(ids) - 1 if early is None else early
            raise ConformanceError(3, f"{name} sampled the stop token {ids[where]} at {where} and did not stop there")


Answers = Mapping[str, Answer]


def take(chunk: Chunk, answers: Answers) -> None:
    """Give a chunk to the answer it belongs to."""
    demand(isinstance(chunk, Chunk), 1, f"generate() gave {chunk!r:.80}, which is no Chunk")
    known = chunk.request_id in answers
    stranger = f"a chunk for '{chunk.request_id}', which is no request of this dispatch ({', '.join(answers)})"
    demand(known, 1, stranger)
    answers[chunk.request_id].take(chunk)


class EngineSubject:
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
        self.weights: str | Path | Mapping[str, torch.Tensor] = {}
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
        demand(isinstance(stream, AsyncIterator), 1, f"generate() gave {stream!r:.80}, which is no async iterator")
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

    async def under_way(self) -> tuple[AsyncIterator[Chunk], Answer]:
        """Start a long request, and return its chunks and what has come of it once it is admitted."""
        answer = Answer(self.request(0, LONG, ignore_eos=True))
        name = answer.request.request_id
        stream = self.start([answer.request])
        try:
            chunk = await self.next(stream, self.now + self.patience)
        except TimeoutError:
            raise ConformanceError(7, f"no first chunk for {name} within {self.patience:g} s") from None
        if chunk is None:
            raise ConformanceError(1, f"the iterator ended without a chunk for {name}")
        take(chunk, {name: answer})
        return stream, answer

    async def drain(self, stream: AsyncIterator[Chunk], answers: Answers, until: float = math.inf) -> None:
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
        self.check_whole(answers)
        return list(answers.values())

    @asynccontextmanager
    async def reading(self, stream: AsyncIterator[Chunk], answers: Answers) -> AsyncIterator[asyncio.Task[None]]:
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
        counts = isinstance(load, Load) and min(load.running, load.waiting, load.used_tokens) >= 0
        demand(counts, 6, f"load() gave {load}")
        return load

    # -- judging --------------------------------------------------------------------------------------------------

    def check_whole(self, answers: Answers) -> None:
        """Check that all have come to a proper end."""
        for answer in answers.values():
            answer.check_whole(self.engine.max_context)
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

    def check_good(self, answers: Iterable[Answer]) -> None:
        """Check that none was aborted."""
        for answer in answers:
            name, error = answer.request.request_id, answer.chunks[-1].error if answer.chunks else None
            demand(answer.finish_reason != FinishReason.ABORT, 1, f"'{name}' ended with 'abort', error {error!r}")
