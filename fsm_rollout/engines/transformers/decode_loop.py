"""Decoding many requests of different lengths as one batch, with a cache of keys and values.

Invariant: before each step, the row of each running request in the cache holds the keys and values of all its tokens
but the last, at the columns of their positions, under the present weights. A request is *filled* (what of its tokens
is not in its row yet goes through the model, but for the last) and from then on it is like every other: each step
feeds the last token of every row and samples the next. So requests join and leave between any two steps, and there is
one sampling path.

A row whose request has ended stays, *idle*, for the next turn of its session, which then fills only what is new; it
is given to another request when there are twice as many rows as requests may run. A step feeds the rows up to the last
that runs. A few idle ones among them take part (their last token is fed again), because leaving gaps is cheaper than
moving rows; when they are many they change places with running ones. Requests that begin alike, as the samples of a
group do, are filled once.

After an update of the weights every row is filled again, so the logprobs of later tokens are those of the new weights
over the whole prefix.

No thread, no event loop here: :class:`DecodeLoop` is plain and synchronous.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
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
GAPS = 4
"""Of so many rows that take part in a step one may be idle."""
LIKE_LENGTH = 32
"""Requests are filled together when the longest has at most so many tokens more than the shortest."""


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values: ``[rows, heads, columns, head_dim]``; never-written places hold 0.

    What a row's head holds is one block: attention on a CPU takes twice as long where heads alternate.
    """

    is_sliding = False

    def __init__(self, rows: KeyValueRows) -> None:
        super().__init__()
        self._rows = rows
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: :meth:`_fit` makes the room."""

    def fit(self) -> None:
        """Have what is reserved by now, if there is anything yet."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self._fit(self.keys, self.keys), self._fit(self.values, self.values)

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
        place = self._rows.place
        self.keys = self._fit(self.keys, key_states)
        self.values = self._fit(self.values, value_states)
        if isinstance(place, Fresh):
            filled = slice(0, key_states.shape[2])
            self.keys[place.rows, :, filled] = key_states[place.sources]
            self.values[place.rows, :, filled] = value_states[place.sources]
            return key_states, value_states
        self.keys[place.rows[:, None], :, place.positions] = key_states.transpose(1, 2)
        self.values[place.rows[:, None], :, place.positions] = value_states.transpose(1, 2)
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


@dataclass(slots=True)
class Fresh:
    """The tokens of a forward pass are whole prefixes: what goes into each of ``rows``, and from which sequence."""

    rows: torch.Tensor
    sources: torch.Tensor


@dataclass(slots=True)
class Further:
    """The tokens of a forward pass follow what their rows hold: at ``positions`` ``[n, q]``, within ``width``."""

    rows: torch.Tensor
    positions: torch.Tensor
    width: int
    first_rows: bool
    """Whether ``rows`` are the first n, in order."""

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the attention mask ``[n, 1, q, width]``: each token sees the columns up to its own."""
        hidden = torch.arange(self.width, device=self.positions.device) > self.positions[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


class KeyValueRows(Cache):  # type: ignore[misc]  # transformers is not typed
    """The cache of all layers. Set ``place`` before each forward pass."""

    place: Fresh | Further

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_Layer(self) for _ in range(layers)])
        self.capacity = self.columns = 0

    def reserve(self, rows: int, columns: int, limit: int) -> None:
        """Make room for ``rows`` × ``columns``, of at most ``limit`` columns, with some to spare."""
        if rows > self.capacity:
            self.capacity = max(rows, 2 * self.capacity)
        if columns > self.columns:
            self.columns = min(max(columns + COLUMN_STEP, columns * 3 // 2), max(limit, columns))

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` columns of rows over those of others, all at once, in every layer."""
        for layer in self.layers:
            layer.fit()  # a row of one token has been given its place, and nothing has been filled into it
            for held in (layer.keys, layer.values):
                if held is not None:
                    held[targets, :, :length] = held[sources, :, :length]


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
    kept: list[Ids] = field(default_factory=list)
    """From which tokens those were sampled, with top_p or top_k."""
    row: int = -1
    """Its row in the cache, once it has one."""
    cached: int = 0
    """How many of its tokens its row holds."""
    idle: bool = False
    """It has ended; its row is kept for the next turn of its session."""

    @property
    def missing(self) -> list[int]:
        """The tokens to fill: not in its row yet, but for the last."""
        return self.tokens[self.cached : -1]


