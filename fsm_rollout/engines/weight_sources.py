"""New weights on their way to engines: tensors by name, in buckets, without a file.

Invariants:

1. One pass reads each tensor once, however many engines take it, and holds at most two buckets: one that the engines
   load, and the next, which is packed meanwhile.
2. What is loaded is finite. An engine that has loaded a part and not the whole samples nothing
   (:class:`~fsm_rollout.engines.protocol.HalfLoaded`).
3. A source that is asked again gives the very same numbers, or says that it cannot: training goes on in the same
   memory.
4. A generator is read to its end, whatever fails: other ranks take part in gathering what it gives.

An engine that takes buckets is told `begin_update`, `load_bucket` for each, `end_update`; the steps of all engines keep
pace, because they load from one memory. An engine without these is given all tensors at once.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from fsm_rollout.engines.digests import digest
from fsm_rollout.engines.protocol import HalfLoaded, ReplicaLost, TokenSource, Weights, WeightSink, WeightSource
from fsm_rollout.engines.weights import check_finite, check_tensor
from fsm_rollout.errors import EngineError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
BUCKET_BYTES = 2**28  # that a bucket holds at most, unless one tensor alone is larger
ADAPTED = frozenset({"an adapter"})  # the name of what an adapter loads, which any other weights take away
UPDATE_WITHIN = 600.0  # seconds that an engine has for one step

PackedPiece = tuple[str, str, list[int], int, int]  # a tensor's name, dtype, shape, and where in its bucket it is
_Step: TypeAlias = "Callable[[Sequence[BucketSink]], Awaitable[list[Exception | None]]]"  # why each could not
NamedTensors: TypeAlias = "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]"


class WeightsGone(EngineError):
    """Weights that were loaded before cannot be had again."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Where in a bucket a tensor is."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    end: int


