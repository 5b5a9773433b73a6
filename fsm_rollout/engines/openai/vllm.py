"""vLLM's own routes, beside OpenAI's protocol: for weights, adapters and memory.

Invariant: a server is asked only by routes that it has answered. They are those of vLLM's development mode
(``VLLM_SERVER_DEV_MODE=1``; adapters with ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``). What is known
of their answers is what its modules ``entrypoints/serve/dev/{rlhf,sleep,cache,rpc}/api_router.py`` and
``entrypoints/serve/lora/api_router.py`` write at commit 0100a2129224: they were read, and not run.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from fsm_rollout.engines.http.endpoint import MEMORY_WITHIN, UPDATE_WITHIN, Endpoint
from fsm_rollout.engines.protocol import ReplicaLost
from fsm_rollout.errors import EngineError


class Sleeping(msgspec.Struct):
    """``/is_sleeping``."""

    is_sleeping: bool


class WeightInfo(msgspec.Struct):
    """``/weight_info``."""

    weight_version: str | None


class VLLMRoutes:
    """See the module.

    Args:
        endpoint: the server.
        says_version: whether it has a number for its weights.
    """

    def __init__(self, endpoint: Endpoint, *, says_version: bool) -> None:
        self._endpoint, self._says_version = endpoint, says_version

    @classmethod
    async def of(cls, endpoint: Endpoint) -> VLLMRoutes | None:
        """Return those of a server; ``None``: it has none."""
        if not await _has(endpoint, "/is_sleeping", Sleeping):
            return None
        return cls(endpoint, says_version=await _has(endpoint, "/weight_info", WeightInfo))

    async def label(self) -> str | None:
        """Return what it calls its weights; ``None``: it does not say."""
        if not self._says_version:
            return None
        return str((await self._endpoint.ask("/weight_info", WeightInfo)).weight_version)

    async def reload(self, folder: Path) -> None:
        """Have it read a folder under the same path, in all its processes."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._endpoint.call("/collective_rpc", call, within=UPDATE_WITHIN)

    async def call_weights(self, label: str) -> None:
        """Have it forget what it has computed, and call its weights so."""
        await self._endpoint.call("/reset_prefix_cache", {})
        if self._says_version:
            await self._endpoint.call("/update_weight_version", {"new_version": label})

    async def sleep(self) -> None:
        """Have it move its weights to the host's memory, and give that of its cache back."""
        await self._endpoint.call("/sleep?level=1", {}, within=MEMORY_WITHIN)

    async def wake(self) -> None:
        """Have it take the memory again."""
        await self._endpoint.call("/wake_up", {}, within=MEMORY_WITHIN)


async def _has(endpoint: Endpoint, path: str, form: type[object]) -> bool:
    try:
        await endpoint.ask(path, form)
    except ReplicaLost:
        raise
    except EngineError:
        return False
    return True
