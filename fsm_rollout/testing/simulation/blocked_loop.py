"""The one detector of a blocked event loop: it names the line that keeps the loop's thread, and ends the run.

Invariant: code that is watched does exactly what it does unwatched, unless it stops the loop. A call that is known to
wait (``time.sleep``, a blocking connection, the end of a process) is refused where it is made, however short the wait
would have been. What may or may not wait (a lock, a queue) is interrupted once it does, and anything else (a
computation without end) after :data:`BLOCKING_SECONDS`. How slow a machine is makes no fault: what computes is measured
in CPU seconds, and what a module does once, when it is imported, is let be (interrupting it would leave half a module).
"""

from __future__ import annotations

import ast
import dis
import linecache
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakSet

from fsm_rollout.testing.simulation import source_lines

BLOCKING_SECONDS = 5.0
"""Seconds that one callback may keep the event loop, computing or waiting, before it counts as blocking."""
GLANCE_SECONDS = 0.1
"""Real seconds between two looks at what the loop is doing."""
STILL = 2
"""Looks in a row that must see a callback wait in the very same call: so many glances, it has waited."""
STILL_CPU_SECONDS = 0.002
"""CPU seconds between two looks from which on it computes, however slowly, instead of waiting."""
WAITS = frozenset(
    ["accept", "acquire", "communicate", "connect", "flock", "get", "join", "lockf", "poll", "recv", "recv_into",
     "recvfrom", "result", "select", "sendall", "sleep", "wait", "wait_for", "waitpid"]
)  # fmt: skip
"""What the calls are named in which a thread waits: for locks, queues, threads, connections and processes."""
_REFUSED_EVENTS: Mapping[str, Callable[[Any], str | None]] = {
    "socket.connect": lambda args: None if args[0].gettimeout() == 0 else f"a blocking connection to {args[1]!r}",
    "socket.getaddrinfo": lambda args: f"a blocking look-up of {args[0]!r}",
    "os.system": lambda args: "os.system()",
    "builtins.input": lambda args: "input()",
}
"""Python's own audit events that mean waiting in the thread that raises them."""


@dataclass(frozen=True, slots=True)
class Blockage:
    """One place where the event loop was stopped."""

    where: str
    """``file:line, in function``."""
    call: str | None
    """The call that waits, where that is known."""
    refused: bool = False
    """Whether the call was refused before it could wait; else the run was interrupted in it."""


class CallRefused(RuntimeError):
    """Raised in the place of a call that would block the event loop."""


class LoopInterrupted(KeyboardInterrupt):
    """Ends a run whose loop is blocked. Of this kind because no ordinary ``except`` and no task may keep it."""


@dataclass(frozen=True, slots=True)
class _Watch:
    found: list[Blockage] = field(default_factory=list)
    refused: WeakSet[subprocess.Popen[Any]] = field(default_factory=WeakSet)
    """Processes whose end was not waited for; ``subprocess.run`` kills such a one and waits again, rightly."""


_watches: dict[int, _Watch] = {}
"""By the thread that is watched."""


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
    watch = _Watch()
    _watches[threading.get_ident()] = watch
    _patch(True)
    try:
        with _alarmed(watch, beats, BLOCKING_SECONDS if seconds is None else seconds):
            yield watch.found
    finally:
        del _watches[threading.get_ident()]
        if not _watches:
            _patch(False)


# -- calls that are refused ---------------------------------------------------------------------------------------

_real_sleep: Callable[[float], None] = time.sleep
_real_wait, _real_communicate = subprocess.Popen.wait, subprocess.Popen.communicate
_audited = False


def _patch(on: bool) -> None:
    """Listen to Python's audit events, and replace what raises none (``time.sleep`` before Python 3.13)."""
    global _audited
    if not _audited:  # a hook cannot be taken away again, so there is one for good
        sys.addaudithook(_audit)
        _audited = True
    time.sleep = _sleep if on else _real_sleep  # type: ignore[assignment]
    subprocess.Popen.wait = _wait if on else _real_wait  # type: ignore[method-assign]
    subprocess.Popen.communicate = _communicate if on else _real_communicate  # type: ignore[method-assign]