class Bucket:
    """Tensors end to end in one flat tensor of bytes, each where its kind of number may begin."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.tensors: dict[str, torch.Tensor] = {}  # views of the memory
        self._memory: torch.Tensor | None = None
        self._end = 0

    def clear(self, size: int, allocate: Callable[[int], torch.Tensor]) -> None:
        """Have nothing, and room for so many bytes; whoever still knows the bucket keeps no memory by that."""
        self.pieces.clear()
        self.tensors.clear()
        self._end = 0
        if self._memory is None or len(self._memory) < size:
            self._memory = None  # before there is another
            self._memory = allocate(size)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether there is room for one more."""
        end = self._end + tensor.nbytes
        return self._memory is not None and self._end % tensor.element_size() == 0 and end <= len(self._memory)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor to the end."""
        start, self._end = self._end, self._end + tensor.nbytes
        self.pieces.append(Piece(name, tensor.dtype, tensor.shape, start, self._end))
        self.tensors[name] = self.flat[start:].view(tensor.dtype).view(tensor.shape)
        self.tensors[name].copy_(tensor.detach())

    @classmethod
    def of(cls, contents: Iterable[PackedPiece], data: bytearray | None = None) -> Bucket:
        """Return one that another process has described; its tensors have no memory without its ``data``."""
        import torch

        bucket = cls()
        for name, dtype, shape, start, end in contents:
            kind = getattr(torch, dtype)
            bucket.pieces.append(Piece(name, kind, torch.Size(shape), start, end))
            flat = None if data is None else torch.frombuffer(data, dtype=torch.uint8)[start:end].view(kind)
            bucket.tensors[name] = torch.empty(shape, dtype=kind, device="meta") if flat is None else flat.view(shape)
        return bucket

    @property
    def contents(self) -> list[PackedPiece]:
        """What is in it, and where, as plain data."""
        return [(p.name, str(p.dtype).removeprefix("torch."), list(p.shape), p.start, p.end) for p in self.pieces]

    @property
    def flat(self) -> torch.Tensor:
        """All of them, uint8 `[bytes]`."""
        assert self._memory is not None
        return self._memory[: self._end]


@runtime_checkable
class BucketSink(Protocol):
    """An engine that takes new weights in buckets."""

    async def begin_update(self, known: Mapping[str, torch.Tensor], *, local: bool) -> None:
        """Sample nothing from now on.

        Args:
            known: what is to come, to be looked at; nothing where that is not known.
            local: whether buckets come as memory of this host.

        Raises:
            EngineError: they cannot be loaded; it goes on with its old ones.
        """

    async def load_bucket(self, bucket: Bucket) -> None:
        """Load some of them; the bucket's memory is somebody else's afterwards. HalfLoaded: it could not."""

    async def end_update(self, version: int | None) -> None:
        """Go on with the new weights, of this version. ``None``: there will be no more of them.

        Raises:
            HalfLoaded: some were loaded, and not all.
        """


class Tensors:
    """New weights as tensors by name, of which two buckets at most are held beside the caller's own.

    Args:
        tensors: a mapping; or a function that returns one, or pairs of names and tensors, whenever it is called; or
            such pairs, which can be read once. Tensors may be on any device; views, tied ones and parameters are fine,
            and those that are not named stay as they are. A generator may gather each tensor as it is asked for: it
            runs in another thread, on the CUDA device that is current where this is built.
        bucket_bytes: how much is loaded at a time.

    A mapping is checked before any engine is touched. Of others each bucket is, so that a NaN late in them leaves
    engines with a part of the new weights, which sample nothing until they are given whole ones.

    After a loss, engines are filled from here again, as long as the numbers are the same.
    """

    local = True
    """Whether engines load from memory of this host."""

    def __init__(self, tensors: NamedTensors | Callable[[], NamedTensors], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._named = tensors if isinstance(tensors, Mapping) else None
        self._once: Iterator[tuple[str, torch.Tensor]] | None = None
        if not isinstance(tensors, Mapping) and not callable(tensors):
            self._once = iter(tensors)
        self._tensors = tensors
        self._bucket_bytes = bucket_bytes
        self._read = self._failed = False  # its pairs, if these can be read once; by itself, when last asked
        self._digests: dict[str, bytes] = {}  # of the tensors of the first whole pass
        self._touched: set[str] = set()
        self._cuda_device = _current_cuda_device()

    @property
    def names(self) -> frozenset[str]:
        """What was loaded, once it was."""
        return frozenset(self._digests)

    @property
    def touched(self) -> frozenset[str]:
        """What engines may have of it, also if it has failed."""
        return frozenset(self._touched)

    @property
    def again(self) -> bool:
        """Whether they can be read once more, and it was not they that failed."""
        return not self._failed and not self._read

    def check(self) -> None:
        """Check what can be checked before anything is loaded; EngineError if it is not finite."""
        check_finite(self._named or {})

    def whole(self) -> Mapping[str, torch.Tensor]:
        """Return all at once, checked."""
        found = self._named or dict(self._pairs())
        if found is not self._named:
            check_finite(found)
        self._have_read({name: self._same(name, tensor) for name, tensor in found.items()})
        return found

    def _same(self, name: str, tensor: torch.Tensor) -> bytes:
        """Return what tells a tensor's numbers from others; WeightsGone if they are not those of the first pass."""
        found = digest(tensor)
        if self._digests and self._digests.get(name) != found:
            raise WeightsGone(f"these weights cannot be had again: '{name}' has changed since, as in training")
        return found

    def _have_read(self, digests: dict[str, bytes]) -> None:
        """Note what a whole pass had; WeightsGone if something that the first one had was not there."""
        if lacking := self._digests.keys() - digests:
            raise WeightsGone(f"these weights cannot be had again: '{min(lacking)}' is not among them any more")
        self._digests = digests

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._once is not None:
            if self._read:
                raise WeightsGone(
                    "these weights are pairs that were read; give a mapping, or a function that returns them"
                )
            self._read = True
            # No `yield from`, which would close it, and leave other ranks waiting.
            for pair in self._once:  # noqa: UP028
                yield pair
            return
        found = self._tensors() if callable(self._tensors) else self._tensors
        yield from found.items() if isinstance(found, Mapping) else found

    def _buckets(self) -> Iterator[Bucket]:
        """Pack tensors as they come; a bucket's memory is used again two buckets later."""
        digests: dict[str, bytes] = {}
        most = self._bucket_bytes
        if self._named is not None:
            most = min(most, sum(tensor.nbytes for tensor in self._named.values()))
        bucket, other = Bucket(), Bucket()
        for name, tensor in self._pairs():
            if self._named is None:
                check_tensor(name, tensor)
            if not bucket.takes(tensor):
                if bucket.pieces:
                    yield bucket
                    bucket, other = other, bucket
                bucket.clear(max(most, tensor.nbytes), partial(self._memory, like=tensor))
            bucket.add(name, tensor)
            self._touched.add(name)
            digests[name] = self._same(name, bucket.tensors[name])
        if bucket.pieces:
            yield bucket
        self._have_read(digests)

    # -- on their way ------------------------------------------------------------------------------------------------

    async def deliver(
        self, engines: Sequence[TokenSource], version: int, seconds: float = UPDATE_WITHIN
    ) -> list[Exception | None]:
        """Have engines load these weights and call them ``version``; return for each why it could not.

        An engine that has a part of them, because another one has failed, is asked once more.

        Args:
            engines: of one kind; they are to be held meanwhile, or hold themselves.
            version: the weights' own.
            seconds: that an engine has for each step.

        Raises:
            WeightsGone: they were asked for again, and are not there.
        """
        takers = [engine for engine in engines if isinstance(engine, BucketSink)]
        if not engines:
            return []
        try:
            if len(takers) < len(engines):
                whole = asyncio.ensure_future(asyncio.to_thread(self.whole))  # once for all of them
                return await answers([self._load_whole(engine, whole, version) for engine in engines], seconds)
            results = dict(zip(takers, await self._pass(takers, version, seconds), strict=True))
            half = [engine for engine in takers if isinstance(results[engine], HalfLoaded)]
            if half and self.again:
                with suppress(WeightsGone):
                    results |= zip(half, await self._pass(half, version, seconds), strict=True)
            return list(results.values())
        finally:
            if self._once is not None:
                await asyncio.to_thread(self._drain, self._once)

    def _drain(self, pairs: Iterator[object]) -> None:
        """Read what nobody takes any more."""
        self._read = True
        self._on_device()
        try:
            deque(pairs, maxlen=0)
        except Exception as error:  # whatever the trainer's own code raises; why nobody takes them is told
            logger.warning("new weights could not be read to their end: %s: %s", type(error).__name__, error)

    async def _load_whole(self, engine: TokenSource, whole: Awaitable[Weights], version: int) -> None:
        await load_weights(engine, await asyncio.shield(whole), version)

    async def _pass(self, engines: Sequence[BucketSink], version: int, seconds: float) -> list[Exception | None]:
        self._failed = False
        results: dict[BucketSink, Exception | None] = dict.fromkeys(engines)

        async def each(step: _Step) -> None:
            """Have all that have not failed take a step."""
            going = [engine for engine, result in results.items() if result is None]
            results.update(zip(going, await step(going), strict=True))

        def begin(going: Sequence[BucketSink]) -> Awaitable[list[Exception | None]]:
            return answers([engine.begin_update(self._named or {}, local=self.local) for engine in going], seconds)

        def end(version: int | None) -> _Step:
            return lambda going: answers([engine.end_update(version) for engine in going], seconds)

        step, buckets = begin, self._buckets()
        try:
            while True:
                following = asyncio.ensure_future(asyncio.to_thread(self._next, buckets))  # while they take this step
                try:
                    await each(step)
                finally:
                    await asyncio.wait([following])
                if (bucket := following.result()) is None or all(results.values()):
                    break
                step = partial(self._load, bucket, seconds)
        except Exception as error:  # whatever the source's own code raises
            await each(end(None))
            if isinstance(error, WeightsGone):
                raise
            self._failed = True
            why = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            return [
                HalfLoaded(f"{why}; {result}") if isinstance(result, HalfLoaded) else result or EngineError(why)
                for result in results.values()
            ]
        await each(end(version))
        return list(results.values())

    def _next(self, buckets: Iterator[Bucket]) -> Bucket | None:
        self._on_device()
        return next(buckets, None)

    def _on_device(self) -> None:
        """Have this thread on the trainer's CUDA device."""
        if self._cuda_device is not None:
            import torch

            torch.cuda.set_device(self._cuda_device)

    # -- the wire ----------------------------------------------------------------------------------------------------

    def _memory(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """Return memory for buckets: of this host, where other processes can read it."""
        import torch

        storage = torch.UntypedStorage._new_using_filename_cpu(size)
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))

    async def _load(self, bucket: Bucket, seconds: float, engines: Sequence[BucketSink]) -> list[Exception | None]:
        """Have engines load a bucket."""
        return await answers([engine.load_bucket(bucket) for engine in engines], seconds)


