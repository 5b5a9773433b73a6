"""What no engine may answer: checked before a single token of it is taken.

Invariant: what passes can stand in a training row as it is. Its ids are tokens of the model, each with a finite logprob
of at most 0; its weight version is one that a batch can hold; nothing follows a stop token; nothing exceeds what was
asked for. An answer that breaks this is refused whole, so ids, logprobs and versions never come apart.
"""

from __future__ import annotations

import math
from operator import index
from typing import Any

import numpy as np

from fsm_rollout.engines.protocol import Chunk, Engine, Request
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import LAST_VERSION, Ids, Logprobs, as_ids, as_logprobs

ROUNDING = 1e-3  # a logprob may be so far above 0: log-sums in half precision are not exact
_ENDS = (None, *FinishReason)
MANY = 128  # from so many tokens on NumPy is quicker than Python's own functions


def vocabulary_of(engine: Engine) -> int | None:
    """Return how many tokens an engine's model has: as it says, else as many as its tokenizer knows."""
    stated: int | None = getattr(engine, "vocabulary", None)
    if stated is not None:
        return stated
    tokenizer: Any = engine.tokenizer
    try:
        return max(len(tokenizer), 1 + max(getattr(tokenizer, "added_tokens_decoder", {}), default=-1))
    except TypeError:  # a tokenizer of the user's own, without a length
        return None


def checked(chunk: Chunk, request: Request, before: Ids, vocabulary: int | None) -> tuple[Ids, Logprobs, int]:
    """Return a chunk's ids, logprobs and weight version, or raise EngineError; ``before`` was streamed already."""
    request_id = chunk.request_id
    if chunk.finish_reason not in _ENDS:
        raise EngineError(f"the engine ended request {request_id} with {chunk.finish_reason!r}")
    # 1. Whole numbers and numbers that fit.
    try:
        ids, logprobs, version = as_ids(chunk.ids), as_logprobs(chunk.logprobs), index(chunk.weight_version)
        kept = [as_ids(ids_left) for ids_left in chunk.kept]
    except (TypeError, ValueError, OverflowError) as error:
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
    if kept and not (len(kept) == count and all(token in left for token, left in zip(ids, kept, strict=True))):
        raise EngineError(
            f"the engine returned {count} tokens of request {request_id} with {len(kept)} sets of tokens that they "
            f"were sampled from; there must be one per token, with that token in it"
        )
    if not count:
        return ids, logprobs, version
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
    lowest, highest, most, total = bounds(ids, logprobs)
    if lowest < 0 or (vocabulary is not None and highest >= vocabulary):
        wrong = lowest if lowest < 0 else highest
        raise EngineError(
            f"the engine returned token {wrong} for request {request_id}, which is none of the model's"
            + (f" {vocabulary:,}" if vocabulary is not None else "")
        )
    if not math.isfinite(total):
        raise EngineError(f"the engine returned a logprob that is no finite number (request {request_id})")
    if most > ROUNDING:
        raise EngineError(
            f"the engine returned a logprob of {most:g} (request {request_id}); it is the logarithm of a probability, "
            f"so at most 0"
        )
    return ids, logprobs, version


def stop_at(ids: Ids, stop_ids: frozenset[int]) -> int | None:
    """Return where a stop token stands before the last of ``ids``."""
    if len(ids) == 1 or not stop_ids:
        return None
    if len(ids) < MANY:
        return None if stop_ids.isdisjoint(ids[:-1]) else next(at for at, token in enumerate(ids) if token in stop_ids)
    array = np.frombuffer(ids, np.int32)[:-1]
    return next((int(found[0]) for stop in stop_ids if len(found := np.flatnonzero(array == stop))), None)


def bounds(ids: Ids, logprobs: Logprobs) -> tuple[int, int, float, float]:
    """Return the lowest and the highest id, the highest logprob and the sum of all."""
    if len(ids) < MANY:
        return min(ids), max(ids), max(logprobs), sum(logprobs)
    array, numbers = np.frombuffer(ids, np.int32), np.frombuffer(logprobs, np.float32)
    return int(array.min()), int(array.max()), float(numbers.max()), float(numbers.sum(dtype=np.float64))
