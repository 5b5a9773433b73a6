"""Which engine keeps what it has computed for which session.

Invariant: a session is begun at an engine by the first request that is sent there, and ended there once: when whoever
asks has ended it, or when its requests go to another engine. An engine that is gone has ended all of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fsm_rollout.engines.protocol import Request, SessionKeeper

logger = logging.getLogger(__name__)


class Sessions:
    """See the module."""

    def __init__(self) -> None:
        self._keepers: dict[str, SessionKeeper] = {}  # where the latest request of each session was sent

    def send(self, requests: Iterable[Request], keeper: SessionKeeper) -> None:
        """Note that an engine is about to have these requests."""
        for request in requests:
            session = request.session
            before = self._keepers.get(session)
            if before is keeper or not session:
                continue
            if before is not None:
                _end(before, [session])
            self._keepers[session] = keeper

    def end(self, sessions: Iterable[str]) -> None:
        """End sessions; those that no engine has are none."""
        by_keeper: dict[int, tuple[SessionKeeper, list[str]]] = {}
        for session in sessions:
            if (keeper := self._keepers.pop(session, None)) is not None:
                by_keeper.setdefault(id(keeper), (keeper, []))[1].append(session)
        for keeper, theirs in by_keeper.values():
            _end(keeper, theirs)


def _end(keeper: SessionKeeper, sessions: list[str]) -> None:
    try:
        keeper.end_sessions(sessions)
    except Exception:  # whatever an engine raises is the engine's failure, and what it keeps is its own matter
        logger.warning("the engine failed to end sessions %s", sessions, exc_info=True)
