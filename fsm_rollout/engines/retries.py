"""What becomes of a request that has failed: it is tried again from where its tokens stand, or given up.

Invariant: a request is given up only for failures of its own; one that failed together with others, only after it has
failed by itself. What fails together is tried again together once (a replica may be gone, a connection lost). If that
fails as well, halves of it are tried one after the other; halves that fail are halved again, until one request fails
alone: that one is the cause, and all others go on. Other requests are sent meanwhile, and those that fail together with
a part on trial wait for the end of all trials; beside a part of one request nothing is sent, so that it fails alone. So
a poisoned request costs its neighbours some time, and a run in which nothing fails costs nothing.

A part has passed its trial when each of its requests has had tokens, or has ended. Requests that once failed after they
had had tokens (memory ran out while they were decoded, say) pass only by ending.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import FOR_GOOD, ReplicaLost
from fsm_rollout.errors import EngineError, PromptTooLong
from fsm_rollout.trajectory.enums import FinishReason

logger = logging.getLogger(__name__)
TOGETHER = 0.02  # seconds within which failures count as one: they come from one cause, each along its own way


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
        self.bisection = Bisection(self, requests)  # those that failed together, to be tried again in parts
        self._warned: set[str | None] = set()  # the kinds of failures that have been logged

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
        pending.lost = isinstance(error, ReplicaLost)
        if not self._taken_back(pending):  # all tokens have arrived; only the finish reason was lost
            return
        if maybe_shared and (self._requests.sent or self.bisection.busy):
            self.bisection.add(pending, error)
            if not self._requests.sent:  # there is nobody left who could fail with it
                self.bisection.judge()
        else:
            self.failed_alone(pending, error)

    def _taken_back(self, pending: PendingRequest) -> bool:
        """Take a request from where it is; end it if all of it is there, else let it wait for its next try."""
        self._requests.leave(pending)
        if (ended := pending.ended_as) is not None:
            self._requests.end(pending, ended)
            return False
        pending.waits = True
        pending.keep_time()
        pending.started = pending.has_chunk = pending.has_tokens = False
        return True

    def go_on(self, pending: PendingRequest) -> None:
        """Ask for the rest of a request of which a part has come, as it was to."""
        if self._taken_back(pending):
            pending.attempt += 1
            self._send(pending, 0.0)

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
        pending.attempt += 1
        if not pending.lost:
            # Only the first failure of a kind is a warning.
            level = logging.INFO if error.kind in self._warned else logging.WARNING
            self._warned.add(error.kind)
            logger.log(level, "request %s failed (%s); trying again", failed_id, str(error).partition("\n")[0])
        self._send(pending, 0.0 if pending.lost else self.backoff * 2 ** max(0, pending.failures - 1))

    def _send(self, pending: PendingRequest, delay: float) -> None:
        if pending in self.bisection:  # it may harm others
            self.bisection.queue([pending], delay)
        elif delay:
            asyncio.get_running_loop().call_later(delay, self._requests.enqueue, pending)
        else:
            self._requests.enqueue(pending)


class Bisection:
    """The requests that have failed together."""

    def __init__(self, retries: Retries, requests: Requests) -> None:
        self.busy = False  # whether anything is to be tried, or has failed just now
        self._retries, self._requests = retries, requests
        # Requests that have failed just now, while others may still fail with them.
        self._failed: dict[PendingRequest, EngineError] = {}
        # What is to be tried, part by part, each after a delay in seconds.
        self._parts: deque[tuple[list[PendingRequest], float]] = deque()
        self._on_trial: list[PendingRequest] = []  # the part that is being tried
        self._held: list[PendingRequest] = []  # requests that are sent when all trials are over
        # Ends the wait for what fails together, or the delay of the next part.
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, pending: PendingRequest) -> bool:
        return pending.shared > 1 or pending in self._on_trial

    @property
    def isolates(self) -> bool:
        """Whether one request is tried by itself, or is next: then nothing else is sent."""
        part = self._on_trial or (self._parts[0][0] if self._parts else ())
        return len(part) == 1

    def add(self, pending: PendingRequest, error: EngineError) -> None:
        """Note a failure that may have the same cause as others."""
        if not self._failed:
            self._stop_timer()  # the next part can wait
            self._timer = asyncio.get_running_loop().call_later(TOGETHER, self.judge)
        self._failed[pending] = error
        self.busy = True

    def hold(self, pending: PendingRequest) -> None:
        """Send a request when all trials are over."""
        self._held.append(pending)

    def queue(self, part: Sequence[PendingRequest], delay: float = 0.0) -> None:
        """Try some requests together, after the parts that wait already."""
        self._on_trial = [pending for pending in self._on_trial if pending not in part]
        self._parts.append((list(part), delay))
        self.busy = True
        self.go_on()

    def clear(self) -> None:
        """Forget everything: all requests are being ended."""
        self.busy = False
        self._failed.clear()
        self._parts.clear()
        self._on_trial, self._held = [], []
        self._stop_timer()

    def judge(self) -> None:
        """Decide which of the requests that failed together are suspected."""
        self._stop_timer()
        failed = {pending: error for pending, error in self._failed.items() if not pending.done.happened}
        self._failed.clear()
        # 1. With a part on trial that part is suspected, and those that ran beside it are not.
        tried = [pending for pending in failed if pending in self._on_trial]
        self._on_trial = [pending for pending in self._on_trial if pending not in failed]
        if len(failed) == 1:
            ((pending, error),) = failed.items()
            self._retries.failed_alone(pending, error)
        elif failed:
            for pending in failed:
                pending.falls_late |= pending.shared > 1 and not tried
                pending.shared += 1
            suspects = tried or [pending for pending in failed if pending.shared > 1]
            if suspects:
                self._halve(suspects, failed[suspects[0]])
            # 2. The others go on, behind all trials if there are any.
            for pending in [pending for pending in failed if pending not in suspects]:
                if tried:
                    pending.attempt += 1
                    self.hold(pending)
                else:
                    self._retries.try_again(pending, failed[pending])
        self.go_on()

    def _halve(self, suspects: list[PendingRequest], error: EngineError) -> None:
        """Try halves of the suspects; one suspect is tried once more, with nobody beside it."""
        logger.log(
            logging.WARNING if suspects[0].shared == 2 else logging.INFO,
            "%d requests failed together (%s); they are tried again in parts, to find the one that fails",
            len(suspects), str(error).partition("\n")[0],
        )  # fmt: skip
        for pending in suspects:
            pending.attempt += 1
        half = (len(suspects) + 1) // 2
        self._parts += ((suspects[:half], self._retries.backoff), (suspects[half:], 0.0))

    def go_on(self) -> None:
        """Try the next part when the present one has passed; with none left, send what was held."""
        passed = (each.done.happened or (each.has_tokens and not each.falls_late) for each in self._on_trial)
        if self._timer is not None or not all(passed):
            return
        self._on_trial = []
        while self._parts:
            part, delay = self._parts[0]
            if any(not pending.done.happened for pending in part):
                self._timer = asyncio.get_running_loop().call_later(delay, self._begin)
                return
            self._parts.popleft()
        self.busy = False
        held, self._held = self._held, []
        for pending in held:
            self._requests.enqueue(pending)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        self._timer = None
        part, _ = self._parts.popleft()
        self._on_trial = [pending for pending in part if not pending.done.happened]
        for pending in self._on_trial:
            self._requests.enqueue(pending, on_trial=True)
        self.go_on()
