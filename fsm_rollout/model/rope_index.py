"""How a model counts the positions of tokens where pictures stand: its own ``get_rope_index``, without the model.

Invariant: it is the method of the model's own class, given the model's configuration; no weight is made or read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class RopeIndex:
    """Counts positions as the model in a folder does; see ``get_rope_index`` of its class in transformers."""

    def __init__(self, config: Any, model_class: type[Any]) -> None:
        self._config, self._class = config, model_class

    def __call__(self, **inputs: Any) -> Any:
        """Return the positions ``[3, rows, tokens]``, and how far each row's are off those of text."""
        model: Any = object.__new__(self._class)
        vars(model)["config"] = self._config  # all that the method reads of a model
        return model.get_rope_index(**inputs)


def rope_index(folder: Path) -> RopeIndex | None:
    """Return how the model in a folder counts positions; ``None``: one after the other, as text."""
    from transformers import MODEL_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model_class = MODEL_MAPPING.get(type(config), None)
    return RopeIndex(config, model_class) if hasattr(model_class, "get_rope_index") else None
