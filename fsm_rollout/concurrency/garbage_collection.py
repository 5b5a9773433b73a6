"""Garbage collection while thousands of trajectories are under way, or are made into a batch.

Invariant: inside :func:`calm_collection` memory in cycles is still freed; afterwards the collector's settings are as
before. Python's collector walks through all objects that live each time their number has grown by a quarter: those of
torch and transformers (a million), and those of every trajectory under way, hardly any of which are garbage. That cost
a fourth of a run's CPU time. So it leaves out what lived before, and sets out only when there are more new objects than
the trajectories under way have: garbage in cycles takes no more memory than they do.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 100_000  # so many new objects there may be before they are looked through: most are gone by then
OF_TRAJECTORY = 200  # so many more for each trajectory under way, which has about a hundred

# Taken again by its own thread when the collector, at work inside, closes a block that was thrown away.
_lock = threading.RLock()
_calm = 0  # how many blocks are open, in all threads
_before = (0, 0, 0)
# Whether it was a block here that froze what lives; thawing what others have frozen would undo their work.
_frozen_here = False


@contextmanager
def calm_collection(trajectories: int = 0) -> Iterator[None]:
    """Leave what lives already out of collections, and collect what is new less often. Blocks may overlap.

    ``trajectories``: so many may be under way at a time.
    """
    global _calm, _before, _frozen_here
    with _lock:
        if _calm == 0:
            _before = gc.get_threshold()
            _frozen_here = gc.get_freeze_count() == 0
            if _frozen_here:
                gc.freeze()
        if _before[0]:  # else the user has switched it off
            gc.set_threshold(max(YOUNG + OF_TRAJECTORY * trajectories, gc.get_threshold()[0]), *_before[1:])
        _calm += 1
    try:
        yield
    finally:
        with _lock:
            _calm -= 1
            if _calm == 0:
                gc.set_threshold(*_before)
                if _frozen_here:
                    gc.unfreeze()
