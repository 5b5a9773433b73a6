"""Which local folder a model's name stands for, and its tokenizer; nothing here imports torch or asks a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsm_rollout.errors import EngineError, did_you_mean
from fsm_rollout.model import CHECKPOINTS, embedded_model

EMBEDDED = "embedded"


def model_folder(model: str | Path, base: str | Path = ".") -> Path:
    """Return the folder that ``model`` names: ``embedded``, ``embedded:early``, or a path (relative to ``base``).

    Raises:
        EngineError: there is no such checkpoint or folder, or it holds no model.
    """
    name, _, checkpoint = str(model).partition(":")
    if name == EMBEDDED:
        checkpoint = checkpoint or CHECKPOINTS[0]
        if checkpoint not in CHECKPOINTS:
            raise EngineError(
                f"embedded checkpoint '{checkpoint}' does not exist{did_you_mean(checkpoint, CHECKPOINTS)}"
            )
        folder = embedded_model(checkpoint)
    else:
        folder = Path(base) / Path(model).expanduser()
    if not folder.is_dir():
        raise EngineError(
            f"model '{model}': there is no folder '{folder}'; give the path of a downloaded model (nothing is "
            f"downloaded here), or '{EMBEDDED}'"
        )
    if not (folder / "config.json").is_file():
        raise EngineError(f"model '{model}': '{folder}' has no config.json; give a folder that save_pretrained wrote")
    return folder


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model folder.

    Raises:
        EngineError: transformers cannot load it.
    """
    from transformers import AutoTokenizer  # takes seconds, so only where it is needed

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a broken file makes transformers or tokenizers raise
        raise EngineError(f"the tokenizer in '{folder}' cannot be loaded: {type(error).__name__}: {error}") from error
