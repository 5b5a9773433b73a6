"""Running code that is not ours, so that it can neither block the loop nor outlive its time.

Invariants: sync code runs in a thread of its own, a daemon, so one that never returns keeps neither the event loop nor
the interpreter's exit waiting (the pools of ``concurrent.futures`` are joined at exit). Whatever code raises comes
back as an exception of the call, never as a cancellation of ours; only KeyboardInterrupt, and SystemExit raised on
the loop's own thread, go through: they are meant for the process.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

STOP_SECONDS = 5.0
"""How long cancelled code may take to clean up before it is left alone."""

_logger = logging.getLogger(__name__)


class Expired(Exception):
    """The code did not end within the time it was given. Not a TimeoutError: code may raise those of its own."""


class _DaemonThreads(Executor):
    """One daemon thread per job. An executor, because event loops know how to wait for those."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``function`` in a new thread."""
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(function(*args, **kwargs))

        threading.Thread(target=work, name="fsm-rollout-tool", daemon=True).start()
        return future


_threads = _DaemonThreads()


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling ``function`` gives a coroutine (a function, a method, a partial, or an object with __call__)."""
    if isinstance(function, type):  # calling a class makes an instance, whatever its __call__ is
        return False
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def invoke(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call ``function(**arguments)``: async code here, sync code in a thread; return its result or raise its error.

    A sync function that returns an awaitable (a decorated async one, say) has it awaited.
    """
    if is_async(function):
        return await function(**arguments)
    context = contextvars.copy_context()

    def work() -> tuple[Any, BaseException | None]:
        try:
            return context.run(function, **arguments), None
        except BaseException as error:
            return None, error

    result, error = await asyncio.get_running_loop().run_in_executor(_threads, work)
    if error is not None:
        try:
            # Raised here, these would end the process or look like our own cancellation.
            if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit | asyncio.CancelledError):
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            raise error
        finally:
            del error  # a frame that holds an exception that holds the frame
    return await result if inspect.isawaitable(result) else result


async def bounded(
    work: Coroutine[Any, Any, T], seconds: float | None, *, name: str, stop_seconds: float | None = STOP_SECONDS
) -> T:
    """Await ``work`` for at most ``seconds``.

    When time is up, or when the caller is cancelled, ``work`` is cancelled and has ``stop_seconds`` to clean up; work
    that refuses to stop is left running and logged, so it holds up nobody.

    Raises:
        Expired: time was up.
        RuntimeError: the work cancelled itself.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _stop(task, stop_seconds)
        raise
    if not task.done():
        await _stop(task, stop_seconds)
        raise Expired
    if task.cancelled():
        raise RuntimeError("CancelledError: it was cancelled from within")
    return task.result()


async def _stop(task: asyncio.Task[Any], seconds: float | None) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        _logger.warning("%s did not stop within %s s of being cancelled; it is left running", task.get_name(), seconds)
        task.add_done_callback(_look_at)
    else:
        _look_at(task)


def _look_at(task: asyncio.Task[Any]) -> None:
    """Take note of a task's exception, which else would be logged as never retrieved."""
    if not task.cancelled():
        task.exception()
