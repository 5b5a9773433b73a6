"""What all conformance checks share: the error they raise, and how code under check is driven.

Invariant: a check ends. Code under check runs in virtual time, one step of its coroutine after the other
(:class:`Stepped`), so it can be cancelled at each of its awaits, and code that stops the event loop's thread is named
(:func:`unblocked`) instead of waited for.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fsm_rollout.errors import ConfigError
from fsm_rollout.handlers import load_object
from fsm_rollout.testing.virtual_time import Deadlock, LeakedTasks, run_virtual

if TYPE_CHECKING:
    from hypothesis import strategies as st

T = TypeVar("T")

BUSY_SECONDS = 1.0
"""CPU seconds that one step of a coroutine may take: everything else on the loop waits for it."""


class ConformanceError(AssertionError):
    """Code that plugs into this package broke a promise.

    ``invariant`` is the promise's number in the list of the check that raised it (for engines, of
    :mod:`fsm_rollout.engines.base`).
    """

    def __init__(self, invariant: int, message: str) -> None:
        self.invariant = invariant
        super().__init__(f"invariant {invariant}: {message}")


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check that passed has looked at."""

    promises: tuple[str, ...]
    examples: int
    """How many generated cases were run."""


def search(strategy: st.SearchStrategy[T], hold: Callable[[T], object], examples: int) -> int:
    """Run ``hold`` on generated values until it raises, shrink, and raise for the simplest; return how many ran.

    The same every time: no seed, no database.
    """
    from hypothesis import HealthCheck, Phase, given, settings  # here: engines are checked without it

    ran = 0

    @settings(
        max_examples=examples,
        database=None,
        derandomize=True,
        deadline=None,
        print_blob=False,
        phases=[Phase.generate, Phase.shrink],  # explaining runs it all again, traced line by line
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def holds(value: T) -> None:
        nonlocal ran
        ran += 1
        hold(value)

    holds()
    return ran


# -- code by its name ---------------------------------------------------------------------------------------------

lent = SimpleNamespace()
"""Names for code that has none: what is defined inside a function cannot be imported as ``module:Name``."""
_numbers = itertools.count()


@contextmanager
def importable(found: object) -> Iterator[str]:
    """Give the ``module:Name`` under which an object is imported, for the block; a string is taken as it is."""
    if isinstance(found, str):
        yield found
        return
    path = f"{getattr(found, '__module__', '')}:{getattr(found, '__qualname__', '')}"
    try:
        importable_by_itself = "<" not in path and load_object(path) is found
    except (ConfigError, ValueError):
        importable_by_itself = False
    if importable_by_itself:
        yield path
        return
    name = f"{getattr(found, '__name__', 'object').strip('<>')}_{next(_numbers)}"
    setattr(lent, name, found)
    try:
        yield f"{__name__}:lent.{name}"
    finally:
        delattr(lent, name)


def called(found: object) -> str:
    """Return what to call an object in a message."""
    return found if isinstance(found, str) else str(getattr(found, "__name__", repr(found)))


# -- steps --------------------------------------------------------------------------------------------------------


class Stepped(Generic[T]):
    """Awaits a coroutine step by step, and cancels the task that awaits it at one of them.

    ``cancel`` (default: the running task's own) is called when the coroutine has waited for the ``cancel_at``-th time,
    counted from 1. ``ended_by`` is the exception that the coroutine let out, ``None`` when it returned.
    """

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T],
        cancel_at: int | None = None,
        cancel: Callable[[], object] | None = None,
    ) -> None:
        self._coroutine = coroutine
        self._cancel_at = cancel_at
        self._cancel = cancel
        self.waits = 0
        self.cancelled_at: float | None = None
        self.busiest = 0.0
        """The CPU seconds of the longest step."""
        self.ended_by: BaseException | None = None

    def __await__(self) -> Generator[Any, Any, T]:
        """Run it."""
        inner = self._coroutine.__await__()
        thrown: BaseException | None = None
        while True:
            began = time.thread_time()
            try:
                waits_for = inner.send(None) if thrown is None else inner.throw(thrown)
            except StopIteration as stop:
                result: T = stop.value
                return result
            except BaseException as error:
                self.ended_by = error
                raise
            finally:
                self.busiest = max(self.busiest, time.thread_time() - began)
            self.waits += 1
            if self.waits == self._cancel_at:
                self.cancelled_at = asyncio.get_running_loop().time()
                task = asyncio.current_task()
                assert task is not None
                (self._cancel or task.cancel)()
            thrown = None
            try:
                yield waits_for
            except BaseException as error:
                thrown = error

    @property
    def heard(self) -> bool:
        """Whether the coroutine let its cancellation out, where there was one."""
        return self.cancelled_at is None or isinstance(self.ended_by, asyncio.CancelledError)


