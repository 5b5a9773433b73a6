"""New weights before any engine is touched: what cannot be right is refused.

Invariant: whatever passes has only finite numbers in whole tensors that hold their data (a model with a single NaN
samples nothing but noise); whatever does not is an error that names the first such tensor.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsm_rollout.errors import EngineError, did_you_mean
from fsm_rollout.model.folders import text_config

FILES_KNOWN = 4096  # how many files that were found good are remembered
_CHECKING = threading.Lock()  # held while folders are checked, so that of two at once one finds what the other learned


def check_finite(weights: Mapping[str, Any]) -> None:
    """Check tensors by name; for large ones this takes as long as reading their memory once.

    Raises:
        EngineError: one is no tensor, a shard of one, holds no data, or has a NaN or an infinity in it.
    """
    for name, tensor in weights.items():
        check_tensor(name, tensor)


def check_shapes(weights: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Check names and shapes of tensors that are to replace those of a model that has ``shapes`` (empty: not known).

    Raises:
        EngineError: a name or shape does not fit.
    """
    for name, tensor in weights.items() if shapes else ():
        if name not in shapes:
            raise EngineError(f"new weights name '{name}', which the model does not have{did_you_mean(name, shapes)}")
        if hasattr(tensor, "shape") and list(tensor.shape) != list(shapes[name]):
            raise EngineError(
                f"new weight '{name}' has shape {list(tensor.shape)}, the model's has {list(shapes[name])}"
            )


def check_folder(folder: Path) -> None:
    """Check a model folder's safetensors (no other files), one tensor in memory at a time; EngineError for NaN, say.

    A file that was found good is not read again until it changes: several replicas may be given one folder.
    """
    with _CHECKING:
        for path in sorted(folder.glob("*.safetensors")):
            state = path.stat()
            _check_file(path.resolve(), state.st_ino, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=FILES_KNOWN)
def _check_file(path: Path, *state: int) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                check_tensor(name, file.get_tensor(name), f" in '{path}'")
    except (SafetensorError, OSError) as error:
        raise EngineError(f"'{path}' cannot be read: {type(error).__name__}: {error}") from None


def check_tensor(name: str, tensor: Any, where: str = "") -> None:
    """Check one tensor; see :func:`check_finite`. ``where``: follows its name in messages."""
    if not hasattr(tensor, "is_floating_point"):
        raise EngineError(f"new weight '{name}'{where} is a {type(tensor).__name__}; weights are torch tensors by name")
    if hasattr(tensor, "full_tensor"):
        raise EngineError(f"new weight '{name}'{where} is a shard; give its `full_tensor()`, which every rank computes")
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
            f"values (has the last training step diverged?)"
        )


def shapes_in(folder: Path) -> Mapping[str, list[int]]:
    """Return the shapes of the folder's tensors by name, from its safetensors files; EngineError if one is broken."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
                start = file.tell()
            header.pop("__metadata__", None)
            end = start + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
            if (size := path.stat().st_size) < end:
                raise ValueError(f"it is cut off: it has {size:,} of {end:,} bytes")
            shapes |= {name: tensor["shape"] for name, tensor in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise EngineError(f"'{path}' is no safetensors file: {type(error).__name__}: {error}") from None
    if "model.embed_tokens.weight" in shapes and text_config(folder).get("tie_word_embeddings"):
        shapes.setdefault("lm_head.weight", shapes["model.embed_tokens.weight"])
    return shapes


def needed_of(folder: Path) -> frozenset[str]:
    """Return the names of the tensors without which new weights are not the model's whole ones; see `shapes_in`.

    A head that is tied, and what a model drafts tokens with (``mtp``), are left out by some trainers.
    """
    tied = {"lm_head.weight"} if text_config(folder).get("tie_word_embeddings") else set[str]()
    return frozenset(name for name in shapes_in(folder) if name not in tied and "mtp" not in name.split("."))


def check_weights_there(folder: Path) -> None:
    """Raise EngineError for a folder without whole weights, which SGLang would find out after a minute."""
    if not any(any(folder.glob(f"*.{kind}")) for kind in ("safetensors", "bin", "pt", "gguf")):
        raise EngineError(f"'{folder}' has no weights (*.safetensors, *.bin); copy them there")
    shapes_in(folder)


def check_complete(folder: Path, shapes: Mapping[str, list[int]]) -> None:
    """Check from its headers that a folder's tensors can take the place of all those that have ``shapes``.

    What a model drafts tokens with (``mtp``) may be missing, because trainers leave it out. A folder without
    safetensors files is not looked at.

    Raises:
        EngineError: a tensor is missing, or has another shape; or a file is broken.
    """
    found = shapes_in(folder)
    for name, shape in shapes.items() if found else ():
        if name not in found and "mtp" not in name.split("."):
            raise EngineError(f"the new weights in '{folder}' lack '{name}', which the model has; save all of them")
        if found.get(name, shape) != shape:
            raise EngineError(f"new weight '{name}' in '{folder}' has shape {found[name]}, the model's has {shape}")