def _audit(event: str, args: Any) -> None:
    if _watches and event in _REFUSED_EVENTS:
        _refuse(_REFUSED_EVENTS[event](args))


def _sleep(seconds: float) -> None:
    _refuse(f"time.sleep({seconds})" if seconds else None)
    _real_sleep(seconds)


def _wait(self: subprocess.Popen[Any], timeout: float | None = None) -> int:
    _refuse_process(self, "wait", timeout)
    return _real_wait(self, timeout)


def _communicate(self: subprocess.Popen[Any], input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
    _refuse_process(self, "communicate", timeout)
    return _real_communicate(self, input, timeout)


def _refuse_process(process: subprocess.Popen[Any], method: str, timeout: float | None) -> None:
    watch = _watches.get(threading.get_ident())
    # Not `poll()`: whether a short process has ended by now is a matter of luck.
    if watch is None or process.returncode is not None or timeout == 0 or process in watch.refused:
        return
    watch.refused.add(process)
    _refuse(f"a subprocess ({process.args!r}, {method}); asyncio.create_subprocess_exec does not")


def _refuse(call: str | None) -> None:
    watch = _watches.get(threading.get_ident())
    if watch is not None and call is not None and not _is_importing(sys._getframe()):
        watch.found.append(Blockage(source_lines.caller() or "?", call, refused=True))
        raise CallRefused(f"{call} would block the event loop; await something, or use a thread")


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


# -- waits and computations that are interrupted ------------------------------------------------------------------


@contextmanager
def _alarmed(watch: _Watch, beats: Callable[[], int | None], seconds: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    beat: int | None = -1
    still = 0
    place: object = None
    cpu = kept = 0.0

    def alarm(number: int, frame: FrameType | None) -> None:
        nonlocal beat, still, place, cpu, kept
        last_beat, last_place, last_cpu = beat, place, cpu
        beat, place, cpu = beats(), frame and (id(frame), frame.f_lasti), time.thread_time()
        if beat is None or beat != last_beat:
            still, kept = 0, 0.0
            return
        still = still + 1 if place == last_place and cpu - last_cpu < STILL_CPU_SECONDS else 0
        kept += GLANCE_SECONDS if still else cpu - last_cpu
        call = _waiting_call(frame) if still >= STILL else None
        if (call is not None or kept >= seconds) and not _is_importing(frame):
            watch.found.append(Blockage(source_lines.place(frame), call))
            raise LoopInterrupted(watch.found[-1].where)

    previous = signal.signal(signal.SIGALRM, alarm)
    delay, interval = signal.setitimer(signal.ITIMER_REAL, GLANCE_SECONDS, GLANCE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, delay, interval)
        signal.signal(signal.SIGALRM, previous)


def _waiting_call(frame: FrameType | None) -> str | None:
    """Return the user's call that a thread waits in, if that call, or one that it makes, is known to wait.

    A thread that is being started is waited for, too; how long that takes is the machine's doing.
    """
    known = False
    while frame is not None and frame.f_code.co_qualname not in ("Thread.start", "Handle._run"):
        text, name = _present_call(frame)
        known = known or name in WAITS
        if source_lines.is_users(frame.f_code.co_filename):
            return text if known else None
        frame = frame.f_back
    return None


def _present_call(frame: FrameType) -> tuple[str, str]:
    """Return the call that a frame is in, as it is written, and its name; of ``with lock:`` that is ``acquire``."""
    code = frame.f_code
    line, end_line, column, end_column = list(code.co_positions())[frame.f_lasti // 2]
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    if line is None or end_line is None or end_line > len(lines):
        return "", ""
    written = [text.encode() for text in lines[line - 1 : end_line]]
    written[-1] = written[-1][:end_column]
    written[0] = written[0][column:]
    source = b"".join(written).decode()
    if dis.opname[code.co_code[frame.f_lasti]] == "BEFORE_WITH":
        return source.partition("\n")[0], "acquire"
    try:
        node = ast.parse(f"({source})", mode="eval").body
    except (SyntaxError, ValueError):
        return "", ""
    function = node.func if isinstance(node, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return " ".join(source.split()), name