async def cancelled_at(number: int, work: Coroutine[Any, Any, T], patience: float) -> Stepped[T]:
    """Cancel ``work`` at its ``number``-th wait and give it ``patience`` seconds to end; see ``heard`` and ``waits``.

    Raises:
        TimeoutError: it did not end.
    """
    stepped = Stepped(work, cancel_at=number)

    async def run() -> T:
        return await stepped

    task = asyncio.get_running_loop().create_task(run())
    try:
        done, _ = await asyncio.wait({task}, timeout=None if number == 0 else patience)
        if not done:
            raise TimeoutError
    finally:
        for _ in range(8):  # one that swallows several is not let go on
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=1.0)
    if not task.cancelled():
        task.exception()
    return stepped


class BlockedLoop(ConformanceError):
    """Code under check stopped the event loop's thread; raised where it did so."""


_BLOCKING: dict[str, Callable[[Any], str | None]] = {
    "socket.connect": lambda args: None if args[0].gettimeout() == 0 else f"a blocking connection to {args[1]!r}",
    "socket.getaddrinfo": lambda args: f"a blocking look-up of {args[0]!r}",
    "os.system": lambda args: "os.system()",
}
"""Python's own audit events that mean waiting in the thread that raises them."""
_watches: dict[int, tuple[int, str, list[BlockedLoop]]] = {}
_hooked = False


def _audit(event: str, args: Any) -> None:
    if _watches and event in _BLOCKING:
        _refuse(_BLOCKING[event](args))


def _refuse(what: str | None) -> None:
    watch = _watches.get(threading.get_ident())
    if watch is not None and what is not None:
        invariant, name, found = watch
        error = BlockedLoop(invariant, f"{name} blocks the event loop with {what}; await something, or use a thread")
        found.append(error)
        raise error


def _sleep(seconds: Any) -> None:
    _refuse(f"time.sleep({seconds})")
    _real_sleep(seconds)


_real_sleep = time.sleep


@contextmanager
def unblocked(invariant: int, name: str) -> Iterator[list[BlockedLoop]]:
    """Refuse what would block this thread, within the block: it raises there, and is in the list that is given."""
    global _hooked
    if not _hooked:  # a hook cannot be taken away again, so there is one for good
        sys.addaudithook(_audit)
        _hooked = True
    found: list[BlockedLoop] = []
    _watches[threading.get_ident()] = (invariant, name, found)
    time.sleep = _sleep  # it raises no audit event before Python 3.13; other threads sleep on
    try:
        yield found
    finally:
        del _watches[threading.get_ident()]
        if not _watches:
            time.sleep = _real_sleep


def busy(invariant: int, name: str, stepped: Stepped[Any]) -> None:
    """Raise for code that computed for so long in one step that all others had to wait."""
    if stepped.busiest > BUSY_SECONDS:
        raise BlockedLoop(
            invariant,
            f"{name} kept the event loop busy for {stepped.busiest:.1f} s between two awaits; compute in a thread",
        )


def in_virtual_time(work: Coroutine[Any, Any, T], *, endless: tuple[int, str], leaky: tuple[int, str]) -> T:
    """Run ``work`` in virtual time; the two pairs name the invariants broken when it stands still, or leaves tasks.

    Raises:
        ConformanceError: it can never end (``endless``), or tasks that it started outlived it (``leaky``).
    """
    try:
        return run_virtual(work)
    except Deadlock as error:
        raise ConformanceError(endless[0], f"{endless[1]}: {error}") from None
    except LeakedTasks as error:
        raise ConformanceError(leaky[0], f"{leaky[1]}: {str(error).partition('; ')[2] or error}") from None
