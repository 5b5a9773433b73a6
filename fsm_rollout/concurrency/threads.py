"""Threads for work that may never return.

Invariant: every submitted job runs in a daemon thread, and its future has its result. One that never
returns keeps neither an event loop nor the interpreter's exit waiting (the pools of ``concurrent.futures`` are joined
at exit).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(ThreadPoolExecutor):
    """Daemon threads called ``name``, ``most`` at a time: the jobs beyond that wait for one, and may be cancelled.

    It derives from the pool only because event loops take no other executor for ``asyncio.to_thread``.
    """

    def __init__(self, name: str, most: float = math.inf) -> None:
        super().__init__(thread_name_prefix=name)  # which starts none
        self._name, self._most = name, most
        self._jobs: deque[tuple[Future[Any], Callable[[], object]]] = deque()
        self._running = 0
        self._changed = threading.Condition()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``function`` in a thread."""
        future: Future[T] = Future()
        with self._changed:
            self._jobs.append((future, partial(function, *args, **kwargs)))
            starts = self._running < self._most
            self._running += starts
        if starts:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def end(self, seconds: float) -> int:
        """Drop the jobs that wait, wait for the others so long, and return how many do not end."""
        with self._changed:
            self._jobs.clear()
            self._changed.wait_for(lambda: not self._running, seconds)
            return self._running

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: threads end with their last job, and nobody waits for one that has none."""

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._running -= 1
                    self._changed.notify_all()
                    return
                future, job = self._jobs.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, job  # so that the thread, while it waits for its next job, keeps nothing of this one alive
