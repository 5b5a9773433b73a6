"""Loading models and weights from folders, onto a device that is there.

Invariant: one model is built at a time in this process. transformers builds a model under settings that hold for the
whole process (default dtype, initialisers, progress bars): two at once break each other, and these for good.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from fsm_rollout.engines.weights import check_shapes
from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import load_tokenizer, model_folder

_BUILDING = threading.Lock()
NAMED = 3  # how many of the tensors that a folder lacks are named


def load_model(
    model: str | Path = "embedded", *, device: str | torch.device = "cpu", dtype: torch.dtype | str = "float32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return ``(model, tokenizer)``: a trainer's own copy of ``embedded``, a model folder or a model of the hub.

    The model is in evaluation mode. The engine that samples has another copy: hand it new weights with
    ``rollout.update_weights(dict(model.named_parameters()))``.

    Raises:
        EngineError: there is none, transformers cannot load it, or ``device`` is not there or cannot take it.
    """
    place = as_device(device)
    check_device(place)
    folder = model_folder(model)
    tokenizer = load_tokenizer(folder)
    return _load_model(folder, dtype, place), tokenizer


def as_device(device: str | torch.device) -> torch.device:
    """Return the device of that name; EngineError if it is no name of one."""
    try:
        return torch.device(device)
    except RuntimeError:
        raise EngineError(f"device '{device}' is none that torch knows; write 'cpu', 'cuda' or 'cuda:1'") from None


def check_device(device: torch.device) -> None:
    """Raise EngineError for a GPU that this process does not have: no model is at fault for that."""
    if device.type != "cuda" or (count := torch.cuda.device_count()) > (device.index or 0):
        return
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built without CUDA; install torch with CUDA"
    elif not count:
        why = "torch sees no GPU (see nvidia-smi, the driver, CUDA_VISIBLE_DEVICES)"
    else:
        why = f"torch sees {count} GPU(s), of which the last is 'cuda:{count - 1}'"
    raise EngineError(f"device '{device}' is not there: {why}, or leave `device` out, which takes what there is")


def read_weights(folder: str | Path, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a model folder, on the CPU; EngineError if it cannot be loaded."""
    tensors: Mapping[str, torch.Tensor] = _load_model(model_folder(folder), dtype, torch.device("cpu")).state_dict()
    return tensors


def _load_model(folder: Path, dtype: torch.dtype | str, device: torch.device) -> PreTrainedModel:
    with _BUILDING:
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # it would be drawn across whatever the caller shows
        try:
            sees = hasattr(AutoConfig.from_pretrained(folder, local_files_only=True), "vision_config")
            kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
            loaded, found = kind.from_pretrained(
                folder, local_files_only=True, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
            )
            if missing := sorted(found["missing_keys"]):  # transformers makes them up, at random
                named = ", ".join(missing[:NAMED])
                more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
                raise EngineError(
                    f"model '{folder}' lacks {len(missing)} of its tensors: {named}{more}; save all of it with "
                    f"save_pretrained"
                )
            return loaded.to(device).eval()
        except EngineError:
            raise
        except Exception as error:  # whatever a broken file makes transformers, torch or safetensors raise
            raise EngineError(f"model '{folder}' cannot be loaded: {type(error).__name__}: {error}") from error
        finally:
            if bars:
                logging.enable_progress_bar()


def check_supported(model: PreTrainedModel) -> None:
    """Check that the decode loop is exact for this model.

    Raises:
        EngineError: it has layers that are not full attention, or an attention kernel that takes no given mask.
    """
    config = model.config.get_text_config()
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
    sliding = getattr(config, "use_sliding_window", bool(getattr(config, "sliding_window", None)))
    if kinds != ["full_attention"] or sliding:
        found = ", ".join(kinds) + (" and a sliding window" if sliding else "")
        raise EngineError(
            f"{type(model).__name__} has layers of kind {found}; the transformers engine decodes full attention "
            f"only, the sglang engine serves such models"
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        raise EngineError(
            f"the model was loaded with attn_implementation='{config._attn_implementation}'; load it with 'sdpa'"
        )


def check_fit(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise EngineError for a name that the model does not have, or another shape than its own."""
    check_shapes(weights, {name: tensor.shape for name, tensor in model.state_dict().items()})


def copy_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy new weights, which fit, over the model's own; those that are not named stay as they are."""
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


def untied(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Return names of a model's tensors, with one name for those that are one tensor."""
    own, first = model.state_dict(), dict[int, str]()
    for name, tensor in own.items():
        first.setdefault(tensor.data_ptr(), name)
    return {first[own[name].data_ptr()] for name in names}
