"""The forms in which an SGLang server answers.

Invariant: each has what matters here, and nothing else; what a server may leave out has a default.
"""

from __future__ import annotations

import msgspec

KEPT_BY_SGLANG = 6  # tokens of the window that SGLang does not use


class Finish(msgspec.Struct):
    """Why a request has ended."""

    type: str
    message: str | None = None


class Meta(msgspec.Struct):
    """What SGLang says about a request beside its tokens."""

    completion_tokens: int
    finish_reason: Finish | None
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    weight_version: str | int | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    output_token_sampling_logprobs: list[float | None] = []
    output_token_sampling_mask: list[list[int]] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    input_top_logprobs: list[list[tuple[float, int, str | None]] | None] | None = None
    routed_experts: str = ""  # at the end of a request, in base64: int32 `[tokens, layers, top_k]`


class OutputLine(msgspec.Struct):
    """A piece of an answer: the whole answer so far, or with incremental output what is new in it."""

    output_ids: list[int] | None = None
    meta_info: Meta | None = None
    index: int = 0  # which of several answers to one request
    error: dict[str, object] | str | None = None  # stands in place of the others when SGLang refuses the request


class Info(msgspec.Struct):
    """``/server_info``, as far as it matters here."""

    max_req_input_len: int
    max_total_num_tokens: int = 0
    sampling_mask_max_tokens: int = 0
    enable_weights_cpu_backup: bool = False
    enable_return_routed_experts: bool = False
    enable_session_radix_cache: bool = False
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    language_model_only: bool = False
    enable_lora: bool | None = False
    grammar_backend: str | None = None
    skip_tokenizer_init: bool = False
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool = False


class ModelInfo(msgspec.Struct):
    """``/model_info``, as far as it matters here."""

    weight_version: str | int = ""
    has_image_understanding: bool = False


class OrderTaken(msgspec.Struct):
    """What SGLang says of an order."""

    success: bool
    message: str = ""
    error_message: str | None = None  # of an adapter

    @property
    def why(self) -> str:
        """Why it refuses."""
        return self.error_message or self.message
