"""Checks new weights before any engine is touched: a model with a single NaN samples nothing but noise.

Invariant: whatever passes has only finite numbers in tensors that hold their data; whatever does not is an error that
names the first such tensor. Nothing is copied but the tensor that is looked at, and that only where its kind of numbers
cannot be compared as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsm_rollout.errors import EngineError, did_you_mean


def check_finite(weights: Mapping[str, Any]) -> None:
    """Check tensors by name; for large ones this takes as long as reading their memory once.

    Raises:
        EngineError: one is no tensor, holds no data, or has a NaN or an infinity in it.
    """
    for name, tensor in weights.items():
        _check(name, tensor, "")


def check_weights(weights: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Check tensors by name that are to replace those of a model that has ``shapes`` (empty: not known).

    Raises:
        EngineError: a name or shape does not fit; or see :func:`check_finite`.
    """
    for name, tensor in weights.items() if shapes else ():
        if name not in shapes:
            raise EngineError(f"new weights name '{name}', which the model does not have{did_you_mean(name, shapes)}")
        if hasattr(tensor, "shape") and list(tensor.shape) != list(shapes[name]):
            raise EngineError(
                f"new weight '{name}' has shape {list(tensor.shape)}, the model's has {list(shapes[name])}"
            )
    check_finite(weights)


def check_folder(folder: Path) -> None:
    """Check a model folder's safetensors (no other files), one tensor in memory at a time; EngineError for NaN, say."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no mapping
                    _check(name, file.get_tensor(name), f" in '{path}'")
        except (SafetensorError, OSError) as error:
            raise EngineError(f"'{path}' cannot be read: {type(error).__name__}: {error}") from None


def _check(name: str, tensor: Any, where: str) -> None:
    if not hasattr(tensor, "is_floating_point"):
        raise EngineError(f"new weight '{name}'{where} is a {type(tensor).__name__}; weights are torch tensors by name")
    if tensor.is_meta:
        raise EngineError(f"new weight '{name}'{where} is on the meta device, so it has a shape but no numbers")
    if not tensor.is_floating_point() or not tensor.numel():
        return
    values = tensor.detach()
    if tensor.element_size() == 1:
        values = values.float()  # eight bits cannot be compared as they are
    least, most = (float(value) for value in values.aminmax())
    if not (math.isfinite(least) and math.isfinite(most)):
        nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
        raise EngineError(
            f"new weight '{name}'{where} is not finite: {nan:,} NaN and {infinite:,} infinite of {tensor.numel():,} "
            f"values; nothing has changed (has the last training step diverged?)"
        )
