"""Decoding many requests of different lengths as one batch, with a cache of keys and values.

Invariant: before each step, row i of the cache holds the keys and values of all tokens but the last of the i-th running
request, at the columns of their positions, under the present weights. A request is *filled* (its tokens but the last
go through the model, padded on the right, where causal attention cannot see the padding) and from then on it is like
every other: each step feeds the last token of every row and samples the next. So requests join and leave between any
two steps, and there is one sampling path.

After an update of the weights every row is filled again, so the logprobs of later tokens are those of the new weights
over the whole prefix. Nothing is kept between the requests of a session: each turn fills its prefix anew, which costs
one forward pass over it (about 30,000 tokens per second and core for the embedded model).

No thread, no event loop here: :class:`DecodeLoop` is plain and synchronous.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.transformers.sampling import Sampler
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import Ids, Logprobs

COLUMN_STEP = 128
"""The cache grows by at least so many columns at a time."""
LIKE_LENGTH = 32
"""Requests are filled together when the longest has at most so many tokens more than the shortest."""


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values: ``[rows, heads, columns, head_dim]``; never-written places hold 0."""

    is_sliding = False

    def __init__(self, rows: KeyValueRows) -> None:
        super().__init__()
        self._rows = rows
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: :meth:`_fit` makes the room."""

    def _fit(self, old: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        shape = (self._rows.capacity, like.shape[1], self._rows.columns, like.shape[3])
        if old is not None and old.shape == shape:
            return old
        new = like.new_zeros(shape)
        if old is not None:
            new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, ``[n, heads, q, head_dim]``; return those to attend to."""
        rows, count, width = self._rows, key_states.shape[0], key_states.shape[2]
        self.keys = keys = self._fit(self.keys, key_states)
        self.values = values = self._fit(self.values, value_states)
        if rows.filling is not None:
            filled = slice(rows.filling, rows.filling + count)
            keys[filled, :, :width] = key_states
            values[filled, :, :width] = value_states
            return key_states, value_states
        keys[rows.index[:count], :, rows.positions] = key_states[:, :, 0]
        values[rows.index[:count], :, rows.positions] = value_states[:, :, 0]
        return keys[:count, :, : rows.width], values[:count, :, : rows.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the key length and offset that a mask made by the model (only while filling) needs."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: while filling nothing comes before; while decoding the mask is given."""
        return 0

    def get_max_cache_shape(self) -> int:
        """Return -1: the cache grows."""
        return -1


class KeyValueRows(Cache):  # type: ignore[misc]  # transformers is not typed
    """The cache of all layers. Set ``filling`` or ``positions`` and ``width`` before each forward pass."""

    def __init__(self, layers: int, device: torch.device) -> None:
        super().__init__(layers=[_Layer(self) for _ in range(layers)])
        self.capacity = self.columns = self.width = 0
        self.filling: int | None = None
        """The first row to fill, or ``None`` in a decoding step."""
        self.positions = torch.zeros(0, dtype=torch.int64, device=device)
        self.index = torch.zeros(0, dtype=torch.int64, device=device)

    def reserve(self, rows: int, columns: int, limit: int) -> None:
        """Make room for ``rows`` × ``columns``, of at most ``limit`` columns, with some to spare."""
        if rows > self.capacity:
            self.capacity = max(rows, 2 * self.capacity)
            self.index = torch.arange(self.capacity, device=self.index.device)
        if columns > self.columns:
            self.columns = min(max(columns + COLUMN_STEP, columns * 5 // 4), max(limit, columns))

    def move(self, source: int, target: int) -> None:
        """Copy one row over another, in every layer."""
        for layer in self.layers:
            if layer.keys is not None:
                layer.keys[target] = layer.keys[source]
                layer.values[target] = layer.values[source]


@dataclass(slots=True, eq=False)
class _Running:
    """One request, admitted or (without ``tokens``) waiting for that, and what it has sampled."""

    request: Request
    since: float
    room: int = 0
    """How many tokens may still be sampled."""
    tokens: list[int] = field(default_factory=list)
    """The prompt and what was sampled: the whole context."""
    ids: Ids = field(default_factory=lambda: Ids("i"))
    """Sampled and not yet sent."""
    logprobs: Logprobs = field(default_factory=lambda: Logprobs("f"))


class DecodeLoop:
    """Runs requests on one model, a token per request and step.

    Args:
        model: a causal language model with full attention in every layer, attention ``sdpa`` or ``eager``, in
            evaluation mode.
        max_running: how many requests decode together; the others wait.
        max_context: the longest input plus output, in tokens.
        fill_tokens: how many tokens (padding included) are filled at most between two steps, unless one request alone
            is longer. Bounds how long running requests stand still for new ones.
        send_every: so many steps pass between two chunks of a request (its last chunk never waits).
        replica: a name that every chunk carries.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running: int,
        max_context: int,
        fill_tokens: int,
        send_every: int,
        replica: str = "",
    ) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.weight_version = 0
        self._max_running = max_running
        self._max_context = max_context
        self._fill_tokens = fill_tokens
        self._send_every = send_every
        self._replica = replica
        self._waiting: deque[_Running] = deque()
        self._unfilled: deque[_Running] = deque()
        self._rows: list[_Running] = []
        self._steps = 0
        self.forget()

    @property
    def running(self) -> int:
        """How many requests are admitted."""
        return len(self._rows) + len(self._unfilled)

    @property
    def waiting(self) -> int:
        """How many requests are not admitted yet."""
        return len(self._waiting)

    @property
    def used_tokens(self) -> int:
        """The tokens of all admitted requests."""
        return sum(len(r.tokens) for r in (*self._rows, *self._unfilled))

    def add(self, requests: Iterable[Request], now: float) -> None:
        """Queue requests that came at ``now`` seconds."""
        self._waiting.extend(_Running(request, now) for request in requests)

    def admit(self, now: float) -> list[Chunk]:
        """Admit what there is room for; return their empty first chunks."""
        chunks = []
        while self._waiting and self.running < self._max_running:
            running = self._waiting.popleft()
            running.tokens = list(running.request.ids)
            running.room = min(running.request.sampling.max_tokens, self._max_context - len(running.tokens))
            self._unfilled.append(running)
            chunks.append(self._chunk(running, queue_seconds=now - running.since))
        return chunks

    def abort(self, request_ids: Iterable[str]) -> list[Chunk]:
        """End these requests; return their last chunks, with all that was sampled and not yet sent."""
        names = set(request_ids)
        ended = [r for r in (*self._waiting, *self._rows, *self._unfilled) if r.request.request_id in names]
        self._waiting = deque(r for r in self._waiting if r.request.request_id not in names)
        self._unfilled = deque(r for r in self._unfilled if r.request.request_id not in names)
        self._drop([row for row, r in enumerate(self._rows) if r.request.request_id in names])
        return [self._chunk(r, FinishReason.ABORT) for r in ended]

    def flush(self) -> list[Chunk]:
        """Return chunks with everything sampled and not yet sent."""
        return [self._chunk(r) for r in (*self._rows, *self._unfilled) if r.ids]

    def forget(self) -> None:
        """Drop the cache (the weights have changed, or its memory is wanted); running requests will be filled again."""
        self._unfilled.extendleft(reversed(self._rows))
        self._rows = []
        self._sampler: Sampler | None = None
        self._cache = KeyValueRows(self.model.config.num_hidden_layers, self.device)

    def step(self) -> list[Chunk]:
        """Fill what is not filled, within ``fill_tokens``; then sample one token for every filled request."""
        with torch.no_grad():  # not inference_mode: its tensors could not be touched between two steps
            self._fill()
            if not self._rows:
                return []
            chunks = self._decode()
        self._steps += 1
        if self._steps % self._send_every == 0:
            chunks += self.flush()
        return chunks

    def _fill(self) -> None:
        """Take requests in their order, as many as fit; those of like length go through the model together."""
        # 1. What the budget allows, and one request in any case.
        fresh: list[_Running] = []
        budget = self._fill_tokens
        while self._unfilled and (not fresh or len(self._unfilled[0].tokens) <= budget):
            budget -= len(self._unfilled[0].tokens)
            fresh.append(self._unfilled.popleft())
        if not fresh:
            return
        self._sampler = None
        fresh.sort(key=lambda r: len(r.tokens))
        self._cache.reserve(len(self._rows) + len(fresh), len(fresh[-1].tokens), self._max_context)
        # 2. One forward pass for each set of like lengths.
        while fresh:
            count = sum(len(r.tokens) <= len(fresh[0].tokens) + LIKE_LENGTH for r in fresh)
            group, fresh = fresh[:count], fresh[count:]
            width = len(group[-1].tokens) - 1
            if width:  # a prompt of one token has nothing before its last
                ids = torch.zeros(count, width, dtype=torch.int64)
                for row, running in enumerate(group):
                    ids[row, : len(running.tokens) - 1] = torch.tensor(running.tokens[:-1])
                self._cache.filling = len(self._rows)
                self._forward(ids, torch.arange(width).expand(count, -1), None)
            self._rows += group

    def _decode(self) -> list[Chunk]:
        """Sample a token for each row; return the last chunks of the requests that end with it."""
        # 1. One forward pass over the last token of every row.
        lengths = [len(r.tokens) for r in self._rows]
        self._cache.reserve(len(lengths), max(lengths), self._max_context)
        self._cache.filling = None
        self._cache.width = width = max(lengths)
        self._cache.positions = positions = torch.tensor(lengths, device=self.device) - 1
        hidden = torch.arange(width, device=self.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.device)
        mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        ids = torch.tensor([[r.tokens[-1]] for r in self._rows])
        logits = self._forward(ids, positions[:, None], mask[:, None, None])[:, -1]
        # 2. Sampling.
        if self._sampler is None:
            self._sampler = Sampler([r.request.sampling for r in self._rows], self.device)
        tokens, logprobs = self._sampler(logits, lengths)
        # 3. Who has ended.
        chunks, ended = [], []
        for row, (running, token, logprob) in enumerate(zip(self._rows, tokens, logprobs, strict=True)):
            if math.isnan(logprob):
                error = "EngineError: the model's logits are not numbers (NaN); look at its weights"
                chunks.append(self._chunk(running, FinishReason.ABORT, error=error))
                ended.append(row)
                continue
            running.tokens.append(token)
            running.ids.append(token)
            running.logprobs.append(logprob)
            running.room -= 1
            sampling = running.request.sampling
            stopped = token in sampling.stop_ids and not sampling.ignore_eos
            if stopped or not running.room:
                chunks.append(self._chunk(running, FinishReason.STOP if stopped else FinishReason.LENGTH))
                ended.append(row)
        self._drop(ended)
        return chunks

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the logits of the last column, ``[n, 1, V]``."""
        logits: torch.Tensor = self.model(
            input_ids=ids.to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits

    def _drop(self, rows: list[int]) -> None:
        """Remove rows (ascending); the last rows move into the gaps."""
        for row in reversed(rows):
            last = self._rows.pop()
            if row < len(self._rows):
                self._cache.move(len(self._rows), row)
                self._rows[row] = last
        if rows:
            self._sampler = None

    def _chunk(
        self,
        running: _Running,
        finish_reason: FinishReason | None = None,
        *,
        error: str | None = None,
        queue_seconds: float = 0.0,
    ) -> Chunk:
        """Return everything not yet sent as a chunk, which then counts as sent."""
        chunk = Chunk(
            running.request.request_id,
            running.ids,
            running.logprobs,
            weight_version=self.weight_version,
            finish_reason=finish_reason,
            error=error,
            queue_seconds=queue_seconds,
            replica=self._replica,
        )
        running.ids, running.logprobs = Ids("i"), Logprobs("f")
        return chunk
