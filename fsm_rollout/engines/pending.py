"""A request on its way: what an engine has streamed for it, and how it ended.

Invariant: it holds every token that was streamed for it, over all its tries, in order, each with its logprob and the
version of its weights; and it ends exactly once.

What it holds can stand in a training row as it is. Its ids are tokens of the model, each with a finite logprob of at
most 0; its weight versions are some that a batch can hold; nothing follows a stop token; nothing exceeds what was asked
for. A chunk that breaks this is refused whole, so ids, logprobs and versions never come apart.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from operator import contains, index
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.engines.protocol import NO_IDS, NO_LOGPROBS, Chunk, ReplicaLost, Request
from fsm_rollout.engines.stop_strings import StopStrings
from fsm_rollout.engines.thinking_budget import ThinkingBudget
from fsm_rollout.errors import ContentFiltered, EngineError, PromptTooLong, StreamError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import (
    LAST_VERSION,
    NO_VERSION,
    Ids,
    Logprobs,
    Note,
    NoteKind,
    TokenScores,
    Usage,
    add_note,
    as_ids,
    as_logprobs,
)

if TYPE_CHECKING:
    from fsm_rollout.engines.replica import Replica
    from fsm_rollout.engines.residency import Tree

logger = logging.getLogger(__name__)
ROUNDING = 1e-3  # a logprob may be so far above 0: log-sums in half precision are not exact
LAST_EXPERT = 2**15 - 1  # the highest number of an expert: batches hold them as int16
MANY = 128  # from so many tokens on NumPy is quicker than Python's own functions
_ENDS = (None, *FinishReason)


class Once:
    """An event that is never taken back; whether it has ``happened`` may be read.

    Who waits goes on when it has happened, and at once if it has before. An ``asyncio.Event`` does that too, in ten
    times the memory: there are thousands of requests at a time.
    """

    __slots__ = ("_waiting", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._waiting: tuple[asyncio.Future[None], ...] = ()

    def set(self) -> None:
        """Let it have happened."""
        waiting, self._waiting, self.happened = self._waiting, (), True
        for future in waiting:
            if not future.done():  # cancelled
                future.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        """Return what is awaited until it has happened."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.happened:
            future.set_result(None)
        else:
            self._waiting = (*self._waiting, future)
        return future


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request on its way: what has been streamed for it so far, and how it ended."""

    request: Request
    submitted_at: float
    # The timeout of the visit that waits for it: stands still while queued, and while the engine is paused.
    deadline: Deadline | None = None
    ids: Ids = field(default_factory=partial(array, "i"))
    logprobs: Logprobs = field(default_factory=partial(array, "f"))  # type: ignore[arg-type]  # the code says which
    # Run lengths `(tokens, weight version)` over `ids`; -1 where they close its thinking, and were not sampled.
    versions: list[tuple[int, int]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)  # as in `Chunk`
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    admitted_at: float | None = None
    attempt: int = 1  # which try this is: 1, 2, …
    failures: int = 0  # how many tries failed alone, with their replica still there
    losses: int = 0  # how many tries were lost alone with their replica
    shared: int = 0  # how many tries failed together with others'
    falls_late: bool = False  # whether it once failed with others after all of them had had tokens
    request_id: str = ""
    rest: Request = field(init=False)  # what is asked for the present try: what no earlier one has streamed
    lane: int = 2  # what it comes before in a queue: 0 goes on, 1 is a turn that follows others, 2 is a first
    place: int = 0  # by when it was asked for
    held_until: Tree | Replica | None = None  # who was waited for there last, to have a place or room for it
    cached_tokens: int = 0
    usage: Usage | None = None  # as in `Chunk`
    scores: TokenScores | None = None  # as in `Chunk`
    scored_by: int = 0  # the version of the weights that these are of
    replica: str = ""
    at: Replica | None = None  # the replica that has it
    started: bool = False  # whether that replica's engine was asked for it: only then is its loss a failed try
    aborted: bool = False
    done: Once = field(default_factory=Once)
    paused: bool = False  # whether the engine is paused
    waits: bool = False  # whether it waits: between two tries, or because the engine says so (`Chunk.waits`)
    deadline_held: bool = False  # whether the deadline stands still
    has_chunk: bool = False  # whether the present try has had a chunk
    has_tokens: bool = False  # whether the present try has had tokens
    lost: bool = False  # whether the previous try was lost with its replica
    silenced: bool = False  # whether nothing came for a try: the next ones are another replica's, if there is one
    on_end: Callable[[PendingRequest], None] | None = None  # called when it has ended
    # When the try is given up if its first chunk has not come by then; `None` from that chunk on.
    silent_until: float | None = None
    client: object = None  # who submitted it
    tree: Tree | None = (
        None  # the trajectory that is to be resident for it, where engines say how much memory they have
    )
    stops: StopStrings | None = None  # looks for `sampling.stop`, where that is set
    stopped: bool = False  # whether it has found one: the last token completes it
    thinking: ThinkingBudget | None = None  # keeps `sampling.thinking`, where that is set
    in_parts: bool = False  # whether the latest chunk ended the present try as it was to, and the rest is still to come
    on_tokens: Callable[[PendingRequest], object] | None = None  # called when tokens have come, to show them at once

    def keep_time(self) -> None:
        """Let the deadline run while somebody works on the request, and stand still otherwise."""
        stands_still = not self.done.happened and (self.admitted_at is None or self.waits or self.paused)
        if self.deadline is not None and stands_still != self.deadline_held:
            self.deadline_held = stands_still
            if stands_still:
                self.deadline.hold()
            else:
                self.deadline.run()

    def take(self, chunk: Chunk, now: float, vocabulary: int | None = None) -> None:
        """Append one chunk; EngineError if no engine may answer so."""
        self.silent_until = None
        ids, logprobs, version, notes = checked(chunk, self.request, self.ids, vocabulary)
        for finder in (self.thinking, self.stops) if self.thinking is not None or self.stops is not None else ():
            if finder is not None and (end := finder.end(ids)) is not None:
                fed = len(self.request.ids) + len(self.ids) + end
                ids, logprobs, notes = ids[:end], logprobs[:end], tuple(n for note in notes for n in note.cut(0, fed))
                self.stopped = finder is self.stops
        if not self.has_chunk or chunk.waits != self.waits:
            self.admitted_at = now if self.admitted_at is None else self.admitted_at
            self.has_chunk, self.waits = True, chunk.waits
            self.keep_time()
        for note in notes:
            add_note(self.notes, note)
        if ids:
            self.has_tokens = True
            self.ids.extend(ids)
            self.logprobs.extend(logprobs)
            if self.versions and self.versions[-1][1] == version:
                self.versions[-1] = (self.versions[-1][0] + len(ids), version)
            else:
                self.versions.append((len(ids), version))
        self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
        self.usage = chunk.usage or self.usage
        if chunk.scores is not None:
            self.scores, self.scored_by = checked_scores(chunk.scores, self.request), chunk.weight_version
        if self.at is None or not self.at.name:  # else that is what it is called here
            self.replica = chunk.replica or self.replica
        if self.thinking is not None:
            self.in_parts = not self.stopped and self._is_part(chunk)
        if ids and self.on_tokens is not None:
            try:
                self.on_tokens(self)
            except Exception:  # a reader of the tokens must not harm the generation
                logger.exception("tokens of request %s could not be shown as they came", self.request_id)

    def take_back(self) -> int:
        """Take the last token back, which is not to stand anywhere, and return it."""
        token = self.ids.pop()
        self.logprobs.pop()
        *before, (count, version) = self.versions
        self.versions = [*before, (count - 1, version)] if count > 1 else before
        end = len(self.request.ids) + len(self.ids)
        self.notes = [kept for note in self.notes for kept in note.cut(0, end)]
        return token

    def begin_again(self, request_id: str) -> None:
        """Have another id, and ask for the rest."""
        written = sum([count for count, version in self.versions if version == NO_VERSION])
        self.request_id, self.rest = request_id, self.request.continued(self.ids, request_id, written)
        if self.notes:  # nobody need say again what is known
            ends = [note.end for note in self.notes if note.kind is NoteKind.ROUTED_EXPERTS]
            self.rest = replace(self.rest, routed=max(ends, default=self.rest.routed))

    # -- thinking -----------------------------------------------------------------------------------------------------

    def bound_thinking(self) -> None:
        """Ask for no more than may come before its thinking has to be closed."""
        assert self.thinking is not None
        bound, sampling = self.thinking.bound, self.rest.sampling
        if bound is not None and bound < sampling.max_tokens:
            self.rest = replace(self.rest, sampling=replace(sampling, max_tokens=bound))

    def _is_part(self, chunk: Chunk) -> bool:
        """Whether a chunk that was taken ends a part of the request: its thinking was bounded, or is closed now."""
        assert self.thinking is not None
        if self.thinking.due:
            stops = chunk.finish_reason == FinishReason.STOP and not self.thinking.cut
            if stops or self.ended_as in (FinishReason.STOP, FinishReason.ABORT):
                return False
            self.close_thinking()
            return True
        taken = len(self.request.ids) + len(self.ids) - len(self.rest.ids)
        bounded = taken == self.rest.sampling.max_tokens and len(self.ids) < self.request.sampling.max_tokens
        return bounded and chunk.finish_reason == FinishReason.LENGTH

    def close_thinking(self) -> None:
        """Write what closes the thinking, unless that leaves no room for a token: then the request has ended."""
        assert self.thinking is not None
        ids = self.thinking.thinking.close
        if len(self.ids) + len(ids) < self.request.sampling.max_tokens:
            self.thinking.close()
            self.stopped = self.stops is not None and self.stops.end(ids) is not None
            self.ids += ids
            self.logprobs.extend([0.0] * len(ids))
            self.versions.append((len(ids), NO_VERSION))

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that have sampled for it; ``None``: none have."""
        return min([version for _, version in self.versions if version != NO_VERSION], default=None)

    # -- its end ------------------------------------------------------------------------------------------------------

    def failed_by(self, chunk: Chunk) -> EngineError | None:
        """Return how a chunk that was taken fails the try; ``None``: not at all."""
        if chunk.error is not None:
            return _failure(chunk.error)
        if chunk.finish_reason == FinishReason.ABORT and not self.aborted:
            return EngineError(f"the engine aborted request {self.request_id} by itself")
        if self.request.scored_from and chunk.finish_reason is not None and self.scores is None and not self.aborted:
            return EngineError(f"the engine ended request {self.request_id} without the log-probs that it asked for")
        if chunk.finish_reason is not None and not (self.ids or self.aborted or self.scores is not None):
            return EngineError(f"the engine ended request {self.request_id} without a single token")
        return None

    @property
    def ended_as(self) -> FinishReason | None:
        """How the request has ended, if only its last chunk is missing; ``None``: it has not."""
        sampling = self.request.sampling
        if self.aborted and not self.stopped:
            return FinishReason.ABORT
        if self.stopped or (self.ids and not sampling.ignore_eos and self.ids[-1] in sampling.stop_ids):
            return FinishReason.STOP
        no_room = self.thinking is not None and self.thinking.due
        return FinishReason.LENGTH if no_room or len(self.ids) >= sampling.max_tokens else None

    def end(self, finish_reason: FinishReason, error: EngineError | None = None) -> None:
        """End the request; only the first call counts."""
        if not self.done.happened:
            self.finish_reason, self.error = finish_reason, error
            self.done.set()
            self.silent_until = None
            if self.on_end is not None:
                self.on_end(self)
            if self.deadline_held:
                self.keep_time()


