"""Ending a command by a signal: SIGTERM and SIGHUP do what Ctrl-C does.

Invariant: the first signal cancels the coroutine that :meth:`Interruptible.run` waits for, so that it can clean up;
outside of the coroutine it raises :class:`Interrupted` at once. A second Ctrl-C does not wait; a further SIGTERM or
SIGHUP changes nothing, because those come in pairs when a machine goes down. A signal that this process was told to
ignore (``nohup``) stays ignored.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from fsm_rollout.concurrency.loop_end import run_to_end
from fsm_rollout.concurrency.steady_loop import SteadyLoop

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The process was told to end; ``signal`` says how, and 128 + ``signal`` is the exit code for it."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)


class Interruptible:
    """Runs a coroutine to its end; see :func:`interruptible`."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run ``work`` as ``asyncio.run`` does (:mod:`fsm_rollout.concurrency.loop_end`); a signal cancels it.

        Raises:
            Interrupted: a signal has cancelled it.
        """

        async def watched() -> T:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            try:
                return await work
            finally:
                self._task = None

        try:
            return run_to_end(watched(), SteadyLoop())
        except asyncio.CancelledError:
            if self._received is None:
                raise
            raise Interrupted(self._received) from None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        first, self._received = self._received is None, self._received or number
        if first and self._task is not None and self._loop is not None:
            self._task.cancel()  # here and now, for code that waits without `await`; see cancellation
            self._loop.call_soon_threadsafe(lambda: None)  # wakes a loop that has nothing to do
        elif first or number == signal.SIGINT:
            raise Interrupted(number)


@contextmanager
def interruptible() -> Iterator[Interruptible]:
    """Turn signals that end this process into cancellations, or :class:`Interrupted`, within the block.

    Signals reach the main thread alone; in any other this does nothing.
    """
    work = Interruptible()
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
    replaced = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in replaced:
        signal.signal(number, work.receive)
    try:
        yield work
    finally:
        for number in replaced:
            signal.signal(number, before[number] if before[number] is not None else signal.SIG_DFL)