class Loaded:
    """Weights that each engine loads by itself: those of a folder, or what a placement has made of tensors.

    Args:
        weights: what engines are given.
        names: those of the tensors; ``None``: all that a model has.
    """

    def __init__(self, weights: Weights, names: frozenset[str] | None = None) -> None:
        self.weights, self.names = weights, names
        self.touched, self.again = names, True

    def check(self) -> None:
        """Leave it to the engines, which know what the folder must have."""

    async def deliver(
        self, engines: Sequence[TokenSource], version: int, seconds: float = UPDATE_WITHIN
    ) -> list[Exception | None]:
        """See :class:`~fsm_rollout.engines.protocol.WeightSource`."""
        return await answers([load_weights(engine, self.weights, version) for engine in engines], seconds)


def as_source(weights: Weights | WeightSource) -> WeightSource:
    """Return new weights as their source; EngineError if they are none."""
    if isinstance(weights, WeightSource):
        return weights
    if isinstance(weights, str | PathLike):
        return Loaded(weights)
    if isinstance(weights, Mapping):
        return Tensors(weights)
    raise EngineError(
        f"new weights are a model's folder, or tensors by name; got a {type(weights).__name__} (pairs of names and "
        "tensors go into fsm_rollout.Tensors)"
    )


async def load_weights(engine: TokenSource, weights: Weights, version: int) -> None:
    """Have an engine load new weights; EngineError if that is its owner's business, or it cannot."""
    if not isinstance(engine, WeightSink):
        raise EngineError("the weights of this engine are changed by their owner, not from here")
    await engine.update_weights(weights, version)


async def answers(asked: Iterable[Awaitable[None]], seconds: float) -> list[Exception | None]:
    """Wait for all, each so many seconds; return for each why it failed."""

    async def answer(step: Awaitable[None]) -> Exception | None:
        try:
            async with asyncio.timeout(seconds):
                await step
        except TimeoutError:
            return ReplicaLost(f"no answer within {seconds:g} s")
        except Exception as error:  # whatever an engine raises is the engine's failure
            return error
        return None

    return await asyncio.gather(*map(answer, asked))


def _current_cuda_device() -> int | None:
    torch = sys.modules.get("torch")  # who has not loaded it has no device either
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None
