"""Tensors on their way into an SGLang server: handles of this host's memory, or a broadcast.

Invariant: SGLang's session for an update is open from its first bucket to its last; whatever fails in between closes
it, and is HalfLoaded unless the server as a whole has failed. The weights get their version after all of it, and from
the begin of an update until then nothing that is refused is taken for a sign that the old ones are there.

A handle names memory that the server opens itself, so no tensor travels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from fsm_rollout.engines.adapters import Adapter
from fsm_rollout.engines.broadcast import Seat
from fsm_rollout.engines.http.engine import HTTPEngine
from fsm_rollout.engines.http.lora import half_loaded_if
from fsm_rollout.engines.protocol import EngineFacts, HalfLoaded, Weights, WeightSource
from fsm_rollout.engines.sglang.endpoint import SGLangEndpoint
from fsm_rollout.engines.updating import ServerAddress
from fsm_rollout.engines.weight_sources import UPDATE_WITHIN, Bucket, Loaded, as_source
from fsm_rollout.engines.weights import check_shapes, needed_of, shapes_in
from fsm_rollout.errors import EngineError

if TYPE_CHECKING:
    import torch


class WeightRoutes:
    """An SGLang server's routes for weights, and how far an update has come."""

    def __init__(self, endpoint: SGLangEndpoint) -> None:
        self._endpoint = endpoint
        self._shapes = shapes_in(endpoint.folder)
        self._open = self._touched = False  # the session; whether any new weights may have been loaded

    def check(self, known: Mapping[str, torch.Tensor], *, local: bool) -> None:
        """Raise EngineError for tensors that are not the model's, or a server that they cannot reach."""
        info, url = self._endpoint.info, self._endpoint.url
        if info.pp_size > 1 or (info.dp_size > 1 and not info.enable_dp_attention):
            raise EngineError(
                f"{url} runs with pp_size {info.pp_size} and dp_size {info.dp_size}, and SGLang takes tensors only "
                f"with pp_size 1, and with dp_size 1 or enable_dp_attention; give it a folder"
            )
        if local and not self._endpoint.is_here:
            raise EngineError(
                f"tensors reach a server through this host's memory, and {url} is on another host; give them as "
                "fsm_rollout.Broadcast(tensors), or save them into a folder that it reads under the same path"
            )
        check_shapes(known, self._shapes)

    async def begin(self) -> None:
        """Have it forget what it has computed, once it has nothing to do."""
        with self._half_loaded():
            await self._endpoint.flush_cache()
        self._touched, self._endpoint.whole = not self._endpoint.whole, False

    async def load(self, path: str, body: Mapping[str, object], names: Mapping[str, torch.Tensor]) -> None:
        """Have it load a bucket by a route."""
        try:
            try:
                check_shapes(names, self._shapes)
            except EngineError as error:
                raise HalfLoaded(str(error)) from None
            if not self._open:
                await self._tell("/begin_weight_update", {})
                self._open = True
            self._touched = True
            await self._tell(path, {**body, "load_format": "flattened_bucket", "flush_cache": False})
        except HalfLoaded:
            await self._close()
            raise

    async def end(self, version: int | None) -> None:
        """Close the session, and call the weights by their version; HalfLoaded if there is none, and some are new."""
        await self._close()
        if version is None:
            if self._touched:
                raise HalfLoaded(f"{self._endpoint.url} has a part of the new weights")
            self._endpoint.whole = True
            return
        with self._half_loaded():
            await self._endpoint.flush_cache()
            await self._endpoint.call_weights(str(version))
        await self._endpoint.forget_adapter()

    async def _close(self) -> None:
        if self._open:
            self._open = False
            await self._tell("/end_weight_update", {})

    async def _tell(self, path: str, body: Mapping[str, object]) -> None:
        with self._half_loaded():
            answer = await self._endpoint.tell(path, body)
            if not answer.success:
                raise EngineError(f"the SGLang server {self._endpoint.url} refused {path}: {answer.message}")

    def _half_loaded(self) -> AbstractContextManager[None]:
        """Whatever is refused while an update is under way leaves no whole weights: also by the trainer's own means."""
        return half_loaded_if(lambda: not self._endpoint.whole)

    # -- the broadcast's group ---------------------------------------------------------------------------------------

    async def join(self, seat: Seat) -> None:
        """Take the server's ranks in a group."""
        await self._tell("/init_weights_update_group", asdict(seat))

    async def leave(self, group: str) -> None:
        """Give them back."""
        await self._tell("/destroy_weights_update_group", {"group_name": group})


