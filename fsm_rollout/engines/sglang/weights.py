"""New weights on their way to SGLang's process: checked, cut into parts, as bytes and back.

Invariant: weights are checked in full before any of them travels, and no part is larger than ``PART_BYTES`` unless a
single tensor is.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping

import torch

from fsm_rollout.errors import EngineError, did_you_mean

Weights = Mapping[str, torch.Tensor]

PART_BYTES = 512 * 2**20
"""How much travels at once."""


def check_weights(weights: Weights, shapes: Mapping[str, list[int]]) -> None:
    """Check new weights against the shapes of the model's: SGLang passes over a name that it does not know.

    Raises:
        EngineError: a name or shape does not fit.
    """
    for name, tensor in weights.items():
        if name not in shapes:
            raise EngineError(f"new weights name '{name}', which the model does not have{did_you_mean(name, shapes)}")
        if list(tensor.shape) != shapes[name]:
            raise EngineError(f"new weight '{name}' has shape {list(tensor.shape)}, the model's has {shapes[name]}")


def parts_of(weights: Weights) -> Iterator[bytes]:
    """Yield the weights in parts, each packed."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if part and size + tensor.nbytes > PART_BYTES:
            yield packed(part)
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield packed(part)


def packed(tensors: Weights) -> bytes:
    """Return tensors as bytes; a view becomes a tensor of its own."""
    buffer = io.BytesIO()
    torch.save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> list[tuple[str, torch.Tensor]]:
    """Return what :func:`packed` packed, on the CPU."""
    tensors: dict[str, torch.Tensor] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return list(tensors.items())
