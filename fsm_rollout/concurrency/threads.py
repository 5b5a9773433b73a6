"""Threads for work that may never return.

Invariant: a job that has been given in runs, in a daemon thread of its own, and its future tells what came of it. One
that never returns keeps neither an event loop nor the interpreter's exit waiting (the pools of ``concurrent.futures``
are joined at exit).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """One daemon thread per job, called ``name``. An executor, because event loops know how to wait for those."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``function`` in a new thread; it cannot be taken back."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def work() -> None:
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return future
