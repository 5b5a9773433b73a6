"""LoRA adapters as new weights: small ones, beside a model that stays as it is.

Invariant: a version is an adapter of its own (``policy@7``), and each token is of the version that it bears: a request
to a server names the adapter that is to sample it; an engine in this process adds it to the model between two steps.
Weights of the model itself, when they are loaded, take an adapter's place.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from fsm_rollout.engines.protocol import TokenSource
from fsm_rollout.engines.weight_sources import ADAPTED, UPDATE_WITHIN, WeightsGone, answers
from fsm_rollout.engines.weights import check_finite
from fsm_rollout.errors import EngineError, did_you_mean

if TYPE_CHECKING:
    import torch

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # as PEFT calls them
OF_A, OF_B = ".lora_A.weight", ".lora_B.weight"
ABOVE = "base_model.model."  # what PEFT puts before the names of the model's own tensors
# What changes more than a product of two matrices added to some linear layers, by PEFT's names, and what stands for no.
MORE: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False, None), "bias": ("none", None), "modules_to_save": (None, []), "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "lora_bias": (False, None),
}  # fmt: skip


@runtime_checkable
class AdapterSink(Protocol):
    """An engine that can sample with an adapter."""

    async def load_adapter(self, adapter: Adapter, version: int) -> None:
        """Sample with it, and call that this version. EngineError: it cannot; it goes on as it was."""


class Adapter:
    """A LoRA adapter as new weights, in the folder that PEFT's ``save_pretrained`` writes.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``, which servers read under the same path.
            Each version has its own: an engine that is lost is filled from it again.

    For SGLang servers that were started with ``enable_lora``, and the transformers engine.
    """

    names = ADAPTED
    touched: frozenset[str] = frozenset()
    again = True

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder).resolve()
        self._digest = b""

    def check(self) -> None:
        """Check that it is a plain LoRA adapter, whole and finite.

        Raises:
            EngineError: it is not.
        """
        config = self._config()
        for key, plain in MORE.items():
            if config.get(key, plain[0]) not in plain:
                raise EngineError(
                    f"the adapter '{self.folder}' has {key} {config[key]!r}, and plain LoRA is loaded only"
                )
        tensors = self.tensors()
        check_finite(tensors)
        for name in tensors:
            other = name.replace(OF_A, OF_B) if name.endswith(OF_A) else name.replace(OF_B, OF_A)
            if other == name or other not in tensors:
                raise EngineError(f"'{name}' of the adapter '{self.folder}' is no half of a pair {OF_A}, {OF_B}")
        self._digest = self._read()

    async def deliver(
        self, engines: Sequence[TokenSource], version: int, seconds: float = UPDATE_WITHIN
    ) -> list[Exception | None]:
        """See :class:`~fsm_rollout.engines.protocol.WeightSource`."""
        if await asyncio.to_thread(self._read) != self._digest:
            raise WeightsGone(f"the adapter '{self.folder}' has changed since; give each version a folder of its own")
        return await answers([load_adapter(engine, self, version) for engine in engines], seconds)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return its tensors by PEFT's names."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            found: Mapping[str, torch.Tensor] = load_file(self.folder / TENSORS)
            return found
        except (SafetensorError, OSError) as error:
            raise EngineError(f"'{self.folder / TENSORS}' cannot be read: {error}") from None

    def merged(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a model that it changes, changed; EngineError if it is another model's."""
        config, tensors = self._config(), self.tensors()
        rank = float(config["r"])
        scale = float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
        found: dict[str, torch.Tensor] = {}
        for name in tensors:
            if not name.endswith(OF_A):
                continue
            of = name.removeprefix(ABOVE).replace(OF_A, ".weight")
            if of not in own:
                raise EngineError(f"the adapter changes '{of}', which the model does not have{did_you_mean(of, own)}")
            down, up = (tensors[half].to(own[of].device).float() for half in (name, name.replace(OF_A, OF_B)))
            if (shape := [up.shape[0], down.shape[1]]) != list(own[of].shape):
                raise EngineError(f"the adapter's '{of}' has shape {shape}, the model's has {list(own[of].shape)}")
            found[of] = (own[of].float() + scale * (up @ down)).to(own[of].dtype)
        return found

    def _config(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / CONFIG).read_text("utf-8"))
            if found.get("peft_type") != "LORA" or not found["r"] or not found["lora_alpha"]:
                raise ValueError(f"it is no LoRA adapter: peft_type is {found.get('peft_type')!r}")
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise EngineError(f"'{self.folder / CONFIG}' cannot be read: {type(error).__name__}: {error}") from None
        return dict(found)

    def _read(self) -> bytes:
        try:
            parts = [(self.folder / name).read_bytes() for name in (CONFIG, TENSORS)]
        except OSError as error:
            raise WeightsGone(f"the adapter '{self.folder}' is there no more: {error}") from None
        return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


async def load_adapter(engine: TokenSource, adapter: Adapter, version: int) -> None:
    """Have an engine sample with an adapter; EngineError: it cannot."""
    if not isinstance(engine, AdapterSink):
        raise EngineError("this engine takes no adapters; SGLang servers and the transformers engine do")
    await engine.load_adapter(adapter, version)
