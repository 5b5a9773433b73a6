"""Where the events of all trajectories go: into the journal, to the listeners, to the watch for stalls.

Invariant: an event is in the journal before a listener hears of it; a listener that raises is logged and harms nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fsm_rollout.scheduler.stalls import StallWatch
from fsm_rollout.trajectory.events import AnyEvent, CallBegun
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

Listener = Callable[[Trajectory, AnyEvent], None]


class Recorder:
    """Records events, for a scheduler."""

    def __init__(self, journal: Journal | None, listeners: Sequence[Listener]) -> None:
        self.journal = journal
        self.listeners = tuple(listeners)
        self._stalls: StallWatch | None = None  # watches the present run

    @contextmanager
    def watched(self, seconds: float | None, waits: Callable[[], Sequence[str]]) -> Iterator[None]:
        """Log what a run waits for when nothing has happened in it for so many seconds (``None``: never)."""
        self._stalls = None if seconds is None else StallWatch(seconds, waits)
        try:
            yield
        finally:
            if self._stalls is not None:
                self._stalls.stop()
            self._stalls = None

    def record(self, trajectory: Trajectory, event: AnyEvent, payload: bytes | None = None) -> None:
        """Record an event that was applied to a trajectory; ``payload`` is its encoding, if that is known."""
        if self.journal is not None:
            self.journal.append(trajectory.trajectory_id, event, payload)
            if isinstance(event, CallBegun):
                self.journal.persist()  # this call must not be made twice, so a resumed run has to know of it
        if self._stalls is not None:
            self._stalls.event()
        for listener in self.listeners:
            try:
                listener(trajectory, event)
            except Exception:  # the user's code
                logger.exception("an event listener failed on %s of %s", type(event).__name__, trajectory.trajectory_id)
