"""Threads for work that may never return.

Invariant: every submitted job runs in a daemon thread, and its future has its result. A job never waits for one that
runs, unless ``most`` do. One that never returns keeps neither an event loop nor the interpreter's exit waiting (the
pools of ``concurrent.futures`` are joined at exit). A thread whose job was given up takes no other, whatever state that
left it in; the others wait some seconds for their next job, since to start a thread costs more than most jobs.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

IDLE_SECONDS = 5.0  # how long a thread waits for its next job before it ends


class _Result(Future[T]):
    given_up = False

    def cancel(self) -> bool:
        """Cancel the job if it has not begun; else note that nobody waits for it any more."""
        self.given_up = True
        return super().cancel()


class DaemonThreads(ThreadPoolExecutor):
    """Daemon threads called ``name``, ``most`` at a time: the jobs beyond that wait for one, and may be cancelled.

    It derives from the pool only because event loops take no other executor for ``asyncio.to_thread``.
    """

    def __init__(self, name: str, most: float = math.inf) -> None:
        super().__init__(thread_name_prefix=name)  # which starts none
        self._name, self._most = name, most
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._jobs: deque[tuple[_Result[Any], Callable[[], object]]] = deque()
        self._alive = self._idle = 0  # threads: all, and those that wait for a job
        self._closed = False
        lock = threading.Lock()
        self._arrived, self._left = threading.Condition(lock), threading.Condition(lock)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``function`` in a thread."""
        if self._process != os.getpid():
            self._begin()  # this is a fork, to which the threads did not come along
        result: _Result[T] = _Result()
        with self._arrived:
            self._jobs.append((result, partial(function, *args, **kwargs)))
            starts = len(self._jobs) > self._idle and self._alive < self._most
            self._alive += starts
            self._arrived.notify()
        if starts:
            self._start()
        return result

    def end(self, seconds: float) -> int:
        """Drop the jobs that wait, wait for the others so long, and return how many do not end."""
        with self._left:
            self._jobs.clear()
            self._closed = True
            self._arrived.notify_all()
            self._left.wait_for(lambda: not self._alive, seconds)
            return self._alive

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: threads end when they have had no job for a while, and nobody waits for one."""

    def _start(self) -> None:
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            result, job = taken
            if result.set_running_or_notify_cancel():
                try:
                    value = job()
                except BaseException as error:
                    result.set_exception(error)
                else:
                    result.set_result(value)
                    del value
                if result.given_up:
                    self._leave()
                    return
            del taken, result, job  # so that the thread, while it waits, keeps nothing of this one alive

    def _next(self) -> tuple[_Result[Any], Callable[[], object]] | None:
        """Return the next job; ``None``: there was none for so long that the thread, counted out already, may end."""
        with self._arrived:
            self._idle += 1
            self._arrived.wait_for(lambda: self._jobs or self._closed, IDLE_SECONDS)
            self._idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._alive -= 1
            self._left.notify_all()
            return None

    def _leave(self) -> None:
        """Let another thread take the place of this one, if there are jobs for it."""
        with self._left:
            starts = len(self._jobs) > self._idle
            self._alive -= not starts
            self._left.notify_all()
        if starts:
            self._start()
