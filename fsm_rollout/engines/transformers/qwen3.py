"""Qwen3's forward pass over :class:`~fsm_rollout.engines.transformers.key_value_rows.Rows`, on a CPU in float32.

Invariant: the arithmetic of transformers' ``Qwen3ForCausalLM``, differently arranged: rounding apart (1e-5 in a log
probability), what comes out is what it computes; its parameters are read where they are, so they are always the
present ones.

A small model on a CPU waits for its cache: a step reads the keys and values of every row. So tokens with which rows
begin alike (a system prompt, the tools) are held once and attended to in one matrix product for all rows; each
operation is one call; and where rows are filled, the last layer stops at its keys and values, since nobody asks what
comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from fsm_rollout.engines.transformers.key_value_rows import copied, roomier

PREFIX_ROW = 0
"""Of the cache; the rows of requests come after it."""
PLAIN = ("torch.nn.modules.", "transformers.")
"""Where the classes of a model without adapters come from."""
UNSEEN = torch.finfo(torch.float32).min
"""Added to the score of a token that another does not see."""


def serves(model: PreTrainedModel) -> bool:
    """Say whether :class:`Qwen3Rows` is exact for this model: a plain Qwen3, without adapters or hooks in it."""
    if type(model).__name__ != "Qwen3ForCausalLM" or (model.device.type, model.dtype) != ("cpu", torch.float32):
        return False
    config = model.config
    usual = not config.attention_bias and config.hidden_act == "silu"
    return (
        usual
        and config.rope_parameters["rope_type"] == "default"
        and all(type(module).__module__.startswith(PLAIN) for module in model.modules())
        and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    )


class Qwen3Rows:
    """See the module, and :class:`~fsm_rollout.engines.transformers.key_value_rows.Rows`."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self.model = model
        self.prefix: list[int] = []
        self._queries, self._heads, self._dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._epsilon: float = config.rms_norm_eps
        self._layers = [_parameters(layer) for layer in model.model.layers]
        self._cache = torch.zeros(len(self._layers), 2, 0, self._heads, 0, self._dim)
        """``[layers, keys and values, rows, heads, columns, head_dim]``"""

    def reserve(self, rows: int, columns: int, limit: int) -> None:
        """See :class:`Rows`."""
        capacity, width = self._cache.shape[2], self._cache.shape[4]
        room = roomier(capacity, width, rows + 1, columns, limit)
        if room != (capacity, width):
            self._cache = copied(self._cache, *room)

    def copy(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        """See :class:`Rows`."""
        held = [self._cache[:, :, 1 + row, :, :width].clone() for row, width in zip(sources, lengths, strict=True)]
        for row, copy in zip(targets, held, strict=True):
            self._cache[:, :, 1 + row, :, : copy.shape[3]] = copy

    def hold(self, prefix: list[int]) -> None:
        """See :class:`Rows`."""
        self.prefix = prefix
        if prefix:
            self.reserve(0, len(prefix), len(prefix))
            positions = torch.arange(len(prefix))[None]
            self.fill(torch.tensor([prefix]), [PREFIX_ROW - 1], positions, positions[:, 0])

    def fill(self, ids: torch.Tensor, rows: Sequence[int], positions: torch.Tensor, shared: torch.Tensor) -> None:
        """See :class:`Rows`."""
        self._forward(ids, rows, positions, shared)

    def step(self, ids: torch.Tensor, positions: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """See :class:`Rows`."""
        hidden = self._forward(ids[:, None], None, positions[:, None], shared)
        assert hidden is not None
        return functional.linear(self._norm(hidden, self.model.model.norm.weight), self.model.lm_head.weight)

    def _forward(
        self, ids: torch.Tensor, rows: Sequence[int] | None, positions: torch.Tensor, shared: torch.Tensor
    ) -> torch.Tensor | None:
        """Write the keys and values of tokens; where they are those of a step, return its hidden states ``[n, h]``."""
        # 1. The place of each token's keys and values, and what each token sees.
        n, q = ids.shape
        columns = positions - shared[:, None]
        common, width = int(shared.max()), int(columns.max()) + 1
        row = torch.arange(1, n + 1) if rows is None else torch.tensor(rows) + 1
        heads = row[:, None] * self._heads + torch.arange(self._heads)
        places = (heads[:, None] * self._cache.shape[4] + columns[:, :, None]).flatten()
        unseen = torch.zeros(n, 1, q, common + width)
        unseen[..., :common].masked_fill_((torch.arange(common) >= shared[:, None])[:, None, None], UNSEEN)
        unseen[..., common:].masked_fill_((torch.arange(width) > columns[:, :, None])[:, None], UNSEEN)
        # 2. The layers.
        states = functional.embedding(ids.flatten(), self.model.model.embed_tokens.weight)
        cos, sin = (turn[:, :, None] for turn in self.model.model.rotary_emb(states, positions))
        sin = torch.cat([-sin[..., : self._dim // 2], sin[..., self._dim // 2 :]], -1)
        scaled = (cos * self._dim**-0.5, sin * self._dim**-0.5)
        for layer, cache in zip(self._layers, self._cache, strict=True):
            normed = self._norm(states, layer.before_attention)
            keys = self._turned(
                functional.linear(normed, layer.key).view(n, q, -1, self._dim), layer.key_norm, cos, sin
            )
            cache[0].view(-1, self._dim).index_copy_(0, places, keys.reshape(-1, self._dim))
            cache[1].view(-1, self._dim).index_copy_(
                0, places, functional.linear(normed, layer.value).view(-1, self._dim)
            )
            if layer is self._layers[-1] and rows is not None:
                return None
            queries = self._turned(
                functional.linear(normed, layer.query).view(n, q, -1, self._dim), layer.query_norm, *scaled
            )
            if rows is None:
                own = cache[:, 1 : n + 1, :, :width]
            else:
                own = torch.stack([cache[:, 1 + each, :, :width] for each in rows], 1)
            attended = self._attended(queries, own, cache[:, PREFIX_ROW, :, :common], unseen)
            states = torch.addmm(states, attended, layer.out.t())
            normed = self._norm(states, layer.before_mlp)
            gated = functional.silu(functional.linear(normed, layer.gate)) * functional.linear(normed, layer.up)
            states = torch.addmm(states, gated, layer.down.t())
        return states

    def _attended(
        self, queries: torch.Tensor, own: torch.Tensor, prefix: torch.Tensor, unseen: torch.Tensor
    ) -> torch.Tensor:
        """Return ``[n · q, heads · head_dim]`` from queries ``[n, q, heads, head_dim]``.

        ``own`` are keys and values ``[2, n, key heads, width, head_dim]``, ``prefix`` ``[2, key heads, common,
        head_dim]``, and ``unseen`` ``[n, 1, q, common + width]`` is 0 where a token sees another.
        """
        # The queries of all heads that share keys, then all tokens: [n, key heads, g · q, head_dim].
        n, q = queries.shape[:2]
        heads, common, columns = self._heads, prefix.shape[2], unseen.shape[-1]
        queries = queries.view(n, q, heads, -1, self._dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        scores = queries @ own[0].transpose(-1, -2)
        if common:
            of_prefix = queries.transpose(0, 1).flatten(1, 2) @ prefix[0].transpose(-1, -2)
            scores = torch.cat([of_prefix.view(heads, n, -1, common).transpose(0, 1), scores], -1)
        scores.view(n, heads, -1, q, columns).add_(unseen[:, None])
        weights = scores.softmax(-1)
        attended = weights[..., common:] @ own[1]
        if common:
            of_prefix = weights[..., :common].transpose(0, 1).flatten(1, 2) @ prefix[1]
            attended += of_prefix.view(heads, n, -1, self._dim).transpose(0, 1)
        return attended.view(n, heads, -1, q, self._dim).permute(0, 3, 1, 2, 4).reshape(n * q, -1)

    def _norm(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(states, weight.shape, weight, self._epsilon)

    def _turned(self, states: torch.Tensor, norm: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Normalise and turn queries or keys by their positions; ``sin``'s first half has the other sign."""
        states = self._norm(states, norm)
        return torch.addcmul(states * cos, states.roll(self._dim // 2, -1), sin)


class _Layer(NamedTuple):
    before_attention: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    out: torch.Tensor
    before_mlp: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


def _parameters(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    modules = (
        layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj, attention.q_norm, attention.k_norm,
        attention.o_proj, layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj, mlp.down_proj,
    )  # fmt: skip
    return _Layer(*(module.weight for module in modules))
