"""The one runner of all conformance checks: a table of numbered promises per kind, and how code under check is driven.

Invariant: a broken promise comes out as one :class:`ConformanceError` with its number and sentence, of the simplest
case that shows it, also where the code under check keeps something and does not fail twice (:func:`search`). Code under
check runs in virtual time (:meth:`Subject.run`), so a run ends whatever the code does, and one step of its coroutine
after the other (:class:`Stepped`), so it can be cancelled at each of its awaits.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from fsm_rollout.agent.handlers import load_object
from fsm_rollout.errors import ConfigError
from fsm_rollout.testing.simulation import blocked_loop
from fsm_rollout.testing.simulation.virtual_time import Deadlock, Endless, LeakedTasks, VirtualTimeLoop, run_virtual
from fsm_rollout.tools.call import STOP_SECONDS

if TYPE_CHECKING:
    from hypothesis import strategies as st

T = TypeVar("T")
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., object])

MOST_WAITS = 40
"""Code is cancelled at each of its awaits, up to this many."""
BUSY_SECONDS = 1.0
"""CPU seconds that one step of a coroutine may take: everything else on the loop waits for it."""
HORIZON = 1e7
"""Virtual seconds after which a run counts as endless."""
HOW_TIME_PASSES = (
    "time is virtual: it stands for threads and for processes that asyncio started, a moment for connections, and "
    "within `asyncio.get_running_loop().external()`: put what else is awaited from outside there"
)


class ConformanceError(AssertionError):
    """Code that plugs into this package broke a promise.

    ``invariant`` is the promise's number in the list of the check that raised it (for engines, of
    :mod:`fsm_rollout.engines.protocol`), ``promise`` its sentence.
    """

    def __init__(self, invariant: int, message: str) -> None:
        self.invariant, self.message, self.promise = invariant, message, ""
        super().__init__(f"invariant {invariant}: {message}")

    def __str__(self) -> str:
        """Return number and message, and what was promised."""
        return f"{self.args[0]}\n  promise {self.invariant}: {self.promise}" if self.promise else str(self.args[0])


def demand(holds: object, number: int, message: str) -> None:
    """Raise for promise ``number`` unless something holds."""
    if not holds:
        raise ConformanceError(number, message)


class SlowLoop(ConformanceError):
    """Code under check kept the event loop's thread for seconds, as it would do each time."""


# -- the table and its runner -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Promise:
    """What a kind of code promises."""

    name: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Check(Generic[S]):
    """One check: the promises that it looks at, how, and of which subjects; ``hold`` returns how many cases it ran."""

    numbers: tuple[int, ...]
    hold: Callable[[S], int | None]
    applies: Callable[[S], bool] = lambda subject: True


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check that passed has looked at."""

    promises: tuple[str, ...]
    examples: int
    """How many generated cases were run."""


def documented(promises: Mapping[int, Promise]) -> Callable[[F], F]:
    """Write the numbered promises into a function's docstring, in the place of ``(promises)``."""
    listed = "\n    ".join(f"{number}. {promise.sentence}" for number, promise in promises.items())

    def write(function: F) -> F:
        function.__doc__ = (function.__doc__ or "").replace("(promises)", listed)
        return function

    return write


@contextmanager
def promised(promises: Mapping[int, Promise]) -> Iterator[None]:
    """Give a broken promise of the block its sentence."""
    try:
        yield
    except ConformanceError as error:
        error.promise = promises[error.invariant].sentence
        raise


def run_checks(make: Callable[[], S], promises: Mapping[int, Promise], checks: Sequence[Check[S]]) -> Checked:
    """Build a subject, hold it to every check that applies, and return the promises that these looked at.

    Raises:
        ConformanceError: the first promise found broken.
    """
    with promised(promises):
        subject = make()
        kept = [check for check in checks if check.applies(subject)]
        ran = sum(check.hold(subject) or 0 for check in kept)
    numbers = {number for check in kept for number in check.numbers}
    return Checked(tuple(promise.name for number, promise in promises.items() if number in numbers), ran)


