"""A byte-level tokenizer and a small random model: real, and made in a moment.

Torch is imported where it is used: the process that hands out tests to others runs none.
"""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Bytes, and one special token: 257 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small operations on shared cores: more threads wait for one another most of the time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(seed: int, vocabulary: int = 257) -> Any:
    """Return a Qwen3 with grouped-query attention and weights large enough that tokens depend on what precedes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=256,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model() -> Any:
    """Do not change its weights."""
    return make_model(0)


@pytest.fixture(scope="session")
def other_model() -> Any:
    """Other weights of the same shapes."""
    return make_model(1)
