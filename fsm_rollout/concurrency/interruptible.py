"""Waiting in this thread for what another one does, while a Ctrl-C is heard.

Invariant: whoever waits here looks up every ``LOOK_UP`` seconds. A signal that came just before the wait, or was given
to another thread, does not end a wait by itself; and within ``asyncio.run`` a Ctrl-C does nothing but cancel the task,
which code that waits without ``await`` has to look at.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from fsm_rollout.concurrency.deadline import being_cancelled

T = TypeVar("T")

LOOK_UP = 0.25
"""Seconds between two looks whether the caller has been interrupted."""


def wait_for(done: Future[T], seconds: float = float("inf")) -> T:
    """Return the result of what another thread does.

    Raises:
        TimeoutError: it takes longer than ``seconds``.
        CancelledError: the task that waits here was cancelled.
        Exception: whatever the other thread has raised.
    """
    until = time.monotonic() + seconds
    while not wait([done], max(0.0, min(LOOK_UP, until - time.monotonic()))).done:
        if time.monotonic() >= until:
            raise TimeoutError
        look_up()
    return done.result()


def pause(seconds: float) -> None:
    """Sleep for about so long.

    Raises:
        CancelledError: the task that waits here was cancelled.
    """
    with suppress(TimeoutError):
        wait_for(Future(), seconds)


def look_up() -> None:
    """See whether the caller has been interrupted.

    Raises:
        CancelledError: the task that runs this was cancelled.
    """
    with suppress(RuntimeError):  # no event loop runs in this thread
        if being_cancelled():
            raise asyncio.CancelledError
