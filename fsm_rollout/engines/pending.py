"""A request on its way: what an engine has streamed for it, and how it ended.

Invariant: it holds every token that was streamed for it, over all its tries, in order, each with its logprob and the
version of its weights; and it ends exactly once.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.concurrency.once import Once
from fsm_rollout.engines.answer_check import checked
from fsm_rollout.engines.protocol import Chunk, ReplicaLost, Request
from fsm_rollout.errors import EngineError, PromptTooLong
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import Ids, Logprobs, Note, add_note

if TYPE_CHECKING:
    from fsm_rollout.engines.replica import Replica

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request on its way: what has been streamed for it so far, and how it ended."""

    request: Request
    submitted_at: float
    # The timeout of the visit that waits for it: stands still while queued, and while the engine is paused.
    deadline: Deadline | None = None
    ids: Ids = field(default_factory=partial(array, "i"))
    logprobs: Logprobs = field(default_factory=partial(array, "f"))  # type: ignore[arg-type]  # the code says which
    versions: list[tuple[int, int]] = field(default_factory=list)  # run lengths `(tokens, weight version)` over `ids`
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
    cached_tokens: int = 0
    replica: str = ""
    at: Replica | None = None  # the replica that has it
    asked: bool = False  # whether that replica's engine was asked for it: only then is losing the replica a failed try
    aborted: bool = False
    done: Once = field(default_factory=Once)
    paused: bool = False  # whether the engine is paused
    waits: bool = False  # whether it waits: between two tries, or because the engine says so (`Chunk.waits`)
    deadline_held: bool = False  # whether the deadline stands still
    has_chunk: bool = False  # whether the present try has had a chunk
    has_tokens: bool = False  # whether the present try has had tokens
    lost: bool = False  # whether the previous try was lost with its replica
    on_end: Callable[[PendingRequest], None] | None = None  # called when it has ended
    # When the try is given up if its first chunk has not come by then; `None` from that chunk on.
    silent_until: float | None = None
    client: object = None  # who submitted it
    on_tokens: Callable[[], object] | None = None  # called when tokens have come, to show them at once

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
        """Append one chunk; EngineError if no engine may answer so (:mod:`fsm_rollout.engines.answer_check`)."""
        self.silent_until = None
        ids, logprobs, version, notes = checked(chunk, self.request, self.ids, vocabulary)
        if self.admitted_at is None:
            self.admitted_at = now
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
        if self.at is None or not self.at.name:  # else that is what it is called here
            self.replica = chunk.replica or self.replica
        if ids and self.on_tokens is not None:
            try:
                self.on_tokens()
            except Exception:  # a reader of the tokens must not harm the generation
                logger.exception("tokens of request %s could not be shown as they came", self.request_id)

    @property
    def rest(self) -> Request:
        """What is asked for the present try: what no earlier one has streamed."""
        again = self.request_id != self.request.request_id
        return self.request.continued(self.ids, self.request_id) if again else self.request

    def failed_by(self, chunk: Chunk) -> EngineError | None:
        """Return how a chunk that was taken fails the try; ``None``: not at all."""
        if chunk.error is not None:
            return _failure(chunk.error)
        if chunk.finish_reason == FinishReason.ABORT and not self.aborted:
            return EngineError(f"the engine aborted request {self.request_id} by itself")
        if chunk.finish_reason is not None and not (self.ids or self.aborted):
            return EngineError(f"the engine ended request {self.request_id} without a single token")
        return None

    @property
    def lane(self) -> int:
        """What it comes before in a queue: 0 goes on, 1 is a turn of a trajectory that has had others, 2 is a first."""
        return 0 if self.attempt > 1 or self.request.sampled else 1 if self.request.turn else 2

    @property
    def ended_as(self) -> FinishReason | None:
        """How the request has ended, if only its last chunk is missing; ``None``: it has not."""
        sampling = self.request.sampling
        if self.aborted:
            return FinishReason.ABORT
        if self.ids and not sampling.ignore_eos and self.ids[-1] in sampling.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.ids) >= sampling.max_tokens else None

    def end(self, finish_reason: FinishReason, error: EngineError | None = None) -> None:
        """End the request; only the first call counts."""
        if not self.done.happened:
            self.finish_reason, self.error = finish_reason, error
            self.done.set()
            self.silent_until = None
            if self.on_end is not None:
                self.on_end(self)
            self.keep_time()


def _failure(error: str) -> EngineError:
    """Return the error of a chunk, ``Class: message``, as an exception."""
    kind, colon, message = error.partition(": ")
    if kind == "ReplicaLost":
        return ReplicaLost(message)
    if kind == "PromptTooLong":
        return PromptTooLong(error)
    return EngineError(error, kind=kind if colon and kind.isidentifier() else None)
