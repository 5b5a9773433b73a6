"""Keys and values of many requests in one rectangle, and a model's forward passes over it.

Invariant: a pass writes the keys and values of its tokens at the columns of their positions, and each token attends to
its own row's columns up to its own; what was never written is 0 and masked.

:class:`KeyValueRows` goes through transformers' own forward, whatever the architecture;
:class:`~fsm_rollout.engines.transformers.qwen3.Qwen3Rows` has a leaner one for one architecture. Both speak
:class:`Rows`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import ClassVar, NamedTuple, Protocol
from weakref import proxy

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from fsm_rollout.trajectory.tokens import MediaSpan

COLUMN_STEP = 128  # the cache grows by at least so many columns at a time


class Filling(NamedTuple):
    """Tokens that rows are filled with in one pass."""

    ids: torch.Tensor
    """``[n, q]``"""
    rows: Sequence[int]
    positions: torch.Tensor
    """``[n, q]``"""
    shared: torch.Tensor
    """``[n]``: see :class:`Rows`."""
    media: Sequence[Sequence[MediaSpan]] = ()
    """All pictures of each row; none of a model that reads text only."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int]],
        rows: Sequence[int],
        cached: Sequence[int],
        shared: Sequence[int],
        media: Sequence[Sequence[MediaSpan]],
    ) -> Filling:
        """Return that of rows after their first ``cached`` tokens, padded on the right, where nothing sees the 0."""
        width = max(map(len, sequences))
        ids = torch.tensor([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences], dtype=torch.int64)
        return cls(ids, rows, torch.tensor(cached)[:, None] + torch.arange(width), torch.tensor(shared), media)


