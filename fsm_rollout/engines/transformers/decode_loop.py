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

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.transformers.sampling import Sampler
from fsm_rollout.trajectory.reasons import FinishReason
from fsm_rollout.trajectory.tokens import Ids, Logprobs

COLUMN_STEP = 128
"""The cache grows by at least so many columns at a time."""


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
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
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

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        if self.keys is not None and self.values is not None:
            self.keys[target] = self.keys[source]
            self.values[target] = self.values[source]

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
        self.capacity = 0
        self.columns = 0
        self.filling: int | None = None
        """The first row to fill, or ``None`` in a decoding step."""
        self.positions = torch.zeros(0, dtype=torch.int64, device=device)
        self.index = torch.zeros(0, dtype=torch.int64, device=device)
        self.width = 0

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
            layer.move(source, target)


class Running:
    """One admitted request and what it has sampled."""

    __slots__ = ("ids", "logprobs", "request", "room", "tokens")

    def __init__(self, request: Request, max_context: int) -> None:
        self.request = request
        self.tokens: list[int] = list(request.ids)
        """The prompt and what was sampled: the whole context."""
        self.room = min(request.sampling.max_tokens, max_context - len(self.tokens))
        """How many tokens may still be sampled."""
        self.ids: Ids = Ids("i")
        """Sampled and not yet sent."""
        self.logprobs: Logprobs = Logprobs("f")


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
        model: Any,
        *,
        max_running: int,
        max_context: int,
        fill_tokens: int,
        send_every: int,
        replica: str = "",
    ) -> None:
        self._model = model
        self._device: torch.device = model.device
        self._max_running = max_running
        self._max_context = max_context
        self._fill_tokens = fill_tokens
        self._send_every = send_every
        self._replica = replica
        self.weight_version = 0
        self._waiting: deque[tuple[Request, float]] = deque()
        self._unfilled: deque[Running] = deque()
        self._rows: list[Running] = []
        self._sampler: Sampler | None = None
        self._steps = 0
        self._new_cache()

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
        self._waiting.extend((request, now) for request in requests)

    def admit(self, now: float) -> list[Chunk]:
        """Admit what there is room for; return their empty first chunks."""
        chunks = []
        while self._waiting and self.running < self._max_running:
            request, since = self._waiting.popleft()
            running = Running(request, self._max_context)
            self._unfilled.append(running)
            chunks.append(self._chunk(running, queue_seconds=now - since))
        return chunks

    def abort(self, request_ids: Iterable[str]) -> list[Chunk]:
        """End these requests; return their last chunks, with all that was sampled and not yet sent."""
        gone = set(request_ids)
        chunks = [
            self._chunk(Running(request, self._max_context), FinishReason.ABORT)
            for request, _ in self._waiting
            if request.request_id in gone
        ]
        self._waiting = deque(item for item in self._waiting if item[0].request_id not in gone)
        chunks += [
            self._chunk(r, FinishReason.ABORT) for r in (*self._rows, *self._unfilled) if r.request.request_id in gone
        ]
        self._unfilled = deque(r for r in self._unfilled if r.request.request_id not in gone)
        self._drop([i for i, r in enumerate(self._rows) if r.request.request_id in gone])
        return chunks

    def flush(self) -> list[Chunk]:
        """Return chunks with everything sampled and not yet sent."""
        return [self._chunk(r) for r in (*self._rows, *self._unfilled) if r.ids]

    def forget(self) -> None:
        """Drop the cache (the weights have changed, or its memory is wanted); running requests will be filled again."""
        self._unfilled.extendleft(reversed(self._rows))
        self._rows = []
        self._sampler = None
        self._new_cache()

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

    def _new_cache(self) -> None:
        self._cache = KeyValueRows(self._model.config.num_hidden_layers, self._device)

    def _fill(self) -> None:
        """Take requests in their order, as many as fit; those of like length go through the model together."""
        taken: list[Running] = []
        budget = self._fill_tokens
        while self._unfilled and (not taken or len(self._unfilled[0].tokens) <= budget):
            budget -= len(self._unfilled[0].tokens)
            taken.append(self._unfilled.popleft())
        if not taken:
            return
        self._sampler = None
        taken.sort(key=lambda r: len(r.tokens))
        self._cache.reserve(len(self._rows) + len(taken), len(taken[-1].tokens), self._max_context)
        while taken:
            count = sum(len(r.tokens) <= len(taken[0].tokens) + COLUMN_STEP // 4 for r in taken)
            group, taken = taken[:count], taken[count:]
            width = len(group[-1].tokens) - 1
            if width:  # a prompt of one token has nothing before its last
                ids = torch.zeros(count, width, dtype=torch.int64)
                for row, running in enumerate(group):
                    ids[row, : len(running.tokens) - 1] = torch.tensor(running.tokens[:-1])
                self._cache.filling = len(self._rows)
                self._forward(ids, torch.arange(width).expand(count, -1), None)
            self._rows += group

    def _decode(self) -> list[Chunk]:
        lengths = [len(r.tokens) for r in self._rows]
        self._cache.reserve(len(lengths), max(lengths), self._max_context)
        self._cache.filling = None
        self._cache.width = width = max(lengths)
        positions = torch.tensor(lengths, device=self._device) - 1
        self._cache.positions = positions
        hidden = torch.arange(width, device=self._device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=self._device)
        mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        ids = torch.tensor([[r.tokens[-1]] for r in self._rows])
        logits = self._forward(ids, positions[:, None], mask[:, None, None])[:, -1]
        if self._sampler is None:
            self._sampler = Sampler([r.request.sampling for r in self._rows], self._device)
        tokens, logprobs = self._sampler(logits, lengths)
        return self._take(tokens, logprobs)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the logits of the last column, ``[n, 1, V]``."""
        logits: torch.Tensor = self._model(
            input_ids=ids.to(self._device),
            position_ids=positions.to(self._device),
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits

    def _take(self, tokens: list[int], logprobs: list[float]) -> list[Chunk]:
        """Append the sampled tokens; return the last chunks of the requests that end with them."""
        chunks, ended = [], []
        for row, (running, token, logprob) in enumerate(zip(self._rows, tokens, logprobs, strict=True)):
            sampling = running.request.sampling
            if logprob != logprob:
                error = "EngineError: the model's logits are not numbers (NaN); look at its weights"
                chunks.append(self._chunk(running, FinishReason.ABORT, error=error))
                ended.append(row)
                continue
            running.tokens.append(token)
            running.ids.append(token)
            running.logprobs.append(logprob)
            running.room -= 1
            if token in sampling.stop_ids and not sampling.ignore_eos:
                chunks.append(self._chunk(running, FinishReason.STOP))
                ended.append(row)
            elif running.room == 0:
                chunks.append(self._chunk(running, FinishReason.LENGTH))
                ended.append(row)
        self._drop(ended)
        return chunks

    def _drop(self, rows: list[int]) -> None:
        """Remove rows (ascending); the last rows move into the gaps."""
        for row in reversed(rows):
            last = len(self._rows) - 1
            if row != last:
                self._cache.move(last, row)
                self._rows[row] = self._rows[last]
            self._rows.pop()
        if rows:
            self._sampler = None

    def _chunk(
        self,
        running: Running,
        finish_reason: FinishReason | None = None,
        *,
        error: str | None = None,
        queue_seconds: float = 0.0,
    ) -> Chunk:
        """Return everything not yet sent as a chunk, which then counts as sent."""
        ids, logprobs = running.ids, running.logprobs
        running.ids, running.logprobs = Ids("i"), Logprobs("f")
        return Chunk(
            running.request.request_id,
            ids,
            logprobs,
            weight_version=self.weight_version,
            finish_reason=finish_reason,
            error=error,
            queue_seconds=queue_seconds,
            replica=self._replica,
        )
