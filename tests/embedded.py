"""The embedded model's tokenizer, loaded once."""

from functools import cache
from typing import Any


@cache
def tokenizer() -> Any:
    from fsm_rollout.model import embedded_model
    from fsm_rollout.model.folders import load_tokenizer  # without transformers' models, which take seconds to import

    return load_tokenizer(embedded_model())


def encoded(text: str) -> list[int]:
    """Return a text's ids, as they stand."""
    return list(tokenizer().encode(text, add_special_tokens=False))
