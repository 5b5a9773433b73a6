"""A real model through transformers, on a CPU or a GPU, with true batching of concurrent requests.

Invariant: the model belongs to one thread. The event loop never computes and the model's thread never touches the
loop's objects: requests and orders go one way through a queue, chunks come back in one callback per step and loop.

Why not transformers' own continuous batching (5.12): it samples every request with one global random state, so what a
request gets depends on what else is in the batch, which promise 5 of :mod:`fsm_rollout.engines.protocol` forbids. The
decode loop here is :mod:`fsm_rollout.engines.transformers.decode_loop`; the random numbers are those of
:mod:`fsm_rollout.engines.transformers.sampling`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsm_rollout.engines.adapters import Adapter
from fsm_rollout.engines.chunk_stream import ChunkStream, hand_over, refusal
from fsm_rollout.engines.protocol import Chunk, EngineFacts, HalfLoaded, Load, Request
from fsm_rollout.engines.transformers.checkpoints import (
    as_device,
    check_fit,
    check_supported,
    copy_weights,
    load_model,
    read_weights,
    untied,
)
from fsm_rollout.engines.transformers.decode_loop import DecodeLoop
from fsm_rollout.engines.transformers.picture_rows import check_seeing
from fsm_rollout.engines.weight_sources import Bucket
from fsm_rollout.engines.weights import check_finite
from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import load_processor, model_folder, stop_tokens
from fsm_rollout.trajectory.enums import FinishReason

T = TypeVar("T")


class _ModelThread(threading.Thread):
    """Carries out orders as they come, and steps the decode loop while there is something to decode.

    It holds no reference to the engine, so that an engine that is dropped without being closed can be collected, which
    stops the thread.
    """

    def __init__(self, decode: DecodeLoop) -> None:
        super().__init__(name="fsm-rollout-model", daemon=True)
        self.decode = decode
        self.load = Load()
        self._held: set[str] = set()  # why nothing is sampled: "paused", "asleep", "updating"; empty: it is
        self._given: set[str] = set()  # the tensors of the present update; those that are tied have one name here
        self._mixed: set[str] = set()  # those that it, and others that broke off before it, have changed
        self._own: dict[str, torch.Tensor] = {}  # what an adapter has changed of the model, as it was
        self._lock = threading.Lock()
        self._streams: dict[str, ChunkStream] = {}  # where the chunks of each request under way go; `_lock` guards it
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    # -- from any thread ------------------------------------------------------------------------------------------

    def order(self, what: Callable[[], T]) -> Future[T]:
        """Have ``what`` done in this thread, between two steps."""
        done: Future[T] = Future()

        def carry_out() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(what())
                except Exception as error:
                    done.set_exception(error)

        self._orders.put(carry_out)
        return done

    def submit(self, requests: Sequence[Request], good: Sequence[Request]) -> ChunkStream:
        """Queue the ``good`` ones of a dispatch; EngineError if an id is under way already."""
        with self._lock:
            stream = ChunkStream(requests, self.abort, self._streams)
            for request in good:
                self._streams[request.request_id] = stream
        self._orders.put(partial(self.decode.add, good))
        return stream

    def abort(self, request_ids: Iterable[str]) -> Future[None]:
        """End requests with what they have."""
        return self.order(lambda: self._deliver(self.decode.abort(request_ids)))

    def end_sessions(self, sessions: Sequence[str]) -> None:
        """Keep the rows of these sessions for them no longer."""
        self._orders.put(partial(self.decode.end_sessions, sessions))

    @property
    def under_way(self) -> list[str]:
        """The ids of all requests that have not had their last chunk."""
        with self._lock:
            return list(self._streams)

    def stop(self) -> None:
        """End the thread after its present step and wait for that; more than once if need be."""
        self._orders.put(None)
        if self is not threading.current_thread():
            self.join()

    # -- on this thread -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Orders first, then a step; when there is nothing to decode, wait for an order."""
        while True:
            idle = bool(self._held) or not (self.decode.running or self.decode.waiting)
            try:
                order = self._orders.get(block=idle)
            except queue.Empty:
                self._step()
                continue
            if order is None:
                return
            order()
            self._measure()

    def _step(self) -> None:
        try:
            self._deliver(self.decode.admit())
            self._deliver(self.decode.step())
        except Exception as error:
            # Give all requests up but keep the thread: the next ones may do better (say after an out-of-memory).
            with self._lock:
                failed, self._streams = self._streams, {}
            self.decode.release()  # first: its rows may be incomplete now, and its memory may be what was missing
            self.decode.abort(failed)
            self._measure()
            failure = EngineError(f"the model failed: {type(error).__name__}: {error}")
            hand_over([(stream, failure) for stream in dict.fromkeys(failed.values())], self._unheard)

    def _measure(self) -> None:
        decode = self.decode
        self.load = Load(running=decode.running, waiting=decode.waiting, used_tokens=decode.used_tokens)

    def _deliver(self, chunks: Sequence[Chunk]) -> None:
        """Hand chunks to the event loops that wait for them, in one callback for each loop."""
        self._measure()  # first: the receiver of a last chunk may ask for the load
        addressed = []
        with self._lock:
            for chunk in chunks:
                last = chunk.finish_reason is not None
                stream = self._streams.pop(chunk.request_id) if last else self._streams[chunk.request_id]
                addressed.append((stream, chunk))
        hand_over(addressed, self._unheard)

    def _unheard(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sample nothing for a loop that is closed."""
        with self._lock:
            unheard = [request_id for request_id, stream in self._streams.items() if stream.loop is loop]
            for request_id in unheard:
                del self._streams[request_id]
        self.decode.abort(unheard)

    # -- orders ---------------------------------------------------------------------------------------------------

    def update(self, weights: Mapping[str, torch.Tensor], version: int | None) -> int:
        check_finite(weights)
        self.begin_update(weights)
        self.load_bucket(weights)
        return self.end_update(self.decode.weight_version + 1 if version is None else version)

    def begin_update(self, known: Mapping[str, torch.Tensor]) -> None:
        check_fit(self.decode.model, known)
        self._held.add("updating")
        self._given = set()
        self._deliver(self.decode.flush())  # these tokens carry the old version

    def load_bucket(self, weights: Mapping[str, torch.Tensor]) -> None:
        try:
            check_fit(self.decode.model, weights)
            self._given |= untied(self.decode.model, weights)
            self._mixed |= self._given
            copy_weights(self.decode.model, weights)
        except Exception as error:  # whatever torch raises, when there is no memory, say
            raise HalfLoaded(str(error)) from error

    def end_update(self, version: int | None) -> int:
        if missing := sorted(self._mixed if version is None else self._mixed - self._given):
            raise HalfLoaded(
                f"the model has a part of new weights: '{missing[0]}', one of {len(missing)} tensors that are to be "
                "given again"
            )
        if version is not None:
            own = {name: tensor for name, tensor in self._own.items() if name not in self._given}
            copy_weights(self.decode.model, own)
            self.decode.forget()
            self.decode.weight_version = version
            self._own, self._mixed = {}, set()
        self._held.discard("updating")
        return self.decode.weight_version

    def load_adapter(self, adapter: Adapter, version: int) -> int:
        if self._mixed:
            raise HalfLoaded("the model has a part of new weights, to which no adapter is added; load whole ones first")
        own = self.decode.model.state_dict()
        changed = adapter.merged(own | self._own)
        check_finite(changed)
        places = Counter(tensor.data_ptr() for tensor in own.values())
        if shared := [name for name in changed if places[own[name].data_ptr()] > 1]:
            raise EngineError(f"the adapter changes '{shared[0]}', which is another tensor of the model as well (tied)")
        kept = {name: self._own[name] if name in self._own else own[name].clone() for name in changed}
        self.begin_update({})
        self.load_bucket(self._own | changed)
        version = self.end_update(version)
        self._own = kept
        return version

    def pause(self) -> None:
        self._held.add("paused")
        self._deliver(self.decode.flush())

    def resume(self) -> None:
        self._held.discard("paused")

    def sleep(self) -> None:
        if (busy := len(self.under_way)) and "paused" not in self._held:
            raise EngineError(f"{busy} request(s) are under way; pause the engine before it sleeps")
        self._held.add("asleep")
        self.decode.release()
        if self.decode.device.type == "cuda":
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self._move(self.decode.device)
        self._held.discard("asleep")

    def _move(self, device: torch.device) -> None:
        self.decode.model.to(device)
        self._own = {name: tensor.to(device) for name, tensor in self._own.items()}


class TransformersEngine:
    """See the module.

    Args:
        model: ``embedded``, ``embedded:early``, the path of a model folder, a name of the hub (``org/name``), or a
            loaded causal language model (then give its tokenizer).
        tokenizer: the tokenizer of a loaded model.
        processor: the processor of a loaded model that sees pictures; a folder has its own.
        device: default: the first GPU, else the CPU. A loaded model stays where it is.
        dtype: default: float32 on a CPU, the checkpoint's own on a GPU. A loaded model keeps its own.
        max_context: the longest input plus output, in tokens; default: the model's window.
        max_running: how many requests decode together; the others wait. What twice as many sessions said is kept for
            their next turns until they end: with more trajectories than that at a time, each turn is filled from its
            beginning.
        fill_tokens: how many prompt tokens are filled at most between two decoding steps; default: 2,048 on a CPU (its
            caches are small: more at once is slower), 8,192 on a GPU.
        send_every: decoding steps between two chunks of a request.
        threads: ``torch.set_num_threads`` for the whole process; default: left alone. A small model on cores that are
            shared with others is many times faster with 1 (its threads wait for one another at every operation).
        replica: a name that every chunk carries.

    Raises:
        EngineError: the model cannot be found, loaded, or decoded exactly.

    An update of the weights applies between two steps; requests under way have their cache computed again under the
    new weights. ``sleep`` drops the cache and moves a model on a GPU to the CPU's memory. On a GPU, torch's attention
    by cuDNN is switched off for the whole process (``torch.backends.cuda.enable_cudnn_sdp``).
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel = "embedded",
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        processor: Any = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        max_context: int | None = None,
        max_running: int = 64,
        fill_tokens: int | None = None,
        send_every: int = 8,
        threads: int | None = None,
        replica: str = "",
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        if isinstance(model, str | Path):
            if tokenizer is not None or processor is not None:
                raise EngineError("a tokenizer or processor goes with a loaded model only; a model folder has its own")
            place = as_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            dtype = dtype or ("float32" if place.type == "cpu" else "auto")
            folder = model_folder(model)
            model, tokenizer = load_model(folder, dtype=dtype, device=place)
            processor = load_processor(folder)
        elif tokenizer is None:
            raise EngineError("a loaded model needs its tokenizer: TransformersEngine(model, tokenizer)")
        elif device is not None or dtype is not None:
            raise EngineError("a loaded model stays as it is; move or convert it before, instead of device or dtype")
        check_supported(model)
        if model.device.type == "cuda":
            # cuDNN plans its attention anew for every shape, and each step has one of its own: four times as slow.
            torch.backends.cuda.enable_cudnn_sdp(False)
        if processor is not None:
            check_seeing(model, processor)
        text_config = model.config.get_text_config()
        self.tokenizer = tokenizer
        """The model's tokenizer."""
        window = max_context or getattr(text_config, "max_position_embeddings", None)
        if window is None:
            raise EngineError(f"{type(model).__name__}'s config has no max_position_embeddings; give max_context")
        self.max_context = int(window)
        """The longest input plus output, in tokens."""
        of_generation = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self.eos_ids = stop_tokens(of_generation, text_config.eos_token_id, tokenizer.eos_token_id)
        """The stop tokens that the model's generation config names."""
        vocabulary = len(model.get_input_embeddings().weight)
        self.facts = EngineFacts(tokenizer, self.max_context, self.eos_ids, vocabulary, processor, cannot_score="")
        """These three, how many tokens the model has, and its processor."""
        self._replica = replica
        self._closed = False
        decode = DecodeLoop(
            model.eval(),
            max_running=max_running,
            max_context=self.max_context,
            fill_tokens=fill_tokens or (2048 if model.device.type == "cpu" else 8192),
            send_every=send_every,
            replica=replica,
            tokenizer=tokenizer,
            processor=processor,
        )
        self._thread = _ModelThread(decode)
        self._thread.start()
        # Also runs at the interpreter's exit, before daemon threads are frozen wherever they are.
        self._stop = weakref.finalize(self, self._thread.stop)

    @property
    def weight_version(self) -> int:
        """How many policy updates the present weights have had."""
        return self._thread.decode.weight_version

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Start all requests at once (not at the first ``anext``); see the protocol."""
        self._check_open()
        good, refused = list[Request](), list[Chunk]()
        for request in requests:
            error = refusal(request, self.max_context, self.facts.vocabulary)
            if error is None and request.media and self.facts.processor is None:
                error = "EngineError: this model reads text only, and the request has pictures"
            if error is None and request.media and request.scored_from:
                error = "EngineError: the transformers engine scores text only, and the request has pictures"
            if error is None and request.sampling.extra:
                further = ", ".join(map(str, request.sampling.extra))
                error = f"EngineError: the transformers engine takes no further sampling parameters, got {further}"
            if error is None:
                good.append(request)
                continue
            chunk = Chunk(request.request_id, weight_version=self.weight_version, replica=self._replica)
            refused.append(replace(chunk, finish_reason=FinishReason.ABORT, error=error))
        stream = self._thread.submit(requests, good)
        for chunk in refused:
            stream.put(chunk)
        return aiter(stream)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests before the next step; what was sampled stays."""
        if not self._closed:
            await asyncio.wrap_future(self._thread.abort(list(request_ids)))

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Keep what these sessions have said no longer than others need its place."""
        if not self._closed:
            self._thread.end_sessions(list(sessions))

    async def update_weights(self, weights: str | Path | Mapping[str, torch.Tensor], version: int | None = None) -> int:
        """Load new weights between two steps; see the protocol. Tensors that are not named stay as they are.

        Raises:
            EngineError: the folder cannot be loaded, a name or shape does not fit, or a tensor is not finite; then
                nothing has changed.
        """
        self._check_open()
        if not isinstance(weights, Mapping):
            weights = await asyncio.to_thread(read_weights, weights, self._thread.decode.model.dtype)
        return await self._order(partial(self._thread.update, weights, version))

    async def load_adapter(self, adapter: Adapter, version: int) -> None:
        """See :class:`~fsm_rollout.engines.adapters.AdapterSink`: it is added to the tensors that it changes.

        These are held twice until weights of the model itself are loaded. EngineError: it is another model's.
        """
        await self._order(partial(self._thread.load_adapter, adapter, version))

    async def begin_update(self, known: Mapping[str, torch.Tensor], *, local: bool) -> None:
        """See :class:`~fsm_rollout.engines.weight_sources.BucketSink`."""
        await self._order(partial(self._thread.begin_update, known))

    async def load_bucket(self, bucket: Bucket) -> None:
        """See :class:`~fsm_rollout.engines.weight_sources.BucketSink`."""
        await self._order(partial(self._thread.load_bucket, bucket.tensors))

    async def end_update(self, version: int | None) -> None:
        """See :class:`~fsm_rollout.engines.weight_sources.BucketSink`."""
        await self._order(partial(self._thread.end_update, version))

    async def pause(self) -> None:
        """Sample nothing from now on; when this returns, everything sampled has been handed over."""
        await self._order(self._thread.pause)

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._order(self._thread.resume)

    async def sleep(self) -> None:
        """Drop the cache, and move a model on a GPU to the CPU's memory, until :meth:`wake`.

        Raises:
            EngineError: requests are under way and the engine is not paused.
        """
        await self._order(self._thread.sleep)

    async def wake(self) -> None:
        """Be ready again after :meth:`sleep`; requests under way have their cache computed again."""
        await self._order(self._thread.wake)

    def load(self) -> Load:
        """Return how busy the engine was after its latest step, requests not yet seen by the model included."""
        load = self._thread.load
        return replace(load, waiting=max(load.waiting, len(self._thread.under_way) - load.running))

    async def aclose(self) -> None:
        """End everything with "abort", stop the model's thread and forget the model."""
        if not self._closed:
            self._closed = True
            await asyncio.wrap_future(self._thread.abort(self._thread.under_way))
        self._stop()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the transformers engine is closed; build another")

    async def _order(self, order: Callable[[], T]) -> T:
        self._check_open()
        return await asyncio.wrap_future(self._thread.order(order))
