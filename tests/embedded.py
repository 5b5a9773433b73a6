"""The embedded model's tokenizer, loaded once."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from fsm_rollout.model import embedded_model

    return AutoTokenizer.from_pretrained(embedded_model())
