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
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any, TypeVar

from msgspec.structs import replace

from fsm_rollout.engines.protocol import Chunk, Load, Request, SamplingParams, TokenSource, Weights, WeightSink
from fsm_rollout.testing.conformance.runner import ConformanceError, demand, demand_all
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import as_ids

T = TypeVar("T")
Each = Callable[[Chunk], Awaitable[None]]  # what is done after each chunk

TEXTS = ("1", "What is (37 + 58) * 4?", "Count from 1 to 20: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12", "a b c d e f g h")
LONG = 4096  # tokens of a request that is to be under way until it is ended; a smaller window cuts it
LATE = 1.0  # seconds after an order within which what comes may have been on its way


@dataclass(slots=True)
class RequestAnswer:
    """All chunks of one request so far."""

    request: Request
    chunks: list[Chunk] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended, ``None`` while it has not."""
        return self.chunks[-1].finish_reason if self.chunks else None

    @property
    def error(self) -> str | None:
        """The error that came with the latest chunk."""
        return self.chunks[-1].error if self.chunks else None

    @property
    def versions(self) -> list[int]:
        """The weight versions of its tokens, in order, each once."""
        return list(dict.fromkeys(chunk.weight_version for chunk in self.chunks if len(chunk.ids)))

    def _demand(self, *facts: tuple[object, int, str]) -> None:
        demand_all(f"'{self.request.request_id}'", *facts)

    def take(self, chunk: Chunk) -> None:
        """Append a chunk, checking it."""
        ids, logprobs, version, reason = chunk.ids, chunk.logprobs, chunk.weight_version, chunk.finish_reason
        # 1. Its form.
        are_tokens = isinstance(ids, array) and ids.typecode == "i" and min(ids, default=0) >= 0
        are_floats = isinstance(logprobs, array) and logprobs.typecode == "f"
        self._demand(
            (self.finish_reason is None, 1, "got another chunk after its last one"),
            (are_tokens, 1, f"got ids that must be an array('i') of tokens: {short(ids)}"),
            (are_floats, 2, f"got a chunk whose logprobs must be an array('f'), got {short(logprobs)}"),
            (isinstance(version, int), 8, f"got a chunk whose weight_version must be an int, got {version!r}"),
        )
        # 2. Its content, and its end.
        wrong = next(iter([p for p in logprobs if not -math.inf < p <= 0]), None)
        explained = chunk.error is None or reason == FinishReason.ABORT
        self._demand(
            (len(ids) == len(logprobs), 2, f"got {len(ids)} ids with {len(logprobs)} logprobs"),
            (wrong is None, 2, f"got the logprob {wrong}; it must be finite and at most 0"),
            (reason in (None, *FinishReason), 1, f"ended with finish_reason '{reason}'"),
            (explained, 1, f"got an error with finish_reason '{reason}', not 'abort'"),
        )
        # 3. Its place among the others.
        admitted = self.chunks or not len(ids) or chunk.error is not None
        only_waits = not chunk.waits or not (len(ids) or reason is not None)
        renewed = not self.chunks or version >= self.chunks[-1].weight_version
        self._demand(
            (admitted, 7, "was not admitted: the first chunk has tokens; an empty one must say it was admitted"),
            (only_waits, 7, "got a chunk that `waits` and brings something; it must be an empty one"),
            (renewed, 8, f"got tokens of older weights: the weight version went back to {version}"),
        )
        self.chunks.append(chunk)
        self.ids += ids
        self.logprobs += logprobs

    def check_whole(self, max_context: int) -> None:
        """Check the answer now that it should have come to its end."""
        sampling, ids, reason = self.request.sampling, self.ids, self.finish_reason
        room = min(sampling.max_tokens, max_context - len(self.request.ids))
        full = reason != FinishReason.LENGTH or len(ids) == room or self.request.scored_from
        self._demand(
            (reason is not None, 1, "has had no last chunk, and the iterator ended"),
            (len(ids) <= room or self.error, 1, f"got {len(ids)} tokens; max_tokens and the window allow {room}"),
            (full, 1, f"ended with 'length' after {len(ids)} tokens; {room} were allowed"),
        )
        stopped = reason == FinishReason.STOP
        if sampling.ignore_eos:
            self._demand((not stopped, 3, "stopped, though ignore_eos was asked for"))
            return
        stops = [place for place, token in enumerate(ids) if token in sampling.stop_ids]
        dropped = stopped and sampling.stop_ids and not (ids and ids[-1] in sampling.stop_ids)
        went_on = stops and (stops[0] < len(ids) - 1 or not stopped)
        at = f"{ids[stops[0]]} at {stops[0]}" if stops else ""
        self._demand(
            (not dropped, 3, f"stopped, and its last token is {ids[-1] if ids else None}: the stop token was dropped"),
            (not went_on, 3, f"sampled the stop token {at} and did not stop there"),
        )


def take(chunk: Chunk, answers: Mapping[str, RequestAnswer]) -> None:
    """Give a chunk to the answer it belongs to."""
    if not isinstance(chunk, Chunk):
        raise ConformanceError(1, f"generate() gave {chunk!r:.80}, which is no Chunk")
    if chunk.request_id not in answers:
        kinds = ", ".join(answers)
        raise ConformanceError(1, f"a chunk for '{chunk.request_id}', which is no request of this dispatch ({kinds})")
    answers[chunk.request_id].take(chunk)


class Dispatch:
    """One dispatch: the requests, and what has come of them."""

    def __init__(self, subject: EngineSubject, requests: Sequence[Request]) -> None:
        self.subject = subject
        self.answers = {request.request_id: RequestAnswer(request) for request in requests}
        subject.requests += len(requests)
        stream = subject.engine.generate(requests)
        if inspect.iscoroutine(stream):
            stream.close()
            how = "'async def generate' with a 'yield' in it, or 'def generate' that returns an async generator"
            raise ConformanceError(1, f"generate() gave a coroutine, which nobody can iterate over; write {how}")
        demand(isinstance(stream, AsyncIterator), 1, f"generate() gave {stream!r:.80}, which is no async iterator")
        self._stream = stream
        self._reading: asyncio.Task[None] | None = None

    @property
    def first(self) -> RequestAnswer:
        """The answer to the first request."""
        return next(iter(self.answers.values()))

    def __aiter__(self) -> Dispatch:
        return self

    async def __anext__(self) -> Chunk:
        """Return the next chunk, which its answer has."""
        await asyncio.sleep(0)  # chunks without end keep nobody else from running
        chunk = await anext(self._stream)
        take(chunk, self.answers)
        return chunk

    async def read(self, number: int = 1, late: str = "", each: Each | None = None) -> list[RequestAnswer]:
        """Take all that comes, in time, and check that it is whole; ``late`` says what else breaks ``number``.

        ``each`` is awaited after every chunk.
        """
        async with self.reading(each):
            if not await self.ends():
                unfinished = ", ".join(name for name, answer in self.answers.items() if answer.finish_reason is None)
                late = late or (f"no last chunk for {unfinished}" if unfinished else "the iterator did not end")
                raise ConformanceError(number, f"{late} within {self.subject.patience:g} s")
        return self.check_whole()

    def check_whole(self) -> list[RequestAnswer]:
        """Check that all have come to a proper end."""
        for answer in self.answers.values():
            answer.check_whole(self.subject.engine.max_context)
            self.subject.tokens += len(answer.ids)
        return list(self.answers.values())

    @asynccontextmanager
    async def reading(self, each: Each | None = None) -> AsyncIterator[None]:
        """Take what comes meanwhile."""

        async def drain() -> None:
            async for chunk in self:
                if each is not None:
                    await each(chunk)

        self._reading = task = asyncio.get_running_loop().create_task(drain())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=LATE)
            if task.done() and not task.cancelled():
                task.exception()  # whoever wanted it has it

    @property
    def ended(self) -> bool:
        """Whether what is being read has come to its end; raises what reading it has raised."""
        assert self._reading is not None
        if self._reading.done():
            self._reading.result()
        return self._reading.done()

    async def ends(self) -> bool:
        """Wait for the end of what is read; return whether it came in time."""
        assert self._reading is not None
        await asyncio.wait({self._reading}, timeout=self.subject.patience)
        return self.ended

    async def abort(self) -> None:
        """Abort all its requests."""
        await self.subject.call(4, self.subject.engine.abort, list(self.answers))

    async def stop_listening(self) -> None:
        """Close the iterator before its end."""
        aclose = getattr(self._stream, "aclose", None)  # an async generator, in all engines there are
        if aclose is None:
            gave = f"generate() gave a {type(self._stream).__name__} without aclose(): nobody can stop listening to it"
            raise ConformanceError(6, f"{gave}; return an async generator")
        await self.subject.call(6, aclose, what="aclose() of what generate() gave")


@dataclass
class EngineSubject:
    """An engine, what it is asked, and what of it has been counted; the options are those of ``check_engine``."""

    engine: TokenSource
    prompts: Sequence[Sequence[int]] = ()
    weights: Weights = field(default_factory=dict)
    deterministic: bool = True
    cuts: bool = True
    patience: float = 60.0
    settle: float = 0.2
    requests: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)
    seeds_matter: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        encode = self.engine.tokenizer.encode
        self.prompts = self.prompts or [encode(text, add_special_tokens=False) for text in TEXTS]
        self._names = itertools.count()
        self._eos_ids = frozenset(self.engine.eos_ids)
        # Models have more rows than their tokenizers have tokens, for alignment.
        self.every_token = frozenset(range(len(self.engine.tokenizer) + 4096)) | self._eos_ids

    @property
    def can_hold(self) -> bool:
        """Whether its weights, and with them its pauses, are ours."""
        return isinstance(self.engine, WeightSink)

    @property
    def sink(self) -> WeightSink:
        """The engine, whose weights are ours."""
        assert isinstance(self.engine, WeightSink)
        return self.engine

    @property
    def now(self) -> float:
        """The loop's time."""
        return asyncio.get_running_loop().time()

    def name(self) -> str:
        """Return a request id that is new."""
        return f"check-{next(self._names)}"

    def request(self, prompt: int, max_tokens: int, **sampling: Any) -> Request:
        """Return a request whose content depends on the arguments only, under a new id."""
        ids = as_ids(list(self.prompts[prompt % len(self.prompts)]))
        sampling = {"stop_ids": self._eos_ids} | sampling
        return Request(
            self.name(), ids, SamplingParams(max_tokens, **sampling), trajectory_id=f"check-{prompt}",
            agent="check", context="main", session=f"check-{prompt}", turn=0,
        )  # fmt: skip

    def long(self, prompt: int = 0, **sampling: Any) -> Request:
        """Return a request that is under way for long."""
        return self.request(prompt, LONG, ignore_eos=True, **sampling)

    async def collect(self, *requests: Request) -> list[RequestAnswer]:
        """Get all answers of one dispatch, checking their form."""
        return await Dispatch(self, requests).read()

    async def under_way(self, *requests: Request) -> Dispatch:
        """Start requests, by default a long one, and return their dispatch once the first of them is admitted."""
        dispatch = Dispatch(self, requests or [self.long()])
        name = dispatch.first.request.request_id
        try:
            async with asyncio.timeout(self.patience):
                async for _ in dispatch:
                    if dispatch.first.chunks:
                        return dispatch
        except TimeoutError:
            raise ConformanceError(7, f"no first chunk for {name} within {self.patience:g} s") from None
        raise ConformanceError(1, f"the iterator ended without a chunk for {name}")

    async def until(self, holds: Callable[[], bool]) -> bool:
        """Wait until something holds; return whether it did in time."""
        last = self.now + self.patience
        while not holds():
            if self.now > last:
                return False
            await asyncio.sleep(self.settle / 10)
        return True

    async def call(
        self, number: int, order: Callable[..., Awaitable[T]], *arguments: object, what: str | None = None
    ) -> T:
        """Await one of the engine's methods; it must return in time."""
        what = f"{order.__name__}()" if what is None else what
        try:
            async with asyncio.timeout(self.patience) as limit:
                waits_for = order(*arguments)
                demand(
                    inspect.isawaitable(waits_for), number, f"{what} gave {waits_for!r:.80} at once; write 'async def'"
                )
                return await waits_for
        except ConformanceError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise ConformanceError(number, f"{what} did not return within {self.patience:g} s") from None
            raise ConformanceError(number, f"{what} raised {type(error).__name__}: {error}") from error

    def load(self) -> Load:
        """Return the engine's load, checking its form."""
        load = self.engine.load()
        counts = isinstance(load, Load) and min(load.running, load.waiting, load.used_tokens) >= 0
        demand(counts, 6, f"load() gave {load}")
        return load

    async def as_alone(self, number: int, answer: RequestAnswer, what: str) -> None:
        """Check that an interrupted request got the tokens that it gets uninterrupted."""
        if not self.deterministic or not answer.ids:
            return
        sampling = replace(answer.request.sampling, max_tokens=len(answer.ids))
        (alone,) = await self.collect(replace(answer.request, request_id=self.name(), sampling=sampling))
        if alone.ids != answer.ids:
            at = next(i for i, pair in enumerate(zip(alone.ids, answer.ids, strict=True)) if pair[0] != pair[1])
            got = f"from the {at}. (from 0) on {answer.ids[at : at + 8]} instead of {alone.ids[at : at + 8]}"
            raise ConformanceError(number, f"a request that was {what} got other tokens than alone: {got}")


def check_good(answers: Iterable[RequestAnswer]) -> None:
    """Check that none was aborted."""
    for answer in answers:
        good = answer.finish_reason != FinishReason.ABORT
        demand(good, 1, f"'{answer.request.request_id}' ended with 'abort', error {answer.error!r}")