class Subject:
    """Code under check: what it and its action are called in messages, and how it is run.

    The class says which promises are broken when the code stops the event loop's thread (``BLOCKING``), never ends
    (``ENDLESS``), leaves tasks behind (``LEAKY``) or keeps a cancellation to itself (``CANCELLED``).
    """

    BLOCKING: ClassVar[int]
    ENDLESS: ClassVar[int]
    LEAKY: ClassVar[int]
    CANCELLED: ClassVar[int]

    def __init__(self, name: str, action: str, examples: int) -> None:
        self.name, self.action, self.examples = name, action, examples

    def share(self, part: int) -> int:
        """Return how many cases a slower check is tried on: one of ``part``."""
        return max(1, self.examples // part)

    def run(self, work: Coroutine[object, object, T], *, case: str = "") -> T:
        """Run ``work`` in virtual time; ``case`` is said at the end of messages.

        Raises:
            SlowLoop: it stopped the loop's thread for long.
            ConformanceError: it stopped the loop's thread, can never end, leaves tasks, or lets some fail unheard.
        """
        loop = VirtualTimeLoop(horizon=HORIZON)
        unheard: list[str] = []
        loop.set_exception_handler(lambda _, context: unheard.append(_complaint(context)))
        blockages: list[blocked_loop.Blockage] = []
        never_ends = f"{self.action} never ends{case}"
        try:
            with blocked_loop.blocking_detected(lambda: loop.beat) as blockages:
                result = run_virtual(work, loop=loop)
            if unheard:
                raise ConformanceError(self.LEAKY, f"what {self.name} started failed, and nobody heard: {unheard[0]}")
            return result
        except blocked_loop.LoopInterrupted:
            pass  # the blockage says where
        except Deadlock as error:
            raise ConformanceError(self.ENDLESS, f"{never_ends} ({HOW_TIME_PASSES}): {error}") from None
        except Endless as error:
            raise ConformanceError(self.ENDLESS, f"{never_ends}: {error}") from None
        except LeakedTasks as error:
            tasks = str(error).partition("; ")[2] or error
            raise ConformanceError(self.LEAKY, f"tasks that {self.name} started outlived it{case}: {tasks}") from None
        finally:
            if blockages:  # it says more than what came of it
                self._blocked(blockages[0].call, blockages[0].where, blockages[0].refused)
        raise AssertionError("an interrupted loop has a blockage")

    def _blocked(self, call: str | None, where: str, refused: bool) -> None:
        instead = "await something, or use a thread"
        if refused:
            raise ConformanceError(self.BLOCKING, f"{self.name} blocks the event loop with {call}; {instead}")
        what = f"keeps the event loop for more than {blocked_loop.BLOCKING_SECONDS:g} s"
        what = what if call is None else f"blocks the event loop in '{call}'"
        raise SlowLoop(self.BLOCKING, f"{self.name} {what}, at {where}; {instead}")

    def check_busy(self, stepped: Stepped[T]) -> None:
        """Raise for code that computed for so long in one step that all others had to wait."""
        if stepped.busiest > BUSY_SECONDS:
            raise SlowLoop(
                self.BLOCKING, f"{self.name} kept the event loop busy for {stepped.busiest:.1f} s between two awaits; "
                "compute in a thread"
            )  # fmt: skip

    def cancel_everywhere(
        self, begin: Callable[[str], AbstractAsyncContextManager[Coroutine[object, object, object]]], what: str = ""
    ) -> None:
        """Cancel what ``begin`` gives at each of its awaits in turn; ``begin`` is told where it will be cancelled."""
        for number in range(1, MOST_WAITS):
            where = f"cancelled at its await number {number}{what}"

            async def cancelled(number: int = number, where: str = where) -> Stepped[object] | None:
                async with begin(where) as work:
                    try:
                        return await cancelled_at(number, work, STOP_SECONDS)
                    except TimeoutError:
                        return None

            stepped = self.run(cancelled())
            if stepped is None:
                raise ConformanceError(self.CANCELLED, f"{self.name}, {where}, did not stop within {STOP_SECONDS:g} s")
            if stepped.cancelled_at is None:
                return
            demand(stepped.heard, self.CANCELLED, f"{self.name}, {where}, swallowed it; let CancelledError pass")


def _complaint(context: Mapping[str, object]) -> str:
    """Return what the event loop has to say about a callback or task that failed on its own."""
    error = context.get("exception")
    return f"{context.get('message')}{'' if error is None else f': {type(error).__name__}: {error}'}"


# -- cases --------------------------------------------------------------------------------------------------------


class _Found(KeyboardInterrupt):
    """Takes a failure out of Hypothesis as it is. Of this kind because Hypothesis shrinks any other."""

    def __init__(self, error: ConformanceError) -> None:
        self.error = error


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
            raise _Found(error) from None
        except ConformanceError as error:
            latest = error
            raise

    try:
        holds()
    except _Found as found:
        raise found.error from None
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
def importable(code: object) -> Iterator[str]:
    """Give the ``module:Name`` under which an object is imported, for the block; a string is taken as it is."""
    if isinstance(code, str):
        yield code
        return
    path = f"{getattr(code, '__module__', '')}:{getattr(code, '__qualname__', '')}"
    try:
        importable_by_itself = "<" not in path and load_object(path) is code
    except (ConfigError, ValueError):
        importable_by_itself = False
    if importable_by_itself:
        yield path
        return
    name = f"{getattr(code, '__name__', 'object').strip('<>')}_{next(_numbers)}"
    setattr(lent, name, code)
    try:
        yield f"{__name__}:lent.{name}"
    finally:
        delattr(lent, name)


def called(code: object) -> str:
    """Return what to call an object in a message."""
    return code if isinstance(code, str) else str(getattr(code, "__name__", repr(code)))


# -- steps --------------------------------------------------------------------------------------------------------


class Stepped(Generic[T]):
    """Awaits a coroutine step by step, and cancels the task that awaits it at one of them.

    ``cancel`` (default: the running task's own) is called when the coroutine has waited for the ``cancel_at``-th time,
    counted from 1. ``ended_by`` is the exception that the coroutine let out, ``None`` when it returned.
    """

    def __init__(
        self,
        coroutine: Coroutine[object, object, T],
        cancel_at: int | None = None,
        cancel: Callable[[], object] | None = None,
    ) -> None:
        self._coroutine, self._cancel_at, self._cancel = coroutine, cancel_at, cancel
        self.waits = 0
        self.cancelled_at: float | None = None
        self.busiest = 0.0
        """The CPU seconds of the longest step."""
        self.ended_by: BaseException | None = None

    def __await__(self) -> Generator[object, object, T]:
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


async def cancelled_at(number: int, work: Coroutine[object, object, T], patience: float) -> Stepped[T]:
    """Cancel ``work`` at its ``number``-th wait and give it ``patience`` seconds from then on to end; see ``heard``.

    Raises:
        TimeoutError: it did not end.
    """
    cancelled_or_ended = asyncio.Event()

    def cancel() -> None:
        cancelled_or_ended.set()
        task.cancel()

    stepped = Stepped(work, cancel_at=number, cancel=cancel)

    async def run() -> T:
        try:
            return await stepped
        finally:
            cancelled_or_ended.set()

    task = asyncio.get_running_loop().create_task(run())
    try:
        await cancelled_or_ended.wait()
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
