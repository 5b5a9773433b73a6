"""What becomes of a request that has failed: it is tried again from where its tokens stand, or given up.

Invariant: a request is given up only for failures of its own. What fails together is tried again together, then in
parts (:mod:`fsm_rollout.engines.bisection`), until the one is found that fails by itself.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from fsm_rollout.engines.bisection import Bisection
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import FOR_GOOD, ReplicaLost
from fsm_rollout.errors import EngineError, PromptTooLong
from fsm_rollout.trajectory.enums import FinishReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tries:
    """How often one generation is tried."""

    attempts: int = 3
    """In all, whatever it failed of."""
    again: bool = True
    """Whether one that its engine failed is tried again; one that was lost with its replica always is."""
    backoff: float = 0.1
    """Seconds before the second try; twice as long before each further one."""
    another_replica: bool = False
    """Whether what a replica has failed is tried at another, if there is one."""


class Requests(Protocol):
    """Who has the requests."""

    sent: dict[str, PendingRequest]
    """Those that a replica has, or is about to get, by the id of the present try."""

    def enqueue(self, pending: PendingRequest, *, on_trial: bool = False) -> None:
        """Send a request soon."""

    def leave(self, pending: PendingRequest) -> None:
        """Take a request from where it is."""

    def end(self, pending: PendingRequest, finish_reason: FinishReason, error: EngineError | None = None) -> None:
        """End a request."""


class Retries:
    """See the module."""

    def __init__(self, requests: Requests, tries: Tries) -> None:
        self.backoff = tries.backoff
        self._requests, self._tries = requests, tries
        self.bisection = Bisection(self)  # requests that failed together, which are tried again in parts
        self._warned: set[str | None] = set()  # the kinds of failures that have been logged

    def enqueue(self, pending: PendingRequest, *, on_trial: bool = False) -> None:
        """Send a request soon."""
        self._requests.enqueue(pending, on_trial=on_trial)

    def failed(self, pending: PendingRequest, error: EngineError, *, maybe_shared: bool = False) -> None:
        """Try a request again from where its tokens stand, or give it up.

        ``maybe_shared``: another request may be the cause. While others are under way, it is not counted against this
        one: they are tried in parts until the cause is found.
        """
        if pending.done.happened:
            return
        if not maybe_shared and (isinstance(error, PromptTooLong) or error.kind in FOR_GOOD):
            self._requests.end(pending, FinishReason.ABORT, error)
            return
        self._requests.leave(pending)
        pending.lost = isinstance(error, ReplicaLost)
        if (ended := pending.ended_as) is not None:  # all tokens have arrived; only the finish reason was lost
            self._requests.end(pending, ended)
            return
        pending.waits = True
        pending.keep_time()
        pending.started = pending.has_chunk = pending.has_tokens = False
        if maybe_shared and (self._requests.sent or self.bisection.busy):
            self.bisection.add(pending, error)
            if not self._requests.sent:  # there is nobody left who could fail with it
                self.bisection.judge()
        else:
            self.failed_alone(pending, error)

    def failed_alone(self, pending: PendingRequest, error: EngineError) -> None:
        """Count a failure as the request's own, and try it again unless it has been tried often enough."""
        if pending.done.happened:
            return
        pending.losses += pending.lost
        pending.failures += not pending.lost
        tries, request = pending.failures + pending.losses, pending.request
        culprit = f" (request {request.request_id} of {len(request.ids):,} tokens, by itself)" if pending.shared else ""
        if tries < self._tries.attempts and (pending.lost or self._tries.again):
            self.try_again(pending, error)
        elif not pending.losses:
            if culprit:
                error = EngineError(f"{error}{culprit}", kind=error.kind or type(error).__name__)
            self._requests.end(pending, FinishReason.ABORT, error)
        else:
            message = f"EngineError: {tries} tries failed, the last one: {error}{culprit}"
            given_up = EngineError(message, kind="EngineError")
            given_up.failure = "infrastructure" if pending.lost else None
            self._requests.end(pending, FinishReason.ABORT, given_up)

    def try_again(self, pending: PendingRequest, error: EngineError) -> None:
        """Ask for the rest of a request: at once where another replica may have it, else later each time."""
        failed_id = pending.request_id
        self.next_try(pending)
        if not pending.lost:
            # Only the first failure of a kind is a warning.
            level = logging.INFO if error.kind in self._warned else logging.WARNING
            self._warned.add(error.kind)
            logger.log(level, "request %s failed (%s); trying again", failed_id, str(error).partition("\n")[0])
        delay = 0.0 if pending.lost else self.backoff * 2 ** max(0, pending.failures - 1)
        if pending in self.bisection:  # it may harm others
            self.bisection.queue([pending], delay)
        elif delay:
            asyncio.get_running_loop().call_later(delay, self.enqueue, pending)
        else:
            self.enqueue(pending)

    def next_try(self, pending: PendingRequest) -> None:
        """Count a further try of a request, which gets another id when it is sent."""
        pending.attempt += 1
