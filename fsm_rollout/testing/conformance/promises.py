"""What all conformance checks share: the error they raise, and how code under check is driven.

Invariant: a broken promise comes out as one :class:`ConformanceError`, of the simplest case that shows it, also where
the code under check keeps something and does not fail twice (:func:`search`). Code under check is run one step of its
coroutine after the other (:class:`Stepped`), so it can be cancelled at each of its awaits.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fsm_rollout.agent.handlers import load_object
from fsm_rollout.errors import ConfigError

if TYPE_CHECKING:
    from hypothesis import strategies as st

T = TypeVar("T")


class ConformanceError(AssertionError):
    """Code that plugs into this package broke a promise.

    ``invariant`` is the promise's number in the list of the check that raised it (for engines, of
    :mod:`fsm_rollout.engines.protocol`).
    """

    def __init__(self, invariant: int, message: str) -> None:
        self.invariant = invariant
        self.message = message
        super().__init__(f"invariant {invariant}: {message}")


class BlockedLoop(ConformanceError):
    """Code under check stopped the event loop's thread; raised where it did so."""

    what: str = ""
    """The call that would have waited."""
    where: str | None = None
    """The user's line that made it."""


class SlowLoop(BlockedLoop):
    """Code under check kept the event loop's thread for seconds, as it would do each time."""


class _Told(KeyboardInterrupt):
    """Takes a failure out of Hypothesis as it is. Of this kind because it keeps any other, to shrink it."""

    def __init__(self, error: ConformanceError) -> None:
        self.error = error


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check that passed has looked at."""

    promises: tuple[str, ...]
    examples: int
    """How many generated cases were run."""


def search(strategy: st.SearchStrategy[T], hold: Callable[[T], object], examples: int) -> int:
    """Run ``hold`` on generated values until it raises, shrink, and raise for the simplest; return how many ran.

    The same every time: no seed, no database. A :class:`SlowLoop` is not shrunk: that would take its
    seconds many times over.
    """
    from hypothesis import HealthCheck, Phase, given, settings  # here: engines are checked without it
    from hypothesis.errors import Flaky

    ran = 0
    latest: ConformanceError | None = None

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
        nonlocal ran, latest
        ran += 1
        try:
            hold(value)
        except SlowLoop as error:
            raise _Told(error) from None
        except ConformanceError as error:
            latest = error
            raise

    try:
        holds()
    except _Told as told:
        raise told.error from None
    except Flaky:
        if latest is None:  # what it draws from is not the same twice: nothing that was checked
            raise
        raise type(latest)(
            latest.invariant, f"{latest.message} (and not the second time: something is kept between runs, or random)"
        ) from None
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
    """Cancel ``work`` at its ``number``-th wait and give it ``patience`` seconds from then on to end; see ``heard``.

    Raises:
        TimeoutError: it did not end.
    """
    told = asyncio.Event()

    def cancel() -> None:
        told.set()
        task.cancel()

    stepped = Stepped(work, cancel_at=number, cancel=cancel)

    async def run() -> T:
        try:
            return await stepped
        finally:
            told.set()

    task = asyncio.get_running_loop().create_task(run())
    try:
        await told.wait()
        done, _ = await asyncio.wait({task}, timeout=patience)
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