class SGLangServer(HTTPEngine):
    """An engine whose weights are an SGLang server's."""

    _endpoint: SGLangEndpoint

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Have the server keep nothing more for these, where it keeps something (``--enable-session-radix-cache``)."""
        self._link.end_sessions(sessions)

    def _route(self, endpoint: SGLangEndpoint) -> None:
        self._weights, self._tensors = WeightRoutes(endpoint), needed_of(endpoint.folder)

    @property
    def facts(self) -> EngineFacts:
        """See there."""
        return replace(super().facts, tensors=self._tensors)

    async def update_weights(self, weights: Weights | WeightSource, version: int | None = None) -> int:
        """See :meth:`HTTPEngine.update_weights`; tensors go by their source."""
        source = as_source(weights)
        if isinstance(source, Loaded):
            return await super().update_weights(source.weights, version)
        number = self.weight_version + 1 if version is None else version
        await asyncio.to_thread(source.check)
        for error in await source.deliver([self], number, UPDATE_WITHIN):
            if error is not None:
                raise error
        return number

    async def load_adapter(self, adapter: Adapter, version: int) -> None:
        """See :class:`~fsm_rollout.engines.adapters.AdapterSink`."""
        if not self._endpoint.info.enable_lora:
            raise EngineError(
                f"{self._endpoint.url} was started without LoRA; give it enable_lora, max_lora_rank and "
                "lora_target_modules (`args:` of kind sglang)"
            )
        await self._step(partial(self._endpoint.load_adapter, adapter.folder, version), version)

    # -- a bucket sink -----------------------------------------------------------------------------------------------

    async def begin_update(self, known: Mapping[str, torch.Tensor], *, local: bool) -> None:
        """See :class:`~fsm_rollout.engines.weight_sources.BucketSink`."""
        self._weights.check(known, local=local)
        await self._step(self._weights.begin)

    async def load_bucket(self, bucket: Bucket) -> None:
        """See :class:`~fsm_rollout.engines.weight_sources.BucketSink`."""
        from fsm_rollout.engines.sglang.handles import handle  # torch

        handles = [handle(bucket) for _ in range(self.address.ranks)]
        route = "/update_weights_from_tensor"
        await self._step(partial(self._weights.load, route, {"serialized_named_tensors": handles}, bucket.tensors))

    async def end_update(self, version: int | None) -> None:
        """See :class:`~fsm_rollout.engines.weight_sources.BucketSink`."""
        whole = self.weight_version if version is None else version
        await self._step(partial(self._weights.end, version), whole)

    # -- a broadcast sink --------------------------------------------------------------------------------------------

    @property
    def address(self) -> ServerAddress:
        """Where the server is."""
        return ServerAddress(self._endpoint.url, self._endpoint.api_key, self._endpoint.info.tp_size)

    async def join_group(self, seat: Seat) -> None:
        """See :class:`~fsm_rollout.engines.broadcast.BroadcastSink`."""
        await self._step(partial(self._weights.join, seat))

    async def leave_group(self, group: str) -> None:
        """See :class:`~fsm_rollout.engines.broadcast.BroadcastSink`."""
        await self._step(partial(self._weights.leave, group))

    async def receive_bucket(self, bucket: Bucket, group: str) -> None:
        """See :class:`~fsm_rollout.engines.broadcast.BroadcastSink`."""
        names, dtypes, shapes, *_ = zip(*bucket.contents, strict=True)
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group}
        await self._step(partial(self._weights.load, "/update_weights_from_distributed", body, bucket.tensors))
