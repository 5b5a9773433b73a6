"""The detector of a blocked event loop for code under test: it names the line that keeps the thread, and ends the run.

Invariant: code that is watched does exactly what it does unwatched, unless it stops the loop. A call that is known to
wait (``time.sleep``, a blocking connection, the end of a process) is refused where it is made, however short the wait
would have been. What may or may not wait (a lock, a queue) is interrupted once it does, and anything else (a
computation without end) after :data:`BLOCKING_SECONDS`. How slow a machine is makes no fault: what computes is measured
in CPU seconds, and imports are left alone (interrupting one would leave half a module).

:mod:`fsm_rollout.concurrency.step_timing` says who else looks for blocked loops.
"""

from __future__ import annotations

import linecache
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakSet

from fsm_rollout.testing.simulation.source_lines import is_users, place

_Process = subprocess.Popen[Any]

# Seconds that one callback may keep the event loop, computing or waiting, before it counts as blocking.
BLOCKING_SECONDS = 5.0
GLANCE_SECONDS = 0.1  # real seconds between two looks at what the loop is doing
STILL = 2  # looks in a row that must see a callback wait in the very same call: so many glances, it has waited
STILL_CPU_SECONDS = 0.002  # CPU seconds between two looks from which on it computes, however slowly, instead of waiting
# Lines in which a thread may wait: for locks, queues, threads, connections and processes.
_WAITS = re.compile(
    r"\b(accept|acquire|communicate|connect|flock|get|join|lockf|poll|recv|recv_into|recvfrom|result|select|sendall"
    r"|sleep|wait|wait_for|waitpid)\(|^with [\w.]+\b(?!\()"
)
# Python's own audit events that mean waiting in the thread that raises them.
_REFUSED_EVENTS: Mapping[str, Callable[[Any], str | None]] = {
    "socket.connect": lambda args: None if args[0].gettimeout() == 0 else f"a blocking connection to {args[1]!r}",
    "socket.getaddrinfo": lambda args: f"a blocking look-up of {args[0]!r}",
    "os.system": lambda args: "os.system()",
    "builtins.input": lambda args: "input()",
}


@dataclass(frozen=True, slots=True)
class Blockage:
    """One place where the event loop was stopped."""

    where: str  # `file:line, in function`
    call: str | None  # the call that waits, or the line that makes it, where that is known
    refused: bool = False  # whether the call was refused before it could wait; else the run was interrupted in it


class CallRefused(RuntimeError):
    """Raised in the place of a call that would block the event loop."""


class LoopInterrupted(KeyboardInterrupt):
    """Ends a run whose loop is blocked. Of this kind because no ordinary ``except`` and no task may keep it."""


class _Watch:
    """What has been seen of one thread's loop."""

    def __init__(self, beats: Callable[[], int | None], seconds: float) -> None:
        self.found: list[Blockage] = []
        # Those whose end was not waited for; `subprocess.run` kills such a one and waits again, rightly.
        self.processes: WeakSet[_Process] = WeakSet()
        self._beats, self._seconds = beats, seconds
        self._last: tuple[int | None, object, float] = (None, None, 0.0)
        self._still, self._kept = 0, 0.0

    def refuse(self, call: str) -> None:
        """Raise for a call that waits."""
        frame = sys._getframe()
        if not _is_importing(frame):
            self.found.append(Blockage(place(frame), call, refused=True))
            raise CallRefused(f"{call} would block the event loop; await something, or use a thread")

    def glance(self, number: int, frame: FrameType | None) -> None:
        """Look at what the thread is doing, called by an alarm; raise if that keeps the loop."""
        last_beat, last_call, last_cpu = self._last
        beat, call, cpu = self._last = self._beats(), frame and (id(frame), frame.f_lasti), time.thread_time()
        if beat is None or beat != last_beat or frame is None:
            self._still, self._kept = 0, 0.0
            return
        computed = cpu - last_cpu
        self._still = self._still + 1 if call == last_call and computed < STILL_CPU_SECONDS else 0
        self._kept += GLANCE_SECONDS if self._still else computed
        waits = _waiting_line(frame) if self._still >= STILL else None
        if (waits is not None or self._kept >= self._seconds) and not _is_importing(frame):
            self.found.append(Blockage(place(frame), waits))
            raise LoopInterrupted(self.found[-1].where)


