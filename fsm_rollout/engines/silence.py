"""Who says nothing for too long: the one place where silence is measured.

Invariant: a replica that can be started again, and that has work and is not held, says something every ``seconds``, or
it is lost. A request that its engine has got has its first chunk within ``seconds``, or its try has failed; unless the
engine talks, and says that requests wait in it. One timer serves all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.replica import Replica
from fsm_rollout.engines.replicas import Replicas


class Watched(Protocol):
    """Who has the requests, and is told of silence."""

    sent: dict[str, PendingRequest]
    """Those that a replica has, or is about to get."""

    def replica_is_silent(self, replica: Replica, seconds: float) -> None:
        """Take note that a replica said nothing for so long."""

    def request_is_silent(self, pending: PendingRequest, seconds: float) -> None:
        """Take note that nothing came for a request for so long."""


class SilenceWatch:
    """See the module."""

    def __init__(self, watched: Watched, replicas: Replicas) -> None:
        self._watched, self._replicas, self._seconds = watched, replicas, replicas.times.silence
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, requests: Iterable[PendingRequest]) -> None:
        """Watch requests that an engine was asked for just now, or that go on after a hold; or let them be in one."""
        loop, held = asyncio.get_running_loop(), bool(self._replicas.held)
        silent_at = loop.time() + self._seconds
        for pending in requests:
            pending.silent_until = None if held else silent_at
        if self._timer is None and not held:  # one that is set is for an earlier silence
            self._timer = loop.call_at(silent_at, self._look)

    def stop(self) -> None:
        """Watch nobody."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        assert self._timer is not None
        loop, seconds = asyncio.get_running_loop(), self._seconds
        now = max(loop.time(), self._timer.when())  # a loop may be early by its clock's resolution
        self._timer = None
        if self._replicas.held:
            return
        ends: list[float] = []  # when somebody would have been silent for too long
        # 1. Replicas.
        for replica in self._replicas.up if self._replicas.placement.restarts else ():
            if replica.in_flight and now - replica.last_active >= seconds:
                self._watched.replica_is_silent(replica, seconds)
            elif replica.in_flight:
                ends.append(replica.last_active + seconds)
        # 2. Requests without a first chunk.
        for pending in list(self._watched.sent.values()):
            if pending.silent_until is None or pending.at is None:
                continue
            talks_until = pending.at.last_active + seconds
            if pending.silent_until <= now < talks_until and pending.at.busy().waiting:
                pending.silent_until = talks_until
            if pending.silent_until <= now:
                self._watched.request_is_silent(pending, seconds)
            else:
                ends.append(pending.silent_until)
        if ends:
            self.stop()  # a request that was given up may be under way again
            self._timer = loop.call_at(min(ends), self._look)