class DecodeLoop:
    """Runs requests on one model, a token per request and step.

    Args:
        model: a causal language model with full attention in every layer, attention ``sdpa`` or ``eager``, in
            evaluation mode.
        max_running: how many requests decode together; the others wait. The cache has up to twice as many rows.
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
        self._most_rows = 2 * max_running
        self._max_context = max_context
        self._fill_tokens = fill_tokens
        self._send_every = send_every
        self._replica = replica
        self._waiting: deque[_Running] = deque()
        self._unfilled: deque[_Running] = deque()
        self._rows: list[_Running] = []
        """What is in each row of the cache: running requests, and idle ones."""
        self._idle: dict[str, _Running] = {}
        """The idle rows by session, the longest idle first."""
        self._steps = 0
        self.release()

    @property
    def running(self) -> int:
        """How many requests are admitted."""
        return len(self._rows) - len(self._idle) + len(self._unfilled)

    @property
    def waiting(self) -> int:
        """How many requests are not admitted yet."""
        return len(self._waiting)

    @property
    def used_tokens(self) -> int:
        """The tokens of all admitted requests."""
        return sum(len(r.tokens) for r in (*self._decoding, *self._unfilled))

    @property
    def _decoding(self) -> list[_Running]:
        return [running for running in self._rows if not running.idle]

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
        decoding = [r for r in self._decoding if r.request.request_id in names]
        ended = [r for r in (*self._waiting, *self._unfilled) if r.request.request_id in names] + decoding
        self._waiting = deque(r for r in self._waiting if r.request.request_id not in names)
        self._unfilled = deque(r for r in self._unfilled if r.request.request_id not in names)
        self._rest(decoding)
        return [self._chunk(r, FinishReason.ABORT) for r in ended]

    def flush(self) -> list[Chunk]:
        """Return chunks with everything sampled and not yet sent."""
        return [self._chunk(r) for r in (*self._decoding, *self._unfilled) if r.ids]

    def forget(self) -> None:
        """Take what the cache holds as outdated (the weights have changed); running requests will be filled again."""
        self._unfilled.extendleft(reversed(self._decoding))
        self._rows, self._idle = [], {}
        self._sampler: Sampler | None = None

    def release(self) -> None:
        """Forget, and give the cache's memory back."""
        self.forget()
        self._cache = KeyValueRows(self.model.config.num_hidden_layers)

    def step(self) -> list[Chunk]:
        """Fill what is not filled, within ``fill_tokens``; then sample one token for every filled request."""
        with torch.no_grad():  # not inference_mode: its tensors could not be touched between two steps
            self._fill()
            if len(self._rows) == len(self._idle):
                return []
            chunks = self._decode()
        self._steps += 1
        if self._steps % self._send_every == 0:
            chunks += self.flush()
        return chunks

    def _fill(self) -> None:
        """Take requests in their order, as many as fit; those of like length go through the model together."""
        # 1. What the budget allows, and one request in any case; each in a row, after what its session left there.
        fresh: list[_Running] = []
        budget = self._fill_tokens
        while self._unfilled:
            running = self._unfilled[0]
            kept = self._idle.get(running.request.session)
            running.cached = 0 if kept is None else _common(kept.tokens[: kept.cached], running.tokens[:-1])
            if fresh and len(running.missing) > budget:
                break
            budget -= len(running.missing)
            self._give_row(self._unfilled.popleft(), kept)
            fresh.append(running)
        if not fresh:
            return
        self._sampler = None
        self._cache.reserve(
            len(self._rows), max(r.cached + LIKE_LENGTH + len(r.missing) for r in fresh), self._max_context
        )
        # 2. One forward pass for each set of like lengths; requests without anything in their rows apart.
        for further in (False, True):
            filled = [r for r in fresh if r.missing and bool(r.cached) == further]
            filled.sort(key=lambda r: len(r.missing))
            while filled:
                count = sum(len(r.missing) <= len(filled[0].missing) + LIKE_LENGTH for r in filled)
                together, filled = filled[:count], filled[count:]
                (self._fill_further if further else self._fill_fresh)(together)
        for running in fresh:
            running.cached = len(running.tokens) - 1

    def _give_row(self, running: _Running, kept: _Running | None) -> None:
        """Give a request its row: the one its session has kept, a new one, or (all being there) the longest idle."""
        if kept is None and self._idle and len(self._rows) >= self._most_rows:
            kept = next(iter(self._idle.values()))
        if kept is None:
            running.row = len(self._rows)
            self._rows.append(running)
        else:
            del self._idle[kept.request.session]
            running.row = kept.row
            self._rows[kept.row] = running

    def _fill_fresh(self, together: list[_Running]) -> None:
        """Fill rows that hold nothing; what is alike (the samples of a group begin so) goes through the model once."""
        sequences: dict[tuple[int, ...], int] = {}
        sources = [sequences.setdefault(tuple(running.missing), len(sequences)) for running in together]
        ids = _rectangle(list(sequences))
        rows = torch.tensor([running.row for running in together], device=self.device)
        self._cache.place = Fresh(rows, torch.tensor(sources, device=self.device))
        self._forward(ids, torch.arange(ids.shape[1]).expand(len(ids), -1), None)

    def _fill_further(self, together: list[_Running]) -> None:
        """Fill rows after what they hold."""
        ids = _rectangle([running.missing for running in together])
        cached = torch.tensor([[running.cached] for running in together], device=self.device)
        positions = cached + torch.arange(ids.shape[1], device=self.device)
        rows = torch.tensor([running.row for running in together], device=self.device)
        self._further(ids, Further(rows, positions, int(positions.max()) + 1, first_rows=False))

    def _decode(self) -> list[Chunk]:
        """Sample a token for each row; return the last chunks of the requests that end with it."""
        # 1. One forward pass over the last token of the rows that take part.
        fed = self._rows[: self._close_gaps()]
        lengths = [len(r.tokens) for r in fed]
        self._cache.reserve(len(self._rows), max(lengths), self._max_context)
        positions = torch.tensor(lengths, device=self.device)[:, None] - 1
        rows = torch.arange(len(fed), device=self.device)
        ids = torch.tensor([[r.tokens[-1]] for r in fed])
        logits = self._further(ids, Further(rows, positions, max(lengths), first_rows=True))[:, -1]
        # 2. Sampling.
        if self._sampler is None or self._sampler.rows != len(fed):
            self._sampler = Sampler([r.request.sampling for r in fed], self.device)
        tokens, logprobs, kept = self._sampler(logits, lengths)
        # 3. Who has ended.
        chunks, ended = [], []
        for running, token, logprob in zip(fed, tokens, logprobs, strict=True):
            if running.idle:
                continue
            running.cached = len(running.tokens)
            if math.isnan(logprob):
                error = "EngineError: the model's logits are not numbers (NaN); look at its weights"
                chunks.append(self._chunk(running, FinishReason.ABORT, error=error))
                ended.append(running)
                continue
            running.tokens.append(token)
            running.ids.append(token)
            running.logprobs.append(logprob)
            if (ids_left := kept.get(running.row)) is not None:
                running.kept.append(ids_left)
            running.room -= 1
            sampling = running.request.sampling
            stopped = token in sampling.stop_ids and not sampling.ignore_eos
            if stopped or not running.room:
                chunks.append(self._chunk(running, FinishReason.STOP if stopped else FinishReason.LENGTH))
                ended.append(running)
        self._rest(ended)
        return chunks

    def _close_gaps(self) -> int:
        """Return how many rows, the first ones, hold all that run; few of them are idle, moved apart if need be."""
        count = len(self._rows)
        while self._rows[count - 1].idle:
            count -= 1
        if GAPS * len(idle := [r.row for r in self._rows[:count] if r.idle]) <= count:
            return count
        # The rows of both kinds that are on the wrong side of the border change places.
        border = len(self._rows) - len(self._idle)
        idle = [row for row in idle if row < border]
        running = [r.row for r in self._rows[border:count] if not r.idle]
        sources, targets = idle + running, running + idle
        moved = [self._rows[row] for row in sources]
        self._cache.move(sources, targets, max(len(r.tokens) for r in moved))
        for row, target in zip(moved, targets, strict=True):
            row.row = target
            self._rows[target] = row
        self._sampler = None
        return border

    def _further(self, ids: torch.Tensor, place: Further) -> torch.Tensor:
        self._cache.place = place
        return self._forward(ids, place.positions, place.mask(self.model.dtype))

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

    def _rest(self, ended: list[_Running]) -> None:
        """Let the rows of requests that have ended be idle."""
        for running in ended:
            if (before := self._idle.pop(running.request.session, None)) is not None:
                self._remove(before)
            running.idle = True
            self._idle[running.request.session] = running

    def _remove(self, idle: _Running) -> None:
        """Remove an idle row; the last row moves into the gap."""
        last = self._rows.pop()
        if last is not idle:
            self._cache.move([last.row], [idle.row], len(last.tokens))
            last.row = idle.row
            self._rows[last.row] = last
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
            kept=running.kept,
        )
        running.ids, running.logprobs, running.kept = Ids("i"), Logprobs("f"), []
        return chunk


def _common(cached: list[int], tokens: list[int]) -> int:
    """Return how many tokens two lists begin with alike."""
    if tokens[: len(cached)] == cached:
        return len(cached)
    return next(
        (i for i, pair in enumerate(zip(cached, tokens, strict=False)) if pair[0] != pair[1]),
        min(len(cached), len(tokens)),
    )


def _rectangle(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return sequences as rows, padded on the right with 0, where causal attention does not see it."""
    width = max(map(len, sequences))
    return torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in sequences], dtype=torch.int64)
