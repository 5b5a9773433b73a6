"""What one request's answer must look like, chunk by chunk and as a whole.

Invariant: every rule here follows from the request, the engine's window and :mod:`fsm_rollout.engines.protocol` alone; a
broken one raises :class:`ConformanceError`, which says the invariant's number and the request.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.testing.conformance.promises import ConformanceError
from fsm_rollout.trajectory.reasons import FinishReason


@dataclass(slots=True)
class Answer:
    """All chunks of one request so far."""

    request: Request
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [token for chunk in self.chunks for token in chunk.ids]

    @property
    def logprobs(self) -> list[float]:
        """All logprobs."""
        return [logprob for chunk in self.chunks for logprob in chunk.logprobs]

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended, ``None`` while it has not."""
        return self.chunks[-1].finish_reason if self.chunks else None

    def take(self, chunk: Chunk) -> None:
        """Append a chunk, checking it."""
        name = self.request.request_id
        if self.finish_reason is not None:
            raise ConformanceError(1, f"'{name}' got another chunk after its last one: {chunk}")
        if not (isinstance(chunk.ids, array) and chunk.ids.typecode == "i" and all(i >= 0 for i in chunk.ids)):
            raise ConformanceError(1, f"'{name}': ids must be an array('i') of tokens, got {chunk.ids!r:.80}")
        if not (isinstance(chunk.logprobs, array) and chunk.logprobs.typecode == "f"):
            raise ConformanceError(2, f"'{name}': logprobs must be an array('f'), got {chunk.logprobs!r:.80}")
        if len(chunk.ids) != len(chunk.logprobs):
            raise ConformanceError(2, f"'{name}' got {len(chunk.ids)} ids with {len(chunk.logprobs)} logprobs")
        if not isinstance(chunk.weight_version, int):
            raise ConformanceError(8, f"'{name}': weight_version must be an int, got {chunk.weight_version!r}")
        wrong = next((p for p in chunk.logprobs if not (math.isfinite(p) and p <= 0)), None)
        if wrong is not None:
            raise ConformanceError(2, f"'{name}' got the logprob {wrong}; it must be finite and at most 0")
        if chunk.finish_reason not in (None, *FinishReason):
            raise ConformanceError(1, f"'{name}' ended with finish_reason '{chunk.finish_reason}'")
        if chunk.error is not None and chunk.finish_reason != FinishReason.ABORT:
            raise ConformanceError(1, f"'{name}' got an error with finish_reason '{chunk.finish_reason}', not 'abort'")
        if not self.chunks and len(chunk.ids) and chunk.error is None:
            raise ConformanceError(7, f"'{name}': the first chunk has tokens; an empty one must say it was admitted")
        if chunk.waits and (len(chunk.ids) or chunk.finish_reason is not None):
            raise ConformanceError(
                7, f"'{name}' got a chunk that `waits` and brings something; it must be an empty one"
            )
        if self.chunks and chunk.weight_version < self.chunks[-1].weight_version:
            raise ConformanceError(8, f"'{name}': the weight version went back to {chunk.weight_version}")
        self.chunks.append(chunk)

    def whole(self, max_context: int) -> None:
        """Check the answer now that it should have come to its end."""
        name, sampling, ids = self.request.request_id, self.request.sampling, self.ids
        reason = self.finish_reason
        if reason is None:
            raise ConformanceError(1, f"the iterator ended, and '{name}' has had no last chunk")
        room = min(sampling.max_tokens, max_context - len(self.request.ids))
        if len(ids) > room and self.chunks[-1].error is None:
            raise ConformanceError(1, f"'{name}' got {len(ids)} tokens; max_tokens and the window allow {room}")
        if reason == FinishReason.LENGTH and len(ids) != room:
            raise ConformanceError(1, f"'{name}' ended with 'length' after {len(ids)} tokens; {room} were allowed")
        if sampling.ignore_eos:
            if reason == FinishReason.STOP:
                raise ConformanceError(3, f"'{name}' stopped, though ignore_eos was asked for")
            return
        if reason == FinishReason.STOP and sampling.stop_ids and (not ids or ids[-1] not in sampling.stop_ids):
            last = f"is {ids[-1]}" if ids else "does not exist"
            raise ConformanceError(3, f"'{name}' stopped, and its last token {last}: the stop token was dropped")
        early = next((i for i, token in enumerate(ids[:-1]) if token in sampling.stop_ids), None)
        if early is not None or (reason != FinishReason.STOP and ids and ids[-1] in sampling.stop_ids):
            where = len(ids) - 1 if early is None else early
            raise ConformanceError(3, f"'{name}' sampled the stop token {ids[where]} at {where} and did not stop there")


def take(chunk: Chunk, answers: Mapping[str, Answer]) -> None:
    """Give a chunk to the answer it belongs to."""
    if not isinstance(chunk, Chunk):
        raise ConformanceError(1, f"generate() gave {chunk!r:.80}, which is no Chunk")
    if chunk.request_id not in answers:
        raise ConformanceError(
            1, f"a chunk for '{chunk.request_id}', which is no request of this dispatch ({', '.join(answers)})"
        )
    answers[chunk.request_id].take(chunk)
