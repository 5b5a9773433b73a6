"""Running code under check in virtual time, where it can neither stop the event loop's thread nor stay for ever.

Invariant: a run ends, and what kept the loop's thread is named. Calls that are known to wait there (``time.sleep``, a
blocking connection, the end of a process) are refused where they are made, however short the wait would have been; what
may or may not wait (a lock, a queue) is interrupted once it does, and anything else (an endless computation) after
:data:`BLOCKING_SECONDS`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakSet

from fsm_rollout.testing.conformance.promises import BlockedLoop, ConformanceError, SlowLoop, Stepped
from fsm_rollout.testing.simulation import source_lines as places
from fsm_rollout.testing.simulation import watching
from fsm_rollout.testing.simulation.virtual_time import Deadlock, Endless, LeakedTasks, VirtualTimeLoop, run_virtual

T = TypeVar("T")

BUSY_SECONDS = 1.0
"""CPU seconds that one step of a coroutine may take: everything else on the loop waits for it."""
BLOCKING_SECONDS = watching.BLOCKING_SECONDS
"""Seconds that one step may take, whatever it does."""
HORIZON = 1e7
"""Virtual seconds after which a run counts as endless."""
HOW_TIME_PASSES = (
    "time is virtual: it stands for threads and for processes that asyncio started, a moment for connections, and "
    "within `asyncio.get_running_loop().external()`: put what else is awaited from outside there"
)

INSTEAD = "await something, or use a thread"

_BLOCKING: Mapping[str, Callable[[Any], str | None]] = {
    "socket.connect": lambda args: None if args[0].gettimeout() == 0 else f"a blocking connection to {args[1]!r}",
    "socket.getaddrinfo": lambda args: f"a blocking look-up of {args[0]!r}",
    "os.system": lambda args: "os.system()",
    "builtins.input": lambda args: "input()",
}
"""Python's own audit events that mean waiting in the thread that raises them."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """What is refused in one thread."""

    invariant: int
    name: str
    found: list[BlockedLoop] = field(default_factory=list)
    refused: WeakSet[subprocess.Popen[Any]] = field(default_factory=WeakSet)
    """Processes whose end was not waited for; ``subprocess.run`` kills such a one and waits again, rightly."""


_watches: dict[int, _Watched] = {}
_hooked = False


def _audit(event: str, args: Any) -> None:
    if _watches and event in _BLOCKING:
        _refuse(_BLOCKING[event](args))


def _refuse(what: str | None) -> None:
    watch = _watches.get(threading.get_ident())
    if watch is not None and what is not None and not watching.is_importing(sys._getframe()):
        error = BlockedLoop(watch.invariant, f"{watch.name} blocks the event loop with {what}; {INSTEAD}")
        error.what, error.where = what, places.caller()
        watch.found.append(error)
        raise error


def _sleep(seconds: Any) -> None:
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


_real_sleep, _real_wait, _real_communicate = time.sleep, subprocess.Popen.wait, subprocess.Popen.communicate


def _patch(on: bool) -> None:
    """Put our own in the place of what raises no audit event (``time.sleep`` before Python 3.13)."""
    time.sleep = _sleep if on else _real_sleep
    subprocess.Popen.wait = _wait if on else _real_wait  # type: ignore[method-assign]
    subprocess.Popen.communicate = _communicate if on else _real_communicate  # type: ignore[method-assign]


@contextmanager
def unblocked(invariant: int, name: str) -> Iterator[list[BlockedLoop]]:
    """Refuse what would block this thread, within the block: it raises there, and is in the list that is given."""
    global _hooked
    if not _hooked:  # a hook cannot be taken away again, so there is one for good
        sys.addaudithook(_audit)
        _hooked = True
    watch = _Watched(invariant, name)
    _watches[threading.get_ident()] = watch
    _patch(True)
    try:
        yield watch.found
    finally:
        del _watches[threading.get_ident()]
        if not _watches:
            _patch(False)


def busy(invariant: int, name: str, stepped: Stepped[Any]) -> None:
    """Raise for code that computed for so long in one step that all others had to wait."""
    if stepped.busiest > BUSY_SECONDS:
        raise SlowLoop(
            invariant,
            f"{name} kept the event loop busy for {stepped.busiest:.1f} s between two awaits; compute in a thread",
        )


def in_virtual_time(
    work: Coroutine[Any, Any, T], *, blocking: tuple[int, str], endless: tuple[int, str], leaky: tuple[int, str]
) -> T:
    """Run ``work`` in virtual time.

    Args:
        work: what runs.
        blocking: the invariant that is broken when the loop's thread is stopped, and what to call the code under check.
        endless: the invariant that is broken when it can never end, and how to say so.
        leaky: the invariant that is broken when tasks that it started outlive it, and how to say so.

    Raises:
        BlockedLoop: it stopped the loop's thread.
        ConformanceError: it can never end, leaves tasks, or lets some fail unheard.
    """
    loop, watch = VirtualTimeLoop(horizon=HORIZON), watching.Watch()
    unheard: list[str] = []
    loop.set_exception_handler(lambda loop, context: unheard.append(_said(context)))
    with unblocked(*blocking) as blocked:
        try:
            with watching.watchdog(watch, lambda: loop.beat, BLOCKING_SECONDS):
                result = run_virtual(work, loop=loop)
            if unheard:
                raise ConformanceError(leaky[0], f"what {blocking[1]} started failed, and nobody heard: {unheard[0]}")
            return result
        except watching.HandlerBlocked as error:
            what = f"keeps the event loop for more than {BLOCKING_SECONDS:g} s"
            if watch.waits_in is not None:
                what = f"blocks the event loop in '{watch.waits_in}'"
            where = places.raised(error.__traceback__) or watch.blocked
            raise SlowLoop(blocking[0], f"{blocking[1]} {what}, at {where}; {INSTEAD}") from error
        except Deadlock as error:
            raise ConformanceError(endless[0], f"{endless[1]} ({HOW_TIME_PASSES}): {error}") from None
        except Endless as error:
            raise ConformanceError(endless[0], f"{endless[1]}: {error}") from None
        except LeakedTasks as error:
            raise ConformanceError(leaky[0], f"{leaky[1]}: {str(error).partition('; ')[2] or error}") from None
        finally:
            if blocked:  # it says more than what came of it
                raise blocked[0]


def _said(context: Mapping[str, Any]) -> str:
    """Return what the event loop has to say about a callback or task that failed on its own."""
    error = context.get("exception")
    return f"{context.get('message')}{'' if error is None else f': {type(error).__name__}: {error}'}"
