"""Running code that is not ours, so that it can neither block the loop nor outlive its time.

Invariants: sync code runs in a thread that does nothing else meanwhile, a daemon, so code that never returns keeps
neither the event loop nor the interpreter's exit waiting; what is given up and runs on keeps its slot (:class:`Slots`).
Whatever code raises comes back as an exception of the call, never as a cancellation of ours or an end of the process;
only a KeyboardInterrupt raised on the loop's own thread goes through.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from fsm_rollout.concurrency.step_timing import watch_steps
from fsm_rollout.concurrency.threads import DaemonThreads

T = TypeVar("T")

STOP_SECONDS = 5.0  # how long cancelled code may take to clean up before it is left alone

_logger = logging.getLogger(__name__)
_threads = DaemonThreads("fsm-rollout-tool")
_blocking: set[str] = set()  # the functions that were logged for keeping the event loop
# The slot that the present code runs in.
_slot: contextvars.ContextVar[_Slot | None] = contextvars.ContextVar("slot", default=None)


class Expired(TimeoutError):
    """The code did not end within its time. A class of its own: code may raise a TimeoutError too."""


class ToolDied(Exception):
    """The process that ran a tool ended without an answer, or the call could not be sent to it."""


class RaisedElsewhere(Exception):
    """What a tool raised in another process, in words: ``names`` are those of its class and of that class's bases."""

    def __init__(self, names: Sequence[str], message: str, place: str) -> None:
        # `place`: where in the tool's code, as `file.py:line, in function`; empty where it is not known.
        self.names, self.place = tuple(names), place
        super().__init__(message)


