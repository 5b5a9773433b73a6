"""What a model folder's small files say about its model, read without torch or transformers.

Invariant: what a folder does not say is ``None`` or empty, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import stop_tokens


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise EngineError(f"'{path}' is not JSON: {error}") from None
    return config if isinstance(config, Mapping) else {}


def text_config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration of the language model, which one that sees images nests; EngineError if it is broken."""
    config = _config(folder / "config.json")
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def config_number(folder: Path, key: str) -> int | None:
    """Return a number of the config (``vocab_size``, say); EngineError if a file of the folder is broken."""
    number = text_config(folder).get(key)
    return number if isinstance(number, int) else None


def stop_tokens_in(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Return the stop tokens of the generation config, else the config's, else the tokenizer's.

    Raises:
        EngineError: a file of the folder is broken.
    """
    of_generation = _config(folder / "generation_config.json").get("eos_token_id")
    return stop_tokens(of_generation, text_config(folder).get("eos_token_id"), tokenizer.eos_token_id)