class Rows(Protocol):
    """What the decode loop needs of a model and its cache.

    ``shared`` says of each row how many of its first tokens it leaves to :attr:`prefix`; their keys and values are not
    in the row. All ids, positions and rows are int64.
    """

    shares: ClassVar[bool]  # whether `prefix` may be more than nothing
    prefix: list[int]  # tokens with which many rows begin: their keys and values are held once

    def reserve(self, used: Sequence[int], columns: int, limit: int) -> None:
        """Make room for ``columns`` in each row, of at most ``limit``, with some to spare.

        Each row's first ``used`` columns are what it holds. Only they are copied: memory that was never touched costs
        nothing.
        """

    def copy(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        """Copy the first columns of rows over those of others, as if all at once."""

    def hold(self, prefix: list[int]) -> None:
        """Let ``prefix``, for which there is room, be what rows share from now on."""

    def fill(self, filling: Filling) -> None:
        """Fill rows after what they hold."""

    def score(self, filling: Filling, asked: torch.Tensor) -> torch.Tensor:
        """Fill rows after what they hold; return the logits ``[k, V]`` of the k places ``asked`` ``[n, q]``, by row."""

    def step(self, ids: torch.Tensor, positions: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """Feed a token to each of the first n rows, at ``positions`` ``[n]``; return its logits ``[n, V]``."""


def common_ids(cached: list[int], tokens: list[int]) -> int:
    """Return how many tokens two lists begin with alike."""
    if tokens[: len(cached)] == cached:
        return len(cached)
    return next(
        (i for i, pair in enumerate(zip(cached, tokens, strict=False)) if pair[0] != pair[1]),
        min(len(cached), len(tokens)),
    )


def roomier(rows: int, columns: int, used: Sequence[int], wanted: int, limit: int) -> tuple[int, int]:
    """Return how many rows and columns to have, where there are ``rows`` × ``columns``."""
    if len(used) > rows:
        rows = max(len(used), 2 * rows)
    if wanted > columns:
        columns = min(max(wanted + COLUMN_STEP, wanted * 3 // 2), max(limit, wanted))
    return rows, columns


def zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return zeros; on a CPU in memory that is not touched before something is written into it, unlike torch's."""
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not size:
        return like.new_zeros(shape)
    return torch.frombuffer(mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS), dtype=like.dtype).view(shape)


def roomy_copy(old: torch.Tensor, rows: int, columns: int, used: Sequence[int]) -> torch.Tensor:
    """Return the ``used`` columns of the rows of ``old`` ``[…, rows, heads, columns, head_dim]`` in more room."""
    new = zeros(old, *old.shape[:-4], rows, old.shape[-3], columns, old.shape[-1])
    for row, length in enumerate(used[: old.shape[-4]]):
        new[..., row, :, :length, :] = old[..., row, :, :length, :]
    return new


class _LayerRows(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values: ``[rows, heads, columns, head_dim]``; never-written places hold 0.

    What a row's head holds is one block: attention on a CPU takes twice as long where heads alternate.
    """

    is_sliding = False

    def __init__(self, rows: KeyValueRows) -> None:
        super().__init__()
        self._rows = proxy(rows)  # a cycle would keep a GPU's memory until garbage is collected
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the room that is reserved by now."""
        shape = (self._rows.capacity, key_states.shape[1], self._rows.columns, key_states.shape[3])
        self.keys, self.values = zeros(key_states, *shape), zeros(value_states, *shape)

    def fit(self, used: Sequence[int]) -> None:
        """Have the room that is reserved by now, if there is anything yet."""
        if self.keys is not None and self.values is not None:
            room = (self._rows.capacity, self._rows.columns, used)
            self.keys, self.values = roomy_copy(self.keys, *room), roomy_copy(self.values, *room)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, ``[n, heads, q, head_dim]``; return those to attend to."""
        place = self._rows.place
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self.keys[place.rows[:, None], :, place.positions] = key_states.transpose(1, 2)
        self.values[place.rows[:, None], :, place.positions] = value_states.transpose(1, 2)
        if place.fresh:
            return key_states, value_states
        attended = slice(0, len(place.rows)) if place.first_rows else place.rows
        return self.keys[attended, :, : place.width], self.values[attended, :, : place.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the key length and offset that a mask made by the model (only for fresh rows) needs."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: in fresh rows nothing comes before; otherwise the mask is given."""
        return 0

    def get_max_cache_shape(self) -> int:
        """Return -1: the cache grows."""
        return -1

    get_max_length = get_max_cache_shape  # its name from transformers 5.19 on


@dataclass(slots=True)
class _Place:
    """Where the tokens of a forward pass belong: in ``rows`` ``[n]`` at ``positions`` ``[n, q]``, within ``width``."""

    rows: torch.Tensor
    positions: torch.Tensor
    width: int
    first_rows: bool  # whether `rows` are the first n, in order
    fresh: bool  # whether nothing comes before them in their rows

    def mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the attention mask ``[n, 1, q, width]``: each token sees the columns up to its own."""
        if self.fresh:
            return None  # the model's own, of a causal pass
        hidden = torch.arange(self.width, device=self.positions.device) > self.positions[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


class KeyValueRows(Cache):  # type: ignore[misc]  # transformers is not typed
    """Rows for any architecture, through transformers' own forward, whose attention takes a row's keys from one place.

    Args:
        model: a causal language model with full attention in every layer, attention ``sdpa`` or ``eager``, in
            evaluation mode.
    """

    shares: ClassVar[bool] = False

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(layers=[_LayerRows(self) for _ in range(model.config.get_text_config().num_hidden_layers)])
        self.model = model
        self.prefix: list[int] = []
        self.place: _Place
        self.capacity = self.columns = 0

    def reserve(self, used: Sequence[int], columns: int, limit: int) -> None:
        """See :class:`Rows`."""
        room = roomier(self.capacity, self.columns, used, columns, limit)
        if room != (self.capacity, self.columns):
            self.capacity, self.columns = room
            for layer in self.layers:
                layer.fit(used)

    def copy(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        """See :class:`Rows`."""
        for layer in self.layers:
            for held in (layer.keys, layer.values):
                if held is not None:  # a row of one token has been given its place, and nothing was ever filled
                    held[targets, :, : max(lengths)] = held[sources, :, : max(lengths)]

    def hold(self, prefix: list[int]) -> None:
        """Nothing to do for the empty prefix."""

    def fill(self, filling: Filling) -> None:
        """See :class:`Rows`."""
        self._forward(filling.ids, torch.tensor(filling.rows), filling.positions, first_rows=False)

    def score(self, filling: Filling, asked: torch.Tensor) -> torch.Tensor:
        """See :class:`Rows`."""
        ids, rows, positions = filling[:3]
        asked = asked.to(self.model.device)
        keep = asked.any(0).nonzero()[:, 0]
        return self._forward(ids, torch.tensor(rows), positions, first_rows=False, keep=keep)[asked[:, keep]]

    def step(self, ids: torch.Tensor, positions: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """See :class:`Rows`."""
        return self._forward(ids[:, None], torch.arange(len(ids)), positions[:, None], first_rows=True)[:, -1]

    def _forward(
        self,
        ids: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        *,
        first_rows: bool,
        position_ids: torch.Tensor | None = None,
        keep: int | torch.Tensor = 1,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        """Return the logits ``[n, k, V]`` of the last ``keep`` columns, or of those that it names.

        ``position_ids``: where they are not the columns.
        """
        device, width, fresh = self.model.device, int(positions.max()) + 1, not first_rows and not positions[:, 0].any()
        self.place = _Place(rows.to(device), positions.to(device), width, first_rows, fresh)
        logits: torch.Tensor = self.model(
            input_ids=ids.to(device),
            position_ids=self.place.positions if position_ids is None else position_ids.to(device),
            attention_mask=self.place.mask(self.model.dtype),
            past_key_values=self,
            use_cache=True,
            logits_to_keep=keep,
            **inputs,
        ).logits
        return logits
