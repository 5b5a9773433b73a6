"""An asyncio event loop whose clock jumps instead of waiting.

Invariant: virtual time passes only when nothing can run: then the clock jumps to the next timer. Timers of the same
instant fire in the order in which they were set. So a program that only sleeps, waits and computes runs the same way
every time, and a thousand hours take no time. When no event can ever come, :class:`Deadlock` names the tasks that wait;
what goes on for ever is :class:`Endless`.

Work outside the loop has no virtual duration. For a thread (``asyncio.to_thread``) and within ``with loop.external():``
the clock stands until it is done. While a process that asyncio started runs, or a connection is open whose other end is
not on this loop, each jump takes as long as real time would, so an answer comes before the timeout that waits for it;
what is silent for too long (``patience``, :data:`CONNECTION_SECONDS`) is not waited for any longer. What is slower
belongs into ``external()``.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import os
import selectors
import socket
from asyncio.events import TimerHandle
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, TypeVarTuple, Unpack

from fsm_rollout.concurrency.loop_end import INTERRUPTIONS, end_tasks
from fsm_rollout.testing.simulation.source_lines import described, started

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Ready = list[tuple[selectors.SelectorKey, int]]

PATIENCE = 60.0  # real seconds that an operation outside the loop may take before it is given up
CONNECTION_SECONDS = 5.0  # real seconds of silence after which open connections and pipes are waited for no longer
CLEANING_SECONDS = 10_000.0  # virtual seconds that cleaning up may take after a horizon was passed
BUSY_STEPS = 200_000  # steps that the loop may make at one instant before it counts as endless


class Deadlock(RuntimeError):
    """Every task waits for something that cannot happen."""


class Endless(RuntimeError):
    """Something goes on and on: past the horizon, or without time ever passing."""


class LeakedTasks(RuntimeError):
    """The main coroutine returned while tasks it had started were still waiting."""


class _Timer(TimerHandle):
    """A timer that is ordered by when it was set among those of the same instant; a heap alone is not stable."""

    __slots__ = ("_key",)
    _counter = itertools.count()

    def __init__(self, when: float, *args: Any) -> None:
        super().__init__(when, *args)
        self._key = (when, next(self._counter))

    def __lt__(self, other: _Timer) -> bool:  # type: ignore[override]  # a loop has timers of this class only
        return self._key < other._key


class _Selector(selectors.DefaultSelector):
    """The real selector, except that the loop decides how it waits."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Ready:
        busy = timeout is not None and timeout <= 0
        self._loop._count_step(busy)
        return self.rest(0) or ([] if busy else self._loop._wait())

    def rest(self, seconds: float) -> Ready:
        return super().select(seconds)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module. ``time()`` starts at 0.0; ``patience`` is in real seconds, ``horizon`` in virtual ones.

    It uses four private names of asyncio's own loop (the heap ``_scheduled``, its mark on a timer,
    ``_clock_resolution``, ``_make_subprocess_transport``), which are as old as asyncio; the tests would notice.
    """

    _scheduled: list[TimerHandle]

    def __init__(self, patience: float = PATIENCE, horizon: float = math.inf) -> None:
        self._now = 0.0
        self._patience, self._horizon = patience, horizon
        self.outside = 0  # how many operations outside the loop are in flight
        self._steps = self._steps_now = 0
        self._stop_when_idle = self._resting = False
        self._processes: list[asyncio.SubprocessTransport] = []
        # Real seconds that processes and connections have been waited for since one was last heard of.
        self._silence = 0.0
        self._selects = _Selector(self)
        super().__init__(self._selects)
        self._own = set(self._selects.get_map())  # the pipe by which threads wake the loop
        self._threads: ThreadPoolExecutor | None = None
        self._advance(0.0)

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._now

    @property
    def beat(self) -> int | None:
        """Steps made so far; ``None`` while the loop rests because something outside is in flight."""
        return None if self._resting else self._steps

    @contextmanager
    def external(self) -> Iterator[None]:
        """Hold the clock while the block runs: what it awaits happens outside the loop and will call back."""
        self.outside += 1
        try:
            yield
        finally:
            self.outside -= 1

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> TimerHandle:
        """Set a timer, as asyncio's loop does, with a stable order."""
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Make a task, as asyncio's loop does, and remember which line asked for it."""
        return started(coro, partial(super().create_task, coro, **kwargs))

    def complaints(self) -> list[str]:
        """Return a list that grows by what fails with nobody to hear of it: callbacks, tasks; nothing is logged."""
        found: list[str] = []

        def note(_: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
            error = context.get("exception")
            found.append(f"{context.get('message')}{'' if error is None else f': {type(error).__name__}: {error}'}")

        self.set_exception_handler(note)
        return found

    # -- what happens outside -----------------------------------------------------------------------------------

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run ``func`` in a thread and hold the clock until that thread is done, even when the future is cancelled."""
        if executor is None:
            executor = self._threads = self._threads or ThreadPoolExecutor(thread_name_prefix="virtual-time")
            self.set_default_executor(self._threads)
        job: Future[T] = executor.submit(func, *args)
        future = asyncio.wrap_future(job, loop=self)
        self.outside += 1

        def release() -> None:
            self.outside -= 1

        def done(_: object) -> None:
            with suppress(RuntimeError):  # the loop was closed while the thread ran on
                self.call_soon_threadsafe(release)

        job.add_done_callback(done)  # after wrap_future's own: the result must be under way before the clock may go
        return future

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        """Join the threads, if there are any; that happens outside (asyncio starts a thread to do so)."""
        with self.external():
            await super().shutdown_default_executor(*args, **kwargs)

    async def _make_subprocess_transport(self, *args: object, **kwargs: object) -> asyncio.SubprocessTransport:
        """Start a process, as asyncio's loop does, and remember that it runs."""
        with self.external():  # being cancelled here, it waits for the process's end
            transport: asyncio.SubprocessTransport = await super()._make_subprocess_transport(*args, **kwargs)  # type: ignore[misc]
        # Those that run, or have something to say that was not read.
        self._processes = [process for process in self._processes if _runs(process) or not process.is_closing()] + [
            transport
        ]
        return transport

    def close(self) -> None:
        """Close the loop, and end the processes that were left: their end needs a loop that still runs."""
        for process in self._processes:
            process.close()
        while any(map(_runs, self._processes)) and self._rest(self._patience):
            self.run_until_idle()
        if self._processes:
            self.run_until_idle()
        super().close()

    # -- how time passes ----------------------------------------------------------------------------------------

    def run_until_idle(self) -> None:
        """Run what can run without time passing: until every task is done or waits."""
        self._stop_when_idle = True
        try:
            self.run_forever()
        finally:
            self._stop_when_idle = False

    def _count_step(self, busy: bool) -> None:
        self._steps += 1
        self._steps_now += busy and not self.outside
        if self._steps_now > BUSY_STEPS:
            self._steps_now = 0
            raise Endless(
                f"{BUSY_STEPS:,} steps of the loop at {self._now:g} s, and time never passes: something is ready "
                f"again each time it has run (a loop around sleep(0)?).{self._who_waits()}"
            )

    def _advance(self, when: float) -> None:
        if when > self._horizon:
            self._horizon = when + CLEANING_SECONDS  # what cleans up afterwards may take some time, not for ever
            raise Endless(f"the run is not over, and its next event is at {when:g} s.{self._who_waits()}")
        self._now = when
        self._steps_now = 0
        # asyncio fires timers with when < now + resolution: the next float, so exactly those with when <= now, and at
        # least one of them however large the clock has become.
        self._clock_resolution = math.ulp(when)

    def _wait(self) -> Ready:
        """Do what is to be done when no callback is ready: wait for what is outside, stop, or jump."""
        if self.outside:
            if events := self._rest(self._patience):
                return events
            raise Deadlock(
                f"{self.outside} operation(s) outside the loop did not call back within {self._patience:g} s of "
                f"real time; their virtual duration is 0, so no timeout can end them.{self._who_waits()}"
            )
        if self._stop_when_idle:
            self.stop()
        elif events := self._listen():
            return events
        elif self._scheduled:
            self._advance(max(self._now, self._scheduled[0].when()))
        else:
            raise Deadlock(
                f"nothing can happen any more at {self._now:g} s: no callback is ready, no timer is set, and no "
                f"operation outside the loop is in flight.{self._who_waits()}"
            )
        return []

    def _listen(self) -> Ready:
        """Give processes and connections the time until the next timer to say something."""
        if any(map(_runs, self._processes)):
            patience = self._patience
        elif connections := [ends for fd in self._selects.get_map() if fd not in self._own and (ends := _ends(fd))]:
            patience = min(self._patience, CONNECTION_SECONDS)
            if self._scheduled and not {there for _, there in connections} - {here for here, _ in connections}:
                return []  # with itself: what one end has sent is with the other by now
        else:
            return []
        seconds = patience  # with no timer there is nothing else that could happen
        if self._scheduled:
            seconds = min(self._scheduled[0].when() - self._now, patience - self._silence)
        if seconds <= 0:
            return []
        events = self._rest(seconds)
        self._silence = 0.0 if events else self._silence + seconds
        return events

    def _rest(self, seconds: float) -> Ready:
        """Wait in real time, and say so (:attr:`beat`)."""
        self._resting = True
        try:
            return self._selects.rest(seconds)
        finally:
            self._resting = False

    def _who_waits(self) -> str:
        return f" Waiting:{''.join(tasks)}" if (tasks := self.tasks_left()) else " No task is left."

    def tasks_left(self) -> list[str]:
        """Return a line for each task that has not ended."""
        return sorted(f"\n  {described(task)}" for task in asyncio.all_tasks(self))


def _runs(process: asyncio.SubprocessTransport) -> bool:
    return process.get_returncode() is None


def _ends(file: FileDescriptorLike) -> tuple[object, object] | None:
    """Return the addresses of a descriptor's two ends; ``None``: it only waits for connections, and owes nothing."""
    try:
        with socket.socket(fileno=os.dup(file if isinstance(file, int) else file.fileno())) as seen:
            if seen.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            return seen.getsockname(), seen.getpeername() or "unnamed"
    except OSError:  # a pipe
        return file, "unknown"


def run_virtual(
    main: Coroutine[object, object, T],
    *,
    patience: float = PATIENCE,
    leaks: Literal["raise", "ignore"] = "raise",
    loop: VirtualTimeLoop | None = None,
) -> T:
    """Run ``main`` to its end in virtual time and return its result, as :func:`asyncio.run` does.

    Tasks left over are cancelled. A task counts as leaked when it still waits after everything that can run without
    time passing has run; ``leaks="ignore"`` lets that be.

    Args:
        main: a coroutine.
        patience: real seconds that an operation outside the loop (a thread) may take.
        leaks: what to do about tasks that outlive ``main``.
        loop: the loop to run on, and to close; default: a new one.

    Raises:
        Deadlock: every task waits for something that cannot happen.
        Endless: ``main`` goes on past the loop's horizon, or without time ever passing.
        LeakedTasks: ``main`` returned and left tasks waiting.
    """
    loop = loop or VirtualTimeLoop(patience)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            result = runner.run(main)
        except INTERRUPTIONS as interruption:
            end_tasks(loop, None, interruption)
            raise
        loop.run_until_idle()
        count, leaked = len(asyncio.all_tasks(loop)), loop.tasks_left()
    if leaked and leaks == "raise":
        raise LeakedTasks(
            f"{count} task(s) outlived the main coroutine; await or cancel them before it returns:{leaked}"
        )
    return result