def _failure(error: str) -> EngineError:
    """Return the error of a chunk, ``Class: message``, as an exception."""
    kind, colon, message = error.partition(": ")
    if kind == "ReplicaLost":
        return ReplicaLost(message)
    if kind == "PromptTooLong":
        return PromptTooLong(error)
    if kind == "ContentFiltered":
        return ContentFiltered(error, kind)
    return EngineError(error, kind=kind if colon and kind.isidentifier() else None)


def checked(
    chunk: Chunk, request: Request, before: Ids, vocabulary: int | None
) -> tuple[Ids, Logprobs, int, tuple[Note, ...]]:
    """Return a chunk's ids, logprobs, weight version and notes, or raise EngineError; ``before`` came already."""
    request_id = chunk.request_id
    if chunk.finish_reason not in _ENDS:
        raise EngineError(f"the engine ended request {request_id} with {chunk.finish_reason!r}")
    # 1. Whole numbers and numbers that fit.
    try:
        if not (len(chunk.ids) or len(chunk.logprobs) or chunk.notes):
            return NO_IDS, NO_LOGPROBS, 0, ()
        ids, logprobs, version = as_ids(chunk.ids), as_logprobs(chunk.logprobs), index(chunk.weight_version)
        notes = tuple(map(_as_note, chunk.notes))
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(
            f"the engine answered request {request_id} with invalid tokens: {type(error).__name__}: {error}"
        ) from error
    if not 0 <= version <= LAST_VERSION:
        raise EngineError(
            f"the engine answered request {request_id} with weights of version {version}; versions are whole numbers "
            f"from 0 to {LAST_VERSION:,}"
        )
    count = len(ids)
    if count != len(logprobs):
        raise EngineError(
            f"the engine returned {count} tokens with {len(logprobs)} logprobs for request {request_id}; there must be "
            f"one logprob per token"
        )
    for note in notes:
        if (problem := _wrong_note(note, ids, len(request.ids) + len(before))) is not None:
            raise EngineError(f"the engine returned {count} tokens of request {request_id} with {problem}")
    if not count:
        return ids, logprobs, version, notes
    # 2. No more than was asked for, and nothing behind the end.
    sampling = request.sampling
    if len(before) + count > sampling.max_tokens and chunk.usage is None:
        raise EngineError(
            f"the engine returned more than the {sampling.max_tokens} tokens asked for (request {request_id})"
        )
    if not sampling.ignore_eos:
        at = stop_at(ids, sampling.stop_ids)
        if (before and before[-1] in sampling.stop_ids) or at is not None:
            raise EngineError(f"the engine went on after a stop token (request {request_id})")
    # 3. Tokens of the model, with their logprobs.
    lowest, highest = (min(ids), max(ids)) if count < MANY else _bounds(ids)
    if lowest < 0 or (vocabulary is not None and highest >= vocabulary):
        wrong = lowest if lowest < 0 else highest
        raise EngineError(
            f"the engine returned token {wrong} for request {request_id}, which is none of the model's"
            + (f" {vocabulary:,}" if vocabulary is not None else "")
        )
    return ids, settled(logprobs, request_id), version, notes


