"""An asyncio event loop whose clock jumps instead of waiting.

Invariant: virtual time passes only when nothing can run. While a callback is ready the clock stands; when none is, it
jumps to the next timer. So a program that only sleeps, waits and computes runs the same way every time, however loaded
the machine is, and a thousand hours take no time.

Work outside the loop (threads, other processes) has no virtual duration. The loop knows of an operation outside when
it went through ``run_in_executor`` (hence ``asyncio.to_thread``), until its thread has really ended, or when it is
inside a ``with loop.external():`` block. While any is in flight the loop waits for it in real time and the clock
stands. File descriptors are polled before each jump. While a process that asyncio started runs, or a connection or a
pipe is open, each jump is made no faster than real time would pass, so that an answer from there comes before the
timeout that waits for it; but what is silent for too long is not waited for any longer (``patience`` for processes,
:data:`CONNECTION_SECONDS` for descriptors: both ends of a connection may be on this loop). Code that expects an answer
from something slower puts its wait inside ``external()``.

When nothing is ready, no timer is set and nothing is in flight outside, no event can ever come: :class:`Deadlock` is
raised and names the tasks that wait. What goes on for ever (time passes beyond a ``horizon``, or callbacks follow one
another and time never passes) is :class:`Endless`. Timers set for the same instant fire in the order in which they were
set.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
import socket
from asyncio.events import TimerHandle
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context
from typing import TYPE_CHECKING, Any, Literal, TypeVar, TypeVarTuple, Unpack, cast
from weakref import WeakKeyDictionary

from fsm_rollout.testing.simulation import source_lines as places

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PATIENCE = 60.0
"""Real seconds that an operation outside the loop may take before it is given up."""
CONNECTION_SECONDS = 5.0
"""Real seconds of silence after which open connections and pipes are waited for no longer."""
CLEANING_SECONDS = 10_000.0
"""Virtual seconds that cleaning up may take after a horizon was passed."""
BUSY_STEPS = 200_000
"""Steps that the loop may make at one instant before it counts as endless."""


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

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._key = (self._when, next(self._counter))  # type: ignore[attr-defined]  # asyncio's own, set for good

    def __lt__(self, other: _Timer) -> bool:  # type: ignore[override]  # a loop has timers of this class only
        return self._key < other._key


class _Selector(selectors.BaseSelector):
    """The real selector, except that waiting for a timer is left to the loop's ``_wait``."""

    def __init__(
        self,
        wait: Callable[[selectors.BaseSelector], list[tuple[selectors.SelectorKey, int]]],
        step: Callable[[bool], None],
    ) -> None:
        self._real = selectors.DefaultSelector()
        self._wait = wait
        self._step = step

    def register(self, fileobj: FileDescriptorLike, events: int, data: object = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: FileDescriptorLike, events: int, data: object = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Poll; and when the loop has nothing else to do (``timeout`` is not 0), wait its way."""
        busy = timeout is not None and timeout <= 0
        self._step(busy)
        return self._real.select(0) or ([] if busy else self._wait(self._real))

    def select_really(self, seconds: float) -> bool:
        """Wait in real time until there is something to select."""
        return bool(self._real.select(seconds))

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module. ``time()`` starts at 0.0; ``patience`` is in real seconds, ``horizon`` in virtual ones.

    It reaches into three private names of asyncio's own loop (``_scheduled``, the heap of timers, its mark on a timer,
    and ``_clock_resolution``), which have not changed since Python 3.4; the tests would notice.
    """

    _scheduled: list[TimerHandle]

    def __init__(self, patience: float = PATIENCE, horizon: float = math.inf) -> None:
        self._now = 0.0
        self._outside = 0
        self._patience = patience
        self._horizon = horizon
        self._stop_when_idle = False
        self._threaded = False
        self._steps = self._steps_now = 0
        self._resting = False
        self._processes: list[asyncio.SubprocessTransport] = []
        self._silence = 0.0
        """Real seconds that processes and connections have been waited for since one was last heard of."""
        self._waits = _Selector(self._wait, self._step)
        super().__init__(self._waits)
        self._own = set(self._waits.get_map())  # the pipe by which threads wake the loop
        self._advance(0.0)
        self._threads = ThreadPoolExecutor(thread_name_prefix="virtual-time")
        self.set_default_executor(self._threads)

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._now

    @property
    def beat(self) -> int | None:
        """Steps made so far; ``None`` while the loop rests because something outside is in flight."""
        return None if self._resting else self._steps

    @property
    def outside(self) -> int:
        """How many operations outside the loop are in flight."""
        return self._outside

    @contextmanager
    def external(self) -> Iterator[None]:
        """Hold the clock while the block runs: what it awaits happens outside the loop and will call back."""
        self._outside += 1
        try:
            yield
        finally:
            self._outside -= 1

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> TimerHandle:
        """Set a timer, as asyncio's loop does, with a stable order."""
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run ``func`` in a thread and hold the clock until that thread is done, even when the future is cancelled."""
        self._threaded = self._threaded or executor is None
        job: Future[T] = (executor or self._threads).submit(func, *args)
        future = asyncio.wrap_future(job, loop=self)
        self._outside += 1

        def release(_: object) -> None:
            with suppress(RuntimeError):  # the loop was closed while the thread ran on
                self.call_soon_threadsafe(self._release)

        job.add_done_callback(release)  # after wrap_future's own: the result must be under way before the clock may go
        return future

    def _release(self) -> None:
        self._outside -= 1

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> tuple[asyncio.SubprocessTransport, Any]:
        """Start a process, as asyncio's loop does, and remember that it runs."""
        with self.external():  # being cancelled here, it waits for the process's end
            transport, protocol = await super().subprocess_exec(*args, **kwargs)
        self._processes = [*filter(_matters, self._processes), transport]
        return transport, protocol

    async def subprocess_shell(self, *args: Any, **kwargs: Any) -> tuple[asyncio.SubprocessTransport, Any]:
        """Start a shell, as asyncio's loop does, and remember that it runs."""
        with self.external():
            transport, protocol = await super().subprocess_shell(*args, **kwargs)
        self._processes = [*filter(_matters, self._processes), transport]
        return transport, protocol

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Make a task, as asyncio's loop does, and remember which line asked for it."""
        task: asyncio.Task[Any] = super().create_task(coro, **kwargs)
        if (line := places.caller()) is not None:
            _started[task] = line
        return task

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        """Join the threads, if there are any; that happens outside (asyncio starts a thread to do so)."""
        if self._threaded:
            with self.external():
                await super().shutdown_default_executor(*args, **kwargs)

    def close(self) -> None:
        """Close the loop, and end the processes that were left: their end needs a loop that still runs."""
        left = [*filter(_matters, self._processes)]
        for process in left:
            process.close()
        if left:
            self.run_until_idle()
        while any(map(_runs, left)) and self._waits.select_really(self._patience):
            self.run_until_idle()
        self._processes.clear()
        super().close()

    def run_until_idle(self) -> None:
        """Run what can run without time passing: until every task is done or waits."""
        self._stop_when_idle = True
        try:
            self.run_forever()
        finally:
            self._stop_when_idle = False

    def _step(self, busy: bool) -> None:
        self._steps += 1
        if busy and not self._outside:
            self._steps_now += 1
            if self._steps_now > BUSY_STEPS:
                self._steps_now = 0
                raise Endless(
                    f"{BUSY_STEPS:,} steps of the loop at {self._now:g} s, and time never passes: something is ready "
                    f"again each time it has run (a loop around sleep(0)?).{_waiting(self)}"
                )

    def _advance(self, when: float) -> None:
        if when > self._horizon:
            self._horizon = when + CLEANING_SECONDS  # what cleans up afterwards may take some time, not for ever
            raise Endless(f"the run is not over, and its next event is at {when:g} s.{_waiting(self)}")
        self._now = when
        self._steps_now = 0
        # asyncio fires timers with when < now + resolution: the next float, so exactly those with when <= now, and at
        # least one of them however large the clock has become.
        self._clock_resolution = math.ulp(when)

    def _wait(self, real: selectors.BaseSelector) -> list[tuple[selectors.SelectorKey, int]]:
        if self._outside:
            events = self._rest(real, self._patience)
            if not events:
                raise Deadlock(
                    f"{self._outside} operation(s) outside the loop did not call back within {self._patience:g} s of "
                    f"real time; their virtual duration is 0, so no timeout can end them.{_waiting(self)}"
                )
            return events
        if self._stop_when_idle:
            self.stop()
        elif events := self._heard(real):
            return events
        elif self._scheduled:
            self._advance(max(self._now, self._scheduled[0].when()))
        else:
            raise Deadlock(
                f"nothing can happen any more at {self._now:g} s: no callback is ready, no timer is set, and no "
                f"operation outside the loop is in flight.{_waiting(self)}"
            )
        return []

    def _rest(self, real: selectors.BaseSelector, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait in real time, and say so (:attr:`beat`)."""
        self._resting = True
        try:
            return real.select(seconds)
        finally:
            self._resting = False

    def _heard(self, real: selectors.BaseSelector) -> list[tuple[selectors.SelectorKey, int]]:
        """Give processes and connections the time until the next timer to say something."""
        if any(map(_runs, self._processes)):
            most = self._patience
        elif any(fd not in self._own and not _listens(fd) for fd in real.get_map()):
            most = min(self._patience, CONNECTION_SECONDS)
        else:
            return []
        seconds = most  # with no timer there is nothing else that could happen
        if self._scheduled:
            seconds = min(self._scheduled[0].when() - self._now, most - self._silence)
            if seconds <= 0:
                return []
        events = self._rest(real, seconds)
        self._silence = 0.0 if events else self._silence + seconds
        return events


def _runs(process: asyncio.SubprocessTransport) -> bool:
    return process.get_returncode() is None


def _matters(process: asyncio.SubprocessTransport) -> bool:
    """Whether it runs, or has something to say that was not read."""
    return _runs(process) or not process.is_closing()


def _listens(fd: FileDescriptorLike) -> bool:
    """Whether a descriptor only waits for connections to come: nothing is owed to anybody there."""
    try:
        seen = socket.socket(fileno=fd if isinstance(fd, int) else fd.fileno())
    except OSError:  # a pipe
        return False
    try:
        return bool(seen.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    finally:
        seen.detach()


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
    with asyncio.Runner(loop_factory=lambda: loop or VirtualTimeLoop(patience)) as runner:
        result = runner.run(main)
        loop = cast(VirtualTimeLoop, runner.get_loop())
        loop.run_until_idle()
        leaked = _list(asyncio.all_tasks(loop))
    if leaked and leaks == "raise":
        raise LeakedTasks(
            f"{len(leaked)} task(s) outlived the main coroutine; await or cancel them before it returns:"
            + "".join(f"\n  {task}" for task in leaked)
        )
    return result


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    tasks = _list(asyncio.all_tasks(loop))
    return " Waiting:" + "".join(f"\n  {task}" for task in tasks) if tasks else " No task is left."


def _list(tasks: Iterable[asyncio.Task[object]]) -> list[str]:
    return sorted(described(task) for task in tasks)


_started: WeakKeyDictionary[asyncio.Task[object], str] = WeakKeyDictionary()
"""Where each task of a virtual loop was asked for."""


def described(task: asyncio.Task[object]) -> str:
    """Return what to call a task in a message: its name, where it waits, or else where it was started."""
    return places.described(task, _started.get(task))
