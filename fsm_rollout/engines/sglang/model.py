"""What a model folder says about itself, read without torch or SGLang.

Invariant: only small files and the headers of safetensors files are read. What a folder does not say is ``None`` or
empty, never guessed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import stop_tokens

if TYPE_CHECKING:
    import torch


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise EngineError(f"'{path}' is not JSON: {error}") from None
    return config if isinstance(config, Mapping) else {}


def _text_config(folder: Path) -> Mapping[str, Any]:
    config = _config(folder / "config.json")
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def config_number(folder: Path, key: str) -> int | None:
    """Return a number of the config (``vocab_size``, say); EngineError if a file of the folder is broken."""
    number = _text_config(folder).get(key)
    return number if isinstance(number, int) else None


def stop_tokens_in(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Return the stop tokens of the generation config, else the config's, else the tokenizer's.

    Raises:
        EngineError: a file of the folder is broken.
    """
    of_generation = _config(folder / "generation_config.json").get("eos_token_id")
    return stop_tokens(of_generation, _text_config(folder).get("eos_token_id"), tokenizer.eos_token_id)


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
    if "model.embed_tokens.weight" in shapes and _text_config(folder).get("tie_word_embeddings"):
        shapes.setdefault("lm_head.weight", shapes["model.embed_tokens.weight"])
    return shapes


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


def save_tensors(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Save weights so that :func:`shapes_in` and SGLang find them in ``folder``; views and tied tensors in full."""
    import torch
    from safetensors.torch import save_file

    tensors = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in weights.items()}
    save_file(tensors, folder / "model.safetensors")
