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
        silent_at = asyncio.get_running_loop().time() + self._seconds
        for pending in requests:
            pending.silent_until = None if self._replicas.held else silent_at
        if not self._replicas.held:
            self._look_by(silent_at)

    def stop(self) -> None:
        """Watch nobody."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_by(self, when: float) -> None:
        if self._timer is None or self._timer.when() > when:
            self.stop()
            self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        assert self._timer is not None
        # A loop may be early by its clock's resolution.
        now, seconds = max(asyncio.get_running_loop().time(), self._timer.when()), self._seconds
        self._timer = None
        if self._replicas.held:
            return
        # 1. Replicas.
        for replica in self._replicas.up if self._replicas.placement.restarts else ():
            if replica.in_flight and now - replica.last_active >= seconds:
                self._watched.replica_is_silent(replica, seconds)
            elif replica.in_flight:
                self._look_by(replica.last_active + seconds)
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
                self._look_by(pending.silent_until)