class NoSlot(TimeoutError):
    """Every slot is held by a call that was given up and still runs."""


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling ``function`` gives a coroutine (a function, a method, a partial, or an object with __call__)."""
    if isinstance(function, type):  # calling a class makes an instance, whatever its __call__ is
        return False
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def invoke(function: Callable[..., Any], arguments: Mapping[str, object]) -> Any:
    """Call ``function(**arguments)``, sync code in a thread; return its result (awaited, if it can be) or raise."""
    return await call_of(function)(function, arguments)


def call_of(function: Callable[..., Any]) -> Callable[[Callable[..., Any], Mapping[str, object]], Awaitable[Any]]:
    """Return what calls ``function`` as :func:`invoke` does, for who calls it often: to find that out takes a while."""
    return _call_here if is_async(function) else _call_in_thread


async def _call_here(function: Callable[..., Any], arguments: Mapping[str, object]) -> Any:
    return await _awaited(function(**arguments), function)


async def _call_in_thread(function: Callable[..., Any], arguments: Mapping[str, object]) -> Any:
    loop, slot, context = asyncio.get_running_loop(), _slot.get(), contextvars.copy_context()

    def work() -> tuple[object, BaseException | None]:
        try:
            return context.run(function, **arguments), None
        except BaseException as error:  # raised again in the caller's task
            return None, error
        finally:
            if slot is not None:
                with suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(slot.leave)

    if slot is not None:
        slot.users += 1
    result, error = await loop.run_in_executor(_threads, work)
    if error is not None:
        try:
            # Raised here, these would end the process or look like our own cancellation.
            if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit | asyncio.CancelledError):
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            raise error
        finally:
            del error  # a frame that holds an exception that holds the frame
    return await _awaited(result, function) if inspect.isawaitable(result) else result


async def _awaited(work: Awaitable[T], function: Callable[..., object]) -> T:
    """Await what ``function`` gave and log it if it blocks the loop; a SystemExit would end the loop."""
    try:
        if not inspect.iscoroutine(work):
            return await work
        return await watch_steps(work, partial(_warn_of_blocking, function))
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


def _warn_of_blocking(function: Callable[..., object], seconds: float) -> None:
    while isinstance(function, partial):
        function = function.func
    name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    level = logging.INFO if name in _blocking else logging.WARNING  # only the first of many alike is a warning
    _blocking.add(name)
    advice = "write it as a plain `def`, which runs in a thread, or use asyncio.to_thread"
    _logger.log(level, "'%s' kept the event loop for %.1f s, and all else waited; %s", name, seconds, advice)


async def bounded(
    work: Coroutine[object, object, T], seconds: float | None, *, name: str, stop_seconds: float | None = STOP_SECONDS,
    waits: bool = False,
) -> T:  # fmt: skip
    """Await ``work`` for at most ``seconds``; ``waits``: it is known to wait, for a thread.

    When time is up, or when the caller is cancelled, ``work`` is cancelled and has ``stop_seconds`` to clean up; work
    that refuses to stop is left running and logged, so it holds up nobody. Threads are left running at once.

    Raises:
        Expired: time was up.
        RuntimeError: the work cancelled itself.
    """
    loop = asyncio.get_running_loop()
    begun, task = loop.time(), loop.create_task(work, name=name)
    try:
        if not waits:
            await asyncio.sleep(0)  # in this pass of the loop it runs to its first wait, and many have no wait
        if not task.done():
            await asyncio.wait({task}, timeout=None if seconds is None else begun + seconds - loop.time())
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
        if (slot := _slot.get()) is not None:
            slot.users += 1
            task.add_done_callback(slot.leave)


class Slots:
    """The slots of the tool ``name`` on one event loop: at most ``limit`` of its calls run at once.

    A slot is held as long as anything of its call runs. A call that is given up can leave a thread behind, which Python
    cannot stop (or async code that refuses to); its slot comes back when that ends, and not before. So a tool that
    hangs for good loses its slots one by one.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self.free = asyncio.Semaphore(limit)
        self._lost = 0  # slots of calls that were given up and still run
        # The timeouts of those who wait, with their seconds; they run only while every slot is lost.
        self._waiting: dict[asyncio.Timeout, float] = {}

    @asynccontextmanager
    async def hold(self, seconds: float | None) -> AsyncIterator[None]:
        """Hold a slot, after waiting for one. ``seconds`` after all of them are lost NoSlot is raised."""
        # 1. Wait for a slot, if none is free.
        if self.free.locked() and seconds is not None:
            await self._wait(seconds)
        else:
            await self.free.acquire()
        # 2. Let what the call begins count itself among the slot's users.
        slot = _Slot(self)
        token = _slot.set(slot)
        try:
            yield
        finally:
            _slot.reset(token)
            slot.lost = slot.users > 1
            if slot.lost:
                self.lose(1)
            slot.leave()

    async def _wait(self, seconds: float) -> None:
        when = asyncio.get_running_loop().time() + seconds if self._lost == self._limit else None
        try:
            async with asyncio.timeout_at(when) as timeout:
                self._waiting[timeout] = seconds
                try:
                    await self.free.acquire()
                finally:
                    del self._waiting[timeout]
        except TimeoutError:
            raise NoSlot from None

    def lose(self, change: int) -> None:
        """Note that so many more slots are lost, and with all of them lost let the time of those who wait run."""
        were_all_lost = self._lost == self._limit
        self._lost += change
        all_lost = self._lost == self._limit
        if all_lost == were_all_lost:
            return
        if all_lost:
            _logger.warning(
                "all %d slots of tool '%s' are held by calls that were given up and still run", self._limit, self._name
            )
        now = asyncio.get_running_loop().time()
        for timeout, seconds in self._waiting.items():
            if not timeout.expired():
                timeout.reschedule(now + seconds if all_lost else None)


class _Slot:
    """A slot that is held: by its call, and by what a call that was given up has left running."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.users = 1
        self.lost = False

    def leave(self, _: object = None) -> None:
        """Count one user less; the last one gives the slot back."""
        self.users -= 1
        if not self.users:
            if self.lost:
                self.slots.lose(-1)
            self.slots.free.release()
