"""Qwen3's forward pass over :class:`~fsm_rollout.engines.transformers.key_value_rows.Rows`, on a CPU in float32.

Invariant: the arithmetic of transformers' ``Qwen3ForCausalLM``, differently arranged: rounding apart (1e-5 in a log
probability), what comes out is what it computes; its parameters are read where they are, so they are always the
present ones.

A small model on a CPU waits for its cache: a step reads the keys and values of every row. So tokens with which rows
begin alike (a system prompt, the tools) are held once and attended to in one matrix product for all rows; each
operation is one call; and where rows are only filled, the last layer stops at its keys and values, since nobody asks
what comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from fsm_rollout.engines.transformers.key_value_rows import Filling, roomier, roomy_copy

PREFIX_ROW = 0  # of the cache; the rows of requests come after it
PLAIN = ("torch.nn.modules.", "transformers.")  # where the classes of a model without adapters come from
BLOCK = 8  # so many rows of a step attend together, to as many columns as the longest of them has
PIECE = 256  # so many tokens of a row are filled at once: a score for each pair of tokens is in memory
SMALL = 9216  # multiplications of one product, up to which OpenBLAS computes it in the calling thread
UNSEEN = torch.finfo(torch.float32).min  # added to the score of a token that another does not see


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

    shares: ClassVar[bool] = True

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self.model = model
        self.prefix: list[int] = []
        self._heads, self._dim = config.num_key_value_heads, config.head_dim
        self._epsilon: float = config.rms_norm_eps
        self._layers = [_parameters(layer) for layer in model.model.layers]
        # `[layers, keys and values, rows, heads, columns, head_dim]`
        self._cache = torch.zeros(len(self._layers), 2, 0, self._heads, 0, self._dim)

    def reserve(self, used: Sequence[int], columns: int, limit: int) -> None:
        """See :class:`Rows`."""
        rows, width = self._cache.shape[2], self._cache.shape[4]
        if (room := roomier(rows, width, [len(self.prefix), *used], columns, limit)) != (rows, width):
            self._cache = roomy_copy(self._cache, *room, [len(self.prefix), *used])

    def copy(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        """See :class:`Rows`."""
        held = [self._cache[:, :, 1 + row, :, :width].clone() for row, width in zip(sources, lengths, strict=True)]
        for row, copy in zip(targets, held, strict=True):
            self._cache[:, :, 1 + row, :, : copy.shape[3]] = copy

    def hold(self, prefix: list[int]) -> None:
        """See :class:`Rows`."""
        self.prefix = prefix
        if prefix:
            positions = torch.arange(len(prefix))[None]
            self.fill(Filling(torch.tensor([prefix]), [PREFIX_ROW - 1], positions, positions[:, 0]))

    def fill(self, filling: Filling) -> None:
        """See :class:`Rows`."""
        for start in range(0, filling.ids.shape[1], PIECE):
            piece = slice(start, start + PIECE)
            self._forward(filling.ids[:, piece], filling.rows, filling.positions[:, piece], filling.shared, last=False)

    def score(self, filling: Filling, asked: torch.Tensor) -> torch.Tensor:
        """See :class:`Rows`."""
        return self._logits(self._forward(*filling[:4])[asked.flatten()])

    def step(self, ids: torch.Tensor, positions: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """See :class:`Rows`."""
        return self._logits(self._forward(ids[:, None], None, positions[:, None], shared))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._norm(hidden, self.model.model.norm.weight), self.model.lm_head.weight)

    def _forward(
        self,
        ids: torch.Tensor,
        rows: Sequence[int] | None,
        positions: torch.Tensor,
        shared: torch.Tensor,
        *,
        last: bool = True,
    ) -> torch.Tensor:
        """Write the keys and values of tokens; return their hidden states ``[n · q, h]``.

        ``rows`` None: the first n. Not ``last``: nobody asks what comes next, and the last layer is not finished.
        """
        # 1. The place of each token's keys and values, and what each token sees.
        n, q = ids.shape
        columns = positions - shared[:, None]
        common = int(shared.max())
        used = (columns.amax(1) + 1).tolist()
        if rows is None:
            blocks = [_Block(i, min(i + BLOCK, n), i + 1, max(used[i : i + BLOCK])) for i in range(0, n, BLOCK)]
        else:
            blocks = [_Block(i, i + 1, row + 1, used[i]) for i, row in enumerate(rows)]
        row = torch.arange(1, n + 1) if rows is None else torch.tensor(rows) + 1
        heads = row[:, None] * self._heads + torch.arange(self._heads)
        places = (heads[:, None] * self._cache.shape[4] + columns[:, :, None]).flatten()
        unseen = torch.zeros(n, 1, q, common + max(used))
        unseen[..., :common].masked_fill_((torch.arange(common) >= shared[:, None])[:, None, None], UNSEEN)
        unseen[..., common:].masked_fill_((torch.arange(max(used)) > columns[:, :, None])[:, None], UNSEEN)
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
            if layer is self._layers[-1] and not last:
                break
            queries = self._turned(
                functional.linear(normed, layer.query).view(n, q, -1, self._dim), layer.query_norm, *scaled
            )
            attended = self._attended(queries, cache, common, blocks, unseen)
            states = torch.addmm(states, attended, layer.out.t())
            normed = self._norm(states, layer.before_mlp)
            gated = functional.silu(functional.linear(normed, layer.gate)) * functional.linear(normed, layer.up)
            states = torch.addmm(states, gated, layer.down.t())
        return states

    def _attended(
        self, queries: torch.Tensor, cache: torch.Tensor, common: int, blocks: list[_Block], unseen: torch.Tensor
    ) -> torch.Tensor:
        """Return ``[n · q, heads · head_dim]`` from queries ``[n, q, heads, head_dim]`` and one layer's ``cache``.

        ``unseen`` ``[n, 1, q, common + columns]`` is 0 where a token sees another, of the prefix or of its own row.
        """
        n, q = queries.shape[:2]
        heads, prefix = self._heads, cache[:, PREFIX_ROW, :, :common]
        # The queries of all heads that share keys, then all tokens: [n, key heads, g · q, head_dim].
        queries = queries.view(n, q, heads, -1, self._dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        scores = unseen.repeat(1, heads, queries.shape[2] // q, 1)
        if common:
            of_prefix = queries.transpose(0, 1).flatten(1, 2) @ prefix[0].transpose(-1, -2)
            scores[..., :common] += of_prefix.view(heads, n, -1, common).transpose(0, 1)
        for start, end, row, width in blocks:
            keys = cache[0, row : row + end - start, :, :width]
            scores[start:end, ..., common : common + width] += _product(queries[start:end], keys.transpose(-1, -2))
        weights = scores.softmax(-1)
        attended = torch.empty_like(queries)
        for start, end, row, width in blocks:
            values = cache[1, row : row + end - start, :, :width]
            attended[start:end] = _product(weights[start:end, ..., common : common + width], values)
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


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the matrix products of two batches; a small one takes numpy half as long as torch."""
    if left.shape[-2] * right.shape[-2] * right.shape[-1] > SMALL:
        return left @ right
    return torch.from_numpy(np.matmul(left.numpy(), right.numpy()))


class _Block(NamedTuple):
    """Sequences ``start:end`` of a pass, whose keys and values are in rows of the cache from ``row`` on."""

    start: int
    end: int
    row: int
    width: int


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
