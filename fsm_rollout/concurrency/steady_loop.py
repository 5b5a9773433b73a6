"""An event loop whose clock stands still while the process does: it was stopped, or its machine was frozen.

Invariant: the loop's time leaves out the seconds in which nothing of this process ran, so they count against no
timeout, and they are logged. A thread notes every second that it runs; who looks at the clock and finds its last note
old knows. A loop that its own code blocks is no such case: the thread runs then, or the process computes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from time import monotonic, process_time

logger = logging.getLogger(__name__)

BEAT = 1.0  # seconds between two notes
STILL = 5.0  # seconds without a note, beyond BEAT, in which nothing can have run: a busy machine delays one by less


class _Heart:
    """When this process is known to have run, and how long it has stood still since the loop was made."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.lost = 0.0
        self._noted, self._computed = monotonic(), process_time()
        self.stale = self._noted + BEAT + STILL  # when the last note is old
        self._lock = threading.Lock()

    def beat(self) -> None:
        """Note that the process runs, until the loop is closed."""
        while not self.ended.wait(BEAT):
            self.note()

    def note(self) -> None:
        """Note that the process runs; where the last note is old and nothing was computed since, it stood still."""
        with self._lock:
            now, computed = monotonic(), process_time()
            gap, self._noted, self.stale = now - self._noted - BEAT, now, now + BEAT + STILL
            idle, self._computed = computed - self._computed < gap / 2, computed
            if gap <= STILL or not idle:
                return
            self.lost += gap
        logger.warning(
            "the process stood still for %.0f s (it was stopped, or its machine was); no timeout counts them", gap
        )


class SteadyLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._heart = _Heart()
        super().__init__()
        self._thread = threading.Thread(target=self._heart.beat, name="fsm-rollout-heart", daemon=True)
        self._thread.start()

    def time(self) -> float:
        """Return the seconds of the monotonic clock less those in which the process stood still."""
        heart, now = self._heart, monotonic()
        if now > heart.stale:
            heart.note()
        return now - heart.lost

    def close(self) -> None:
        """Close the loop, and end its thread."""
        self._heart.ended.set()
        self._thread.join()
        super().close()