_watches: dict[int, _Watch] = {}  # by the thread that is watched


@contextmanager
def blocking_detected(beats: Callable[[], int | None], seconds: float | None = None) -> Iterator[list[Blockage]]:
    """Watch this thread's event loop within the block; the list that is given holds what has stopped it.

    Calls are refused everywhere; waits and computations are interrupted in the main thread of a Unix process only,
    where an alarm can interrupt anything. An alarm that somebody else has set goes on afterwards.

    Args:
        beats: counts the loop's steps; ``None`` while it rightly waits for something outside.
        seconds: real seconds that one step may take; default: :data:`BLOCKING_SECONDS`.

    Raises:
        LoopInterrupted: in the code that blocks, or that went on although its call was refused.
    """
    watch = _watches[threading.get_ident()] = _Watch(beats, BLOCKING_SECONDS if seconds is None else seconds)
    alarmed = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    _patch(_REFUSING)
    if alarmed:
        handler = signal.signal(signal.SIGALRM, watch.glance)
        delay, interval = signal.setitimer(signal.ITIMER_REAL, GLANCE_SECONDS, GLANCE_SECONDS)
    try:
        yield watch.found
    finally:
        if alarmed:
            signal.setitimer(signal.ITIMER_REAL, delay, interval)
            signal.signal(signal.SIGALRM, handler)
        del _watches[threading.get_ident()]
        if not _watches:
            _patch(_REAL)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _waiting_line(frame: FrameType | None) -> str | None:
    """Return the user's line that a thread waits in, if that, or what it calls, is known to wait.

    A thread that is being started is waited for, too; how long that takes is the machine's doing.
    """
    waits = False
    while frame is not None and frame.f_code.co_qualname not in ("Thread.start", "Handle._run"):
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
        waits = waits or _WAITS.search(line) is not None
        if is_users(frame.f_code.co_filename):
            return line if waits else None
        frame = frame.f_back
    return None


# -- calls that are refused: Python's audit events, and patches for what raises none (`time.sleep` before 3.13) ------


def _audit(event: str, args: Any) -> None:
    if _watches and event in _REFUSED_EVENTS:
        _refuse(_REFUSED_EVENTS[event](args))


def _refuse(call: str | None) -> None:
    watch = _watches.get(threading.get_ident())
    if watch is not None and call is not None:
        watch.refuse(call)


def _sleep(seconds: float) -> None:
    _refuse(f"time.sleep({seconds})" if seconds else None)
    _REAL[time, "sleep"](seconds)


def _wait(process: _Process, timeout: float | None = None) -> object:
    _refuse_process(process, "wait", timeout)
    return _REAL[subprocess.Popen, "wait"](process, timeout)


def _communicate(process: _Process, input: object = None, timeout: float | None = None) -> object:
    _refuse_process(process, "communicate", timeout)
    return _REAL[subprocess.Popen, "communicate"](process, input, timeout)


def _refuse_process(process: _Process, method: str, timeout: float | None) -> None:
    watch = _watches.get(threading.get_ident())
    # Not `poll()`: whether a short process has ended by now is a matter of luck.
    if watch is None or process.returncode is not None or timeout == 0 or process in watch.processes:
        return
    watch.processes.add(process)
    watch.refuse(f"a subprocess ({process.args!r}, {method}); asyncio.create_subprocess_exec does not")


_Functions = Mapping[tuple[object, str], Callable[..., object]]
_REFUSING: _Functions = {
    (time, "sleep"): _sleep,
    (subprocess.Popen, "wait"): _wait,
    (subprocess.Popen, "communicate"): _communicate,
}
_REAL: _Functions = {(owner, name): getattr(owner, name) for owner, name in _REFUSING}


def _patch(functions: _Functions) -> None:
    for (owner, name), function in functions.items():
        setattr(owner, name, function)


sys.addaudithook(_audit)  # for good: a hook cannot be taken away again