def checked_scores(scores: TokenScores, request: Request) -> TokenScores:
    """Return the log-probs of a request's own ids, of which none is above 0; EngineError for what are none."""
    try:
        scores.check(len(request.ids) - request.scored_from)
    except StreamError as error:
        raise EngineError(f"the engine answered request {request.request_id} wrongly: {error}") from error
    tops = settled(scores.top_logprobs, request.request_id) if scores.top_logprobs else scores.top_logprobs
    return TokenScores(settled(scores.logprobs, request.request_id), scores.top_ids, tops)


def _as_note(note: Note) -> Note:
    return Note(NoteKind(note.kind), index(note.start), as_ids(note.counts), as_ids(note.values), index(note.layers))


def settled(logprobs: Logprobs, request_id: str) -> Logprobs:
    """Return logprobs of which none is above 0: what rounding put there is 0.0; EngineError for what is no logprob."""
    most, total = (max(logprobs), sum(logprobs)) if len(logprobs) < MANY else _most_and_total(logprobs)
    if not math.isfinite(total):
        raise EngineError(f"the engine returned a logprob that is no finite number (request {request_id})")
    if most > ROUNDING:
        raise EngineError(
            f"the engine returned a logprob of {most:g} (request {request_id}); it is the logarithm of a probability, "
            f"so at most 0"
        )
    return logprobs if most <= 0 else as_logprobs([min(0.0, logprob) for logprob in logprobs])


