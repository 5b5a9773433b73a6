"""Plain calls of async code: an event loop in a thread of its own, so that any caller may wait, notebooks included.

Invariant: a call that is interrupted (Ctrl-C) is cancelled once, as ``asyncio.run`` does it, and what it has to clean
up is done before the interruption goes on to the caller; a second one is raised at once. Nothing here keeps the
interpreter from ending: what is still open then is closed while threads and executors still work.
"""

from __future__ import annotations

import asyncio
import atexit

# This registers how the interpreter's end stops executors; what is registered later, as here, comes before that.
import concurrent.futures.thread
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

from fsm_rollout.concurrency.cancellation import wait_for
from fsm_rollout.concurrency.loop_end import run_to_end
from fsm_rollout.concurrency.steady_loop import SteadyLoop
from fsm_rollout.errors import EngineError, callers_mistake

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
Owner = TypeVar("Owner", bound="OwnLoop")


class LoopThread:
    """An event loop in a daemon thread; it ends when it is closed or no longer referenced."""

    def __init__(self) -> None:
        self._loop = SteadyLoop()
        self._enough = asyncio.Event()
        self._calls: set[asyncio.Task[object]] = set()
        serve = (self._loop, self._enough, self._calls)  # not this object, which could then never be collected
        self._thread = threading.Thread(target=_serve, args=serve, name="fsm-rollout-loop", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _call_soon, self._loop, self._enough.set)
        self._end.atexit = False

    @property
    def alive(self) -> bool:
        """Whether it takes calls: a SystemExit in the loop, which is meant for the process, ends it."""
        return self._thread.is_alive()

    def call(self, work: Callable[[], Coroutine[object, object, T]]) -> T:
        """Run ``work()`` on the loop and wait for its result.

        Raises:
            EngineError: this is the loop's own thread, which cannot wait for itself.
            CancelledError: the work was cancelled from within.
        """
        if threading.current_thread() is self._thread:
            raise EngineError("a plain call cannot be made from code that it runs; await the async form there")
        if not threading.current_thread().daemon:
            _callers.add(threading.current_thread())
        done: Future[T] = Future()
        begun: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work())
            begun.append(task)
            self._calls.add(task)
            task.add_done_callback(end)

        def end(task: asyncio.Task[T]) -> None:
            self._calls.discard(task)
            if task.cancelled():
                done.cancel()
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        def give_up() -> None:
            if begun:
                begun[0].cancel()
            else:
                done.cancel()  # interrupted before the loop was even asked

        try:
            self._loop.call_soon_threadsafe(begin)
            return wait_for(done, worth_it=self._thread.is_alive)
        except BaseException:
            if not done.done():  # interrupted: what is cancelled may clean up, until a second interruption
                _call_soon(self._loop, give_up)
                with suppress(Exception):
                    wait_for(done, worth_it=self._thread.is_alive, look_up=False)
            raise

    def close(self) -> None:
        """Wait for the calls under way, and end the loop and its thread."""
        self._end()
        self._thread.join()


def _serve(loop: asyncio.AbstractEventLoop, enough: asyncio.Event, calls: set[asyncio.Task[object]]) -> None:
    async def serve() -> None:
        await enough.wait()
        while calls:
            await asyncio.wait(calls)

    run_to_end(serve(), loop)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and all its tasks have ended
        loop.call_soon_threadsafe(function)


class OwnLoop(ABC):
    """What has plain forms of its async methods: they wait on an event loop of its own, begun when it is needed."""

    _loop_thread: LoopThread | None = None

    @abstractmethod
    def close(self) -> None:
        """Close what the object has, with its last work, and the loop; safe to call twice."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise an error if it takes no calls any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait_for(self, work: Callable[[], Coroutine[object, object, T]]) -> T:
        """Run ``work()`` on the loop and wait for its result."""
        if self._loop_thread is None or not self._loop_thread.alive:
            self._loop_thread = LoopThread()
        return self._loop_thread.call(work)

    def _end_loop(self, last: Callable[[], Coroutine[object, object, None]] | None) -> None:
        """Run the last work, if there is any, and end the loop."""
        if last is not None:
            self._wait_for(last)
        if self._loop_thread is not None:
            self._loop_thread.close()
            self._loop_thread = None


def plain(form: Callable[Concatenate[Owner, P], Coroutine[object, object, T]]) -> Callable[Concatenate[Owner, P], T]:
    """Return the plain form of an async method, which waits for it on the loop of its object."""

    @wraps(form)
    def wait(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with callers_mistake():
            self._check_open()
            return self._wait_for(lambda: form(self, *args, **kwargs))

    wait.__name__ = form.__name__.removeprefix("a")
    wait.__doc__ = f"""Do what :meth:`{form.__name__}` does, from ordinary code and from notebooks alike.

    Ctrl-C cancels what runs and waits until that has ended; a second one does not wait. Other threads may make calls
    meanwhile (``update_weights`` while ``run`` runs).
    """
    return wait


class Closeable(Protocol):
    """Objects that are closed when the interpreter ends, unless they were closed before."""

    def close(self) -> None:
        """Close; safe to call twice."""


_open: weakref.WeakSet[Closeable] = weakref.WeakSet()
# Threads that the interpreter waits for at its end, and that may still make calls.
_callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def close_at_exit(closeable: Closeable) -> None:
    """Close an object before the interpreter ends; until then it may be garbage-collected."""
    _open.add(closeable)


def _close_all() -> None:
    # Threads of executors end only when they are told to, which comes after this.
    waiting = getattr(concurrent.futures.thread, "_threads_queues", ())
    for thread in list(_callers):
        if thread is not threading.main_thread() and thread not in waiting:
            thread.join()
    for closeable in list(_open):
        try:
            closeable.close()
        except Exception:
            logger.exception("what was still open at the interpreter's end could not be closed")


def _forget() -> None:
    """In a forked child there are neither the threads nor the engines of its parent; they are not its to close."""
    _open.clear()
    _callers.clear()


# `atexit` itself comes too late: executors take no work then, and whoever waits for it waits for ever.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
