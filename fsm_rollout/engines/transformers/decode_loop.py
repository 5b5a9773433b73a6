"""Decoding many requests of different lengths as one batch, with a cache of keys and values.

Invariant: before each step, the row of each running request in the cache holds the keys and values of all its tokens
but the last, at the columns of their positions, under the present weights. A request is *filled* (what of its tokens
is not in its row yet goes through the model, but for the last) and from then on it is like every other: each step
feeds the last token of every row and samples the next. So requests join and leave between any two steps, and there is
one sampling path. A request for log-probs of its ids ends with being filled: the last tokens go through the model in
a pass whose logits are looked at (:mod:`~fsm_rollout.engines.transformers.prefill`).

A row whose request has ended stays, *idle*, for the next turn of its session, which then fills only what is new, until
the session has ended. While it lives, its row is given to another request only when there are twice as many rows as
requests may run, by the rule of :mod:`~fsm_rollout.engines.residency`: who is away for long gives way, then the
smallest context that nobody asks for, which costs the least to fill again. (Longest idle first would let none of many
sessions that take turns find its row.) A step feeds the rows up to the last that runs. A few idle ones among them take
part (their last token is fed again), because leaving gaps is cheaper than moving rows; when they are many they change
places with running ones. Requests that are alike, as the samples of a group are, are filled once; and what most prompts
begin with (instructions, tools) is held once, where :mod:`~fsm_rollout.engines.transformers.qwen3` decodes: it is
*shared* by rows that begin so.

After an update of the weights every row is filled again, so the logprobs of later tokens are those of the new weights
over the whole prefix.

No thread, no event loop here: :class:`DecodeLoop` is plain and synchronous.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.stop_strings import StopStrings
from fsm_rollout.engines.transformers.key_value_rows import Filling, KeyValueRows, Rows, common_ids
from fsm_rollout.engines.transformers.picture_rows import PictureRows, common_media
from fsm_rollout.engines.transformers.prefill import scored
from fsm_rollout.engines.transformers.qwen3 import Qwen3Rows, serves
from fsm_rollout.engines.transformers.sampling import Sampler
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import Ids, Logprobs, MediaSpan, Note, NoteKind

GAPS = 4  # of so many rows that take part in a step one may be idle
LIKE_LENGTH = 32  # requests are filled together when the longest has at most so many tokens more than the shortest
AWAY = 1024  # steps: a row that was idle for more is the first to be given away of those whose sessions live
NOT_NUMBERS = "EngineError: the model's logits are not numbers (NaN); look at its weights"
WORTH_SHARING = 16  # tokens with which most requests begin are held once for all of them if there are so many


@dataclass(slots=True, eq=False)
class _Decoding:
    """One request, admitted or (without ``tokens``) waiting for that, and what it has sampled."""

    request: Request
    room: int = 0  # how many tokens may still be sampled
    tokens: list[int] = field(default_factory=list)  # the prompt and what was sampled: the whole context
    ids: Ids = field(default_factory=lambda: Ids("i"))  # sampled and not yet sent
    logprobs: Logprobs = field(default_factory=lambda: Logprobs("f"))
    mask_counts: Ids = field(default_factory=lambda: Ids("i"))
    # From how many tokens, and from which, those were sampled, with top_p or top_k.
    mask: Ids = field(default_factory=lambda: Ids("i"))
    row: int = -1  # its row in the cache, once it has one
    shared: int = 0  # how many of its first tokens it shares: their keys and values are not in its row
    cached: int = 0  # how many of its tokens its row holds, those that it shares counted in
    stops: StopStrings | None = None  # looks for the request's stop strings, if it has any
    idle: bool = False  # it has ended; its row is kept for the next turn of its session
    idle_since: int = 0  # ... after so many steps
    over: bool = False  # its session has ended, too, or it had none

    @property
    def context(self) -> int:
        """How many of its first tokens are filled with nothing asked of them: all but the last, or but the scored."""
        return (self.request.scored_from or len(self.tokens)) - 1

    @property
    def missing(self) -> list[int]:
        """The tokens to fill: those of its context that are not in its row yet."""
        return self.tokens[self.cached : self.context]


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
        tokenizer: the model's, for requests that have stop strings or pictures.
        processor: the model's, if it sees pictures.
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
        tokenizer: Any = None,
        processor: Any = None,
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
        self._tokenizer = tokenizer
        self._processor = processor
        self._waiting: deque[_Decoding] = deque()
        self._unfilled: deque[_Decoding] = deque()
        self._rows: list[_Decoding] = []  # what is in each row of the cache: running requests, and idle ones
        self._idle: dict[str, _Decoding] = {}  # the idle rows by session: those that are over, then the longest idle
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
    def _decoding(self) -> list[_Decoding]:
        return [running for running in self._rows if not running.idle]

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests."""
        self._waiting.extend(map(_Decoding, requests))

    def admit(self) -> list[Chunk]:
        """Admit what there is room for; return their empty first chunks, or the last ones of what cannot be served."""
        chunks = []
        while self._waiting and self.running < self._max_running:
            running = self._waiting.popleft()
            if isinstance(self._cache, PictureRows) and (error := self._cache.flaw(running.request)) is not None:
                chunks.append(self._chunk(running, FinishReason.ABORT, error=error))
                continue
            running.tokens = list(running.request.ids)
            if running.request.sampling.stop:
                running.stops = StopStrings.of(running.request, self._tokenizer)
            running.room = min(running.request.sampling.max_tokens, self._max_context - len(running.tokens))
            self._unfilled.append(running)
            chunks.append(self._chunk(running))
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

    def end_sessions(self, sessions: Sequence[str]) -> None:
        """Let the rows of these sessions be the first that others are given."""
        for session in sessions:
            if (row := self._idle.pop(session, None)) is not None:
                self._lay_aside(row, over=True)

    def flush(self) -> list[Chunk]:
        """Return chunks with everything sampled and not yet sent."""
        return [self._chunk(r) for r in (*self._decoding, *self._unfilled) if r.ids]

    def forget(self) -> None:
        """Take what the cache holds as outdated (the weights have changed); running requests will be filled again."""
        self._unfilled.extendleft(reversed(self._decoding))
        self._rows, self._idle = [], {}
        self._cache.hold([])
        self._sampler: Sampler | None = None

    def release(self) -> None:
        """Forget, and give the cache's memory back."""
        self._cache: Rows
        if self._processor is not None:
            self._cache = PictureRows(self.model, self._processor, self._tokenizer)
        else:
            self._cache = Qwen3Rows(self.model) if serves(self.model) else KeyValueRows(self.model)
        self.forget()

    def step(self) -> list[Chunk]:
        """Fill what is not filled, within ``fill_tokens``; then sample one token for every filled request."""
        self._steps += 1
        with torch.no_grad():  # not inference_mode: its tensors could not be touched between two steps
            chunks = self._fill()
            if len(self._rows) == len(self._idle):
                return chunks
            chunks += self._decode()
        if self._steps % self._send_every == 0:
            chunks += self.flush()
        return chunks

    def _fill(self) -> list[Chunk]:
        """Take requests in their order, as many as fit; those of like length go through the model together.

        Returns the chunks of those that ask for no more than log-probs of their ids.
        """
        # 1. What the budget allows, and one request in any case; each in a row, after what its session left there.
        if self._unfilled:
            self._share()
        fresh: list[_Decoding] = []
        budget = self._fill_tokens
        while self._unfilled:
            running = self._unfilled[0]
            if (kept := self._idle.get(running.request.session)) is None:
                running.cached = running.shared = common_ids(self._cache.prefix, running.tokens[: running.context])
            else:
                running.cached = common_ids(kept.tokens[: kept.cached], running.tokens[: running.context])
                running.cached = common_media(kept.request.media, running.request.media, running.cached)
                running.shared = min(kept.shared, running.cached)
            new = len(running.tokens) - 1 - running.cached
            if fresh and new > budget:
                break
            budget -= new
            self._give_row(self._unfilled.popleft(), kept)
            fresh.append(running)
        if not fresh:
            return []
        self._sampler = None
        self._reserve(max(len(r.tokens) + LIKE_LENGTH for r in fresh))
        self._copy_contexts(fresh)
        # 2. What is alike, as the samples of a group begin, is filled in one row and copied to the others.
        first: dict[tuple[int, tuple[int, ...], tuple[MediaSpan, ...]], _Decoding] = {}
        alike = []
        for running in fresh:
            if running.cached == running.shared:
                source = first.setdefault((running.shared, tuple(running.missing), running.request.media), running)
                if source is not running:
                    alike.append((source, running))
        # 3. One forward pass for each set of like lengths; requests without anything in their rows apart.
        further = [r for r in fresh if r.cached != r.shared]
        for filled in (first.values(), further):
            for together in _alike([(r, r.missing) for r in filled]):
                self._cache.fill(_filling(together))
        if alike:
            sources, targets = zip(*((source.row, running.row) for source, running in alike), strict=True)
            self._cache.copy(sources, targets, [len(running.missing) for _, running in alike])
        for running in fresh:
            running.cached = running.context
        # 4. What is asked of the tokens after that.
        return self._score([running for running in fresh if running.request.scored_from])

    def _copy_contexts(self, fresh: Iterable[_Decoding]) -> None:
        """Copy what requests for log-probs begin with from rows of their groups; nobody else has a sample's prompt."""
        for running in fresh:
            request, ids = running.request, running.tokens[: running.context]
            if request.scored_from and request.group_id and running.cached == running.shared:
                others = (row for row in self._rows if row.idle and row.request.group_id == request.group_id)
                same = [
                    (common_ids(row.tokens[: row.cached], ids), row) for row in others if row.shared == running.shared
                ]
                length, source = max(same, key=lambda each: each[0], default=(0, running))
                if length > running.cached:
                    self._cache.copy([source.row], [running.row], [length - running.shared])
                    running.cached = length

    def _score(self, asking: list[_Decoding]) -> list[Chunk]:
        """Return the one chunk of each request for log-probs of its ids; its row is filled and idle then."""
        chunks = []
        for together in _alike([(r, r.tokens[r.cached : -1]) for r in asking]):
            targets = [(running.tokens[running.cached + 1 :], running.request.score_top) for running, _ in together]
            for (running, fed), scores in zip(together, scored(self._cache, _filling(together), targets), strict=True):
                running.cached += len(fed)
                if any(map(math.isnan, scores.logprobs)):
                    chunks.append(self._chunk(running, FinishReason.ABORT, error=NOT_NUMBERS))
                else:
                    chunks.append(replace(self._chunk(running, FinishReason.LENGTH), scores=scores))
        self._rest(asking)
        return chunks

    def _reserve(self, columns: int) -> None:
        self._cache.reserve([running.cached for running in self._rows], columns, self._max_context)

    def _share(self) -> None:
        """If no row shares anything, let the rows to come share the tokens with which half of the requests begin."""
        if self._cache.shares and len(self._unfilled) > 1 and not any(running.shared for running in self._rows):
            prompts = sorted(running.tokens[:-1] for running in self._unfilled)
            pairs = zip(prompts, prompts[len(prompts) // 2 :], strict=False)
            length, prompt = max((common_ids(*pair), pair[0]) for pair in pairs)
            self._reserve(length)
            self._cache.hold(prompt[:length] if length >= WORTH_SHARING else [])

    def _give_row(self, running: _Decoding, kept: _Decoding | None) -> None:
        """Give a request its row: its session's, one that can be spared, or a new one."""
        if (kept := kept or self._spared()) is None:
            running.row = len(self._rows)
            self._rows.append(running)
        else:
            del self._idle[kept.request.session]
            running.row = kept.row
            self._rows[kept.row] = running

    def _spared(self) -> _Decoding | None:
        """Return an idle row for another session: one that is over, or (all rows being there) the cheapest to lose."""
        if (first := next(iter(self._idle.values()), None)) is None or first.over:
            return first
        if len(self._rows) < self._most_rows:
            return None
        if self._steps - first.idle_since > AWAY:
            return first
        asked = {queued.request.session for queued in (*self._unfilled, *self._waiting)}
        # Of those that are alike the latest: so the others find theirs.
        return min(reversed(self._idle.values()), key=lambda row: (row.request.session in asked, row.cached))

    def _decode(self) -> list[Chunk]:
        """Sample a token for each row; return the last chunks of the requests that end with it."""
        # 1. One forward pass over the last token of the rows that take part.
        fed = self._rows[: self._close_gaps()]
        lengths = [len(r.tokens) for r in fed]
        self._reserve(max(lengths))
        last = torch.tensor([(running.tokens[-1], len(running.tokens) - 1, running.shared) for running in fed])
        logits = self._cache.step(*last.unbind(1))
        # 2. Sampling.
        if self._sampler is None or self._sampler.rows != len(fed):
            self._sampler = Sampler([r.request.sampling for r in fed], self.device)
        histories = {
            row: (fed[row].tokens, len(fed[row].request.ids) - fed[row].request.sampled) for row in self._sampler.bent
        }
        tokens, logprobs, kept = self._sampler(logits, lengths, histories)
        # 3. Who has ended.
        chunks, ended = [], []
        for running, token, logprob in zip(fed, tokens, logprobs, strict=True):
            if running.idle:
                continue
            running.cached = len(running.tokens)
            if math.isnan(logprob):
                chunks.append(self._chunk(running, FinishReason.ABORT, error=NOT_NUMBERS))
                ended.append(running)
                continue
            running.tokens.append(token)
            running.ids.append(token)
            running.logprobs.append(logprob)
            if (ids_left := kept.get(running.row)) is not None:
                running.mask_counts.append(len(ids_left))
                running.mask.extend(ids_left)
            running.room -= 1
            sampling = running.request.sampling
            stopped = token in sampling.stop_ids and not sampling.ignore_eos
            stopped = stopped or (running.stops is not None and running.stops.end((token,)) is not None)
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
        self._cache.copy(sources, targets, [r.cached - r.shared for r in moved])
        for row, target in zip(moved, targets, strict=True):
            row.row = target
            self._rows[target] = row
        self._sampler = None
        return border

    def _rest(self, ended: list[_Decoding]) -> None:
        """Let the rows of requests that have ended be idle."""
        for running in ended:
            if (before := self._idle.pop(running.request.session, None)) is not None:
                self._remove(before)
            running.idle = True
            self._lay_aside(running, over=not running.request.session)

    def _lay_aside(self, running: _Decoding, *, over: bool) -> None:
        running.over, running.idle_since = over, self._steps
        self._idle[running.request.session] = running
        if over:
            self._idle = {running.request.session: running, **self._idle}

    def _remove(self, idle: _Decoding) -> None:
        """Remove an idle row; the last row moves into the gap."""
        last = self._rows.pop()
        if last is not idle:
            self._cache.copy([last.row], [idle.row], [last.cached - last.shared])
            last.row = idle.row
            self._rows[last.row] = last
        self._sampler = None

    def _chunk(
        self, running: _Decoding, finish_reason: FinishReason | None = None, *, error: str | None = None
    ) -> Chunk:
        """Return everything not yet sent as a chunk, which then counts as sent."""
        counts = running.mask_counts
        mask = Note(NoteKind.SAMPLING_MASK, len(running.tokens) - len(counts), counts, running.mask)
        chunk = Chunk(
            running.request.request_id,
            running.ids,
            running.logprobs,
            weight_version=self.weight_version,
            finish_reason=finish_reason,
            error=error,
            replica=self._replica,
            notes=(mask,) if counts else (),
        )
        running.ids, running.logprobs = Ids("i"), Logprobs("f")
        running.mask_counts, running.mask = Ids("i"), Ids("i")
        return chunk


def _alike(fed: Iterable[tuple[_Decoding, list[int]]]) -> Iterator[list[tuple[_Decoding, list[int]]]]:
    """Yield requests with the tokens that they are fed, if any, those of like lengths together."""
    remaining = sorted((each for each in fed if each[1]), key=lambda each: len(each[1]))
    while remaining:
        count = sum(len(ids) <= len(remaining[0][1]) + LIKE_LENGTH for _, ids in remaining)
        yield remaining[:count]
        remaining = remaining[count:]


def _filling(together: Sequence[tuple[_Decoding, list[int]]]) -> Filling:
    rows = [running for running, _ in together]
    ids, numbers, media = [ids for _, ids in together], [r.row for r in rows], [r.request.media for r in rows]
    return Filling.of(ids, numbers, [r.cached for r in rows], [r.shared for r in rows], media)