def _wrong_note(note: Note, ids: Ids, sampled_at: int) -> str | None:
    """Return what is wrong with a note that came with ``ids``, the first of which is at position ``sampled_at``."""
    count = len(note.counts)
    if min(note.counts, default=0) < 0 or sum(note.counts) != len(note.values):
        return f"{len(note.values)} integers as the {note.kind} of {count} tokens, of which its counts do not add up"
    if note.kind is NoteKind.SAMPLING_MASK:
        ends = list(accumulate(note.counts, initial=0))
        masks = [note.values[start:end] for start, end in pairwise(ends)]
        if note.start == sampled_at and count == len(ids) and all(map(contains, masks, ids)):
            return None
        return f"{count} sets of tokens that they were sampled from; there must be one per token, with that token in it"
    fed = sampled_at + len(ids)
    if note.start < 0 or note.end > fed:
        return f"the routed experts of tokens {note.start} to {note.end}; there are {fed}"
    if note.layers < 1 or len(set(note.counts)) > 1 or any(each % note.layers for each in note.counts[:1]):
        return f"routed experts that {note.layers} layers cannot share alike"
    if note.values and not 0 <= min(note.values) <= max(note.values) <= LAST_EXPERT:
        return f"routed experts from {min(note.values)} to {max(note.values)}; they are 0 to {LAST_EXPERT:,}"
    return None


def stop_at(ids: Ids, stop_ids: frozenset[int]) -> int | None:
    """Return where a stop token stands before the last of ``ids``."""
    if len(ids) == 1 or not stop_ids:
        return None
    if len(ids) < MANY:
        return None if stop_ids.isdisjoint(ids[:-1]) else next(at for at, token in enumerate(ids) if token in stop_ids)
    array = np.frombuffer(ids, np.int32)[:-1]
    return next((int(found[0]) for stop in stop_ids if len(found := np.flatnonzero(array == stop))), None)


def _bounds(ids: Ids) -> tuple[int, int]:
    array = np.frombuffer(ids, np.int32)
    return int(array.min()), int(array.max())


def _most_and_total(logprobs: Logprobs) -> tuple[float, float]:
    array = np.frombuffer(logprobs, np.float32)
    return float(array.max()), float(array.sum(dtype=np.float64))
