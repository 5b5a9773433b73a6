"""Running code that is not ours, so that it can neither block the loop nor outlive its time.

Invariants: sync code runs in a thread of its own, a daemon, so one that never returns keeps neither the event loop nor
the interpreter's exit waiting; what is given up and runs on is counted (:class:`Leftovers`). Whatever code raises comes
back as an exception of the call, never as a cancellation of ours or an end of the process; only a KeyboardInterrupt
raised on the loop's own thread goes through.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from fsm_rollout.concurrency.threads import DaemonThreads

T = TypeVar("T")

STOP_SECONDS = 5.0
"""How long cancelled code may take to clean up before it is left alone."""

_logger = logging.getLogger(__name__)


class Expired(Exception):
    """The code did not end within the time it was given. Not a TimeoutError: code may raise those of its own."""


class ToolDied(Exception):
    """The process that ran a tool ended without an answer, or the call could not be sent to it."""


class Leftovers:
    """What still runs of some code: threads, and async code that refused to stop. Truthy while there is any."""

    def __init__(self) -> None:
        self._count = 0
        self.then: Callable[[], object] | None = None
        """Called when the last of it has ended."""

    def __bool__(self) -> bool:
        return self._count > 0

    def begin(self) -> None:
        """Count one more."""
        self._count += 1

    def end(self, _: object = None) -> None:
        """Count one less."""
        self._count -= 1
        if not self._count and self.then is not None:
            then, self.then = self.then, None
            then()


_threads = DaemonThreads("fsm-rollout-tool")
LEFTOVERS: contextvars.ContextVar[Leftovers | None] = contextvars.ContextVar("leftovers", default=None)
"""Who counts what the present code begins and does not end."""


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling ``function`` gives a coroutine (a function, a method, a partial, or an object with __call__)."""
    if isinstance(function, type):  # calling a class makes an instance, whatever its __call__ is
        return False
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def invoke(function: Callable[..., Any], arguments: Mapping[str, object]) -> Any:
    """Call ``function(**arguments)``: async code here, sync code in a thread; return its result or raise its error.

    A sync function that returns an awaitable (a decorated async one, say) has it awaited.
    """
    if is_async(function):
        return await _awaited(function(**arguments))
    loop, leftovers = asyncio.get_running_loop(), LEFTOVERS.get()
    context = contextvars.copy_context()

    def work() -> tuple[object, BaseException | None]:
        try:
            return context.run(function, **arguments), None
        except BaseException as error:  # raised again in the caller's task
            return None, error
        finally:
            if leftovers is not None:
                with suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(leftovers.end)

    job = loop.run_in_executor(_threads, work)
    if leftovers is not None:
        leftovers.begin()
    result, error = await job
    if error is not None:
        try:
            # Raised here, these would end the process or look like our own cancellation.
            if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit | asyncio.CancelledError):
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            raise error
        finally:
            del error  # a frame that holds an exception that holds the frame
    return await _awaited(result) if inspect.isawaitable(result) else result


async def _awaited(work: Awaitable[T]) -> T:
    """Await ``work``; a SystemExit would leave the task, and end the loop."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


async def bounded(
    work: Coroutine[object, object, T], seconds: float | None, *, name: str, stop_seconds: float | None = STOP_SECONDS
) -> T:
    """Await ``work`` for at most ``seconds``.

    When time is up, or when the caller is cancelled, ``work`` is cancelled and has ``stop_seconds`` to clean up; work
    that refuses to stop is left running and logged, so it holds up nobody. Threads are left running at once.

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


async def _stop(task: asyncio.Task[T], seconds: float | None) -> None:
    task.cancel()
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # else logged as never retrieved
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        _logger.warning("%s did not stop within %s s of being cancelled; it is left running", task.get_name(), seconds)
        if (leftovers := LEFTOVERS.get()) is not None:
            leftovers.begin()
            task.add_done_callback(leftovers.end)
