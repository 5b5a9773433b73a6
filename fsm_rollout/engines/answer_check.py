"""What no engine may answer: checked before a single token of it is taken.

Invariant: what passes can stand in a training row as it is. Its ids are tokens of the model, each with a finite logprob
of at most 0; its weight version is one that a batch can hold; nothing follows a stop token; nothing exceeds what was
asked for. An answer that breaks this is refused whole, so ids, logprobs and versions never come apart.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from operator import contains, index

import numpy as np

from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import LAST_VERSION, Ids, Logprobs, Note, NoteKind, as_ids, as_logprobs

ROUNDING = 1e-3  # a logprob may be so far above 0: log-sums in half precision are not exact
_ENDS = (None, *FinishReason)
LAST_EXPERT = 2**15 - 1  # the highest number of an expert: batches hold them as int16
MANY = 128  # from so many tokens on NumPy is quicker than Python's own functions


def checked(
    chunk: Chunk, request: Request, before: Ids, vocabulary: int | None
) -> tuple[Ids, Logprobs, int, list[Note]]:
    """Return a chunk's ids, logprobs, weight version and notes, or raise EngineError; ``before`` came already."""
    request_id = chunk.request_id
    if chunk.finish_reason not in _ENDS:
        raise EngineError(f"the engine ended request {request_id} with {chunk.finish_reason!r}")
    # 1. Whole numbers and numbers that fit.
    try:
        ids, logprobs, version = as_ids(chunk.ids), as_logprobs(chunk.logprobs), index(chunk.weight_version)
        notes = (
            [
                Note(
                    NoteKind(note.kind), index(note.start), as_ids(note.counts), as_ids(note.values), index(note.layers)
                )
                for note in chunk.notes
            ]
            if chunk.notes
            else []
        )
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
    if len(before) + count > sampling.max_tokens:
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
