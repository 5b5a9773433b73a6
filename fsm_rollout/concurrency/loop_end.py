"""Ending an event loop: what runs on it is cancelled, and what ignores that is left behind.

Invariant: :func:`run_to_end` does what ``asyncio.run`` does, with one exception: ``asyncio.run`` waits for ever for a
task that swallows its cancellation, and for a job of ``asyncio.to_thread`` (a user's tool, say). This waits
:data:`LEFT_AFTER` seconds, logs what is left, and goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from typing import TypeVar

from fsm_rollout.concurrency.threads import DaemonThreads

T = TypeVar("T")
Ended = tuple[set[asyncio.Task[object]], set[asyncio.Task[object]]]  # tasks that ended, and those that did not

INTERRUPTIONS = (KeyboardInterrupt, SystemExit)  # what a task raises out of its loop
LEFT_AFTER = 5.0  # seconds that tasks, and then the jobs of `asyncio.to_thread`, have to end when their loop does
# So many jobs of `asyncio.to_thread` run at once, as is asyncio's own default.
MOST_THREADS = min(32, (os.cpu_count() or 1) + 4)

_logger = logging.getLogger(__name__)
# Tasks that were left behind, kept alive: a destroyed one would be asked to end again, and refuse again.
_left: list[asyncio.Task[object]] = []


def run_to_end(work: Coroutine[object, object, T], loop: asyncio.AbstractEventLoop) -> T:
    """Run ``work`` on a new loop and return its result; then end all that is left on the loop, and close it."""
    asyncio.set_event_loop(loop)
    threads = DaemonThreads("asyncio", MOST_THREADS)
    loop.set_default_executor(threads)
    interruption: BaseException | None = None
    try:
        return loop.run_until_complete(work)
    except INTERRUPTIONS as error:
        interruption = error
        raise
    finally:
        try:
            _see_to(end_tasks(loop, LEFT_AFTER, interruption), loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
            if stuck := threads.end(LEFT_AFTER):
                _logger.warning(
                    "%d job(s) of asyncio.to_thread do not end (%g s so far) and are left behind", stuck, LEFT_AFTER
                )
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def end_tasks(loop: asyncio.AbstractEventLoop, seconds: float | None, interruption: BaseException | None) -> Ended:
    """Cancel what is left on a loop, and return the tasks that ended within so many seconds, and the others.

    An ``interruption`` that one task has raised out of the loop is raised again by each that hands it on, as a task
    group does; that keeps nobody from ending. Another one (a second Ctrl-C) does.
    """
    tasks = asyncio.all_tasks(loop)
    if not tasks:
        return set(), set()
    for task in tasks:
        task.cancel()
    waiting = loop.create_task(asyncio.wait(tasks, timeout=seconds))
    while True:
        try:
            return loop.run_until_complete(waiting)
        except INTERRUPTIONS as error:
            if error is not interruption:
                raise


def _see_to(tasks: Ended, loop: asyncio.AbstractEventLoop) -> None:
    """Say which tasks failed while they ended, and which refuse to."""
    ended, refusing = tasks
    for task in ended:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, INTERRUPTIONS):  # those have come out of the loop
            loop.call_exception_handler({"message": "a task failed while its loop ended", "exception": error})
    for task in refusing:
        _logger.warning("%s ignores its cancellation (%g s so far) and is left behind", task.get_name(), LEFT_AFTER)
    if refusing:
        _left.extend(refusing)
        loop.set_exception_handler(lambda loop, context: None)  # they have been named
