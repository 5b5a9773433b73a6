"""Which task is being cancelled, what a cancellation does not cut off, and how another thread is waited for.

Invariant: a wait here checks for an interruption every :data:`LOOK_UP` seconds. A signal that came just before the
wait, or to another thread, does not end it by itself; and within ``asyncio.run`` a Ctrl-C only cancels the task, which
code that waits without ``await`` has to check.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

LOOK_UP = 0.25  # seconds between two checks whether the caller has been interrupted


def being_cancelled() -> bool:
    """Return whether the present task is being cancelled; else a CancelledError is a failure of its raiser."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def to_its_end(work: Coroutine[object, object, T]) -> T:
    """Return what ``work`` returns; a cancellation of the task that waits is raised only when it has ended.

    A second one cancels ``work`` too.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def runs_in(task: asyncio.Task[object] | None) -> bool:
    """Return whether ``task`` is running; a GeneratorExit in one that is not means that it is being destroyed."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # there is no loop any more
        return False


def wait_for(
    done: Future[T], seconds: float = float("inf"), *, worth_it: Callable[[], bool] = lambda: True, look_up: bool = True
) -> T:
    """Return the result of what another thread does.

    Raises:
        TimeoutError: it takes longer than ``seconds``.
        asyncio.CancelledError: the task that waits here was cancelled (only with ``look_up``).
        CancelledError: it was cancelled, or the wait is not ``worth_it`` any more.
        Exception: whatever the other thread has raised.
    """
    # A bare lock: a signal may interrupt Python code (a Condition's, say) while it holds a lock of its own.
    ended = threading.Lock()
    ended.acquire()
    done.add_done_callback(lambda _: ended.release())
    until = time.monotonic() + seconds
    while not ended.acquire(timeout=max(0.0, min(LOOK_UP, until - time.monotonic()))):
        if time.monotonic() >= until:
            raise TimeoutError
        if not worth_it():
            raise CancelledError
        with suppress(RuntimeError):  # no event loop runs in this thread
            if look_up and being_cancelled():
                raise asyncio.CancelledError
    return done.result()


def pause(seconds: float) -> None:
    """Sleep for about so long; raises ``asyncio.CancelledError`` when the task that waits here was cancelled."""
    with suppress(TimeoutError):
        wait_for(Future(), seconds)
