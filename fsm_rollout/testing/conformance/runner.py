"""The one runner of all conformance checks: suites of numbered promises, and how code under check is driven.

Invariant: a broken promise comes out as one :class:`ConformanceError` with its number and sentence, of the simplest
case that shows it, also where the code under check keeps something and does not fail twice (:func:`search`). Code under
check runs in virtual time (:meth:`Subject.run`), so a run ends whatever the code does, and one step of its coroutine
after the other (:class:`Stepped`), so it can be cancelled at each of its awaits.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from fsm_rollout.names.objects import path_of
from fsm_rollout.testing.simulation import blocked_loop
from fsm_rollout.testing.simulation.virtual_time import Deadlock, Endless, LeakedTasks, VirtualTimeLoop, run_virtual
from fsm_rollout.testing.simulation.visits import Stepped
from fsm_rollout.tools.bounded_call import STOP_SECONDS

if TYPE_CHECKING:
    from hypothesis import strategies as st

T = TypeVar("T")
S = TypeVar("S", bound="Subject")
F = TypeVar("F", bound=Callable[..., object])

MOST_WAITS = 40  # code is cancelled at each of its awaits, up to this many
BUSY_SECONDS = 1.0  # CPU seconds that one step of a coroutine may take: everything else on the loop waits for it
HORIZON = 1e7  # virtual seconds after which a run counts as endless
_PROMISE = re.compile(r"^ *(\d+)\. ([\w ]+): (.+(?:\n {7,}.+)*)", re.MULTILINE)
SHRINKING_RUNS = 200  # runs spent on making a failing case smaller; the first few hundred do nearly all of it


class ConformanceError(AssertionError):
    """Code that plugs into this package broke a promise.

    ``invariant`` is the promise's number in the list of the check that raised it (for engines, of
    :mod:`fsm_rollout.engines.protocol`), ``promise`` its sentence.
    """

    def __init__(self, invariant: int, message: str) -> None:
        super().__init__(invariant, message)
        self.invariant, self.message, self.promise = invariant, message, ""
        self.further: tuple[ConformanceError, ...] = ()
        """What else was found broken; it may follow from this."""

    def __str__(self) -> str:
        promise = f"\n  it says: {self.promise}" if self.promise else ""
        further = "".join(f"\nand {error}" for error in self.further)
        return f"promise {self.invariant}: {self.message}{promise}{further}"


class SlowError(ConformanceError):
    """A broken promise that takes seconds to show, each time."""


def demand(holds: object, number: int, message: str) -> None:
    """Raise for promise ``number`` unless something holds."""
    if not holds:
        raise ConformanceError(number, message)


def demand_all(who: str, *facts: tuple[object, int, str]) -> None:
    """Raise for the first fact about ``who`` (what holds, the promise, what is wrong otherwise) that does not hold."""
    for holds, number, message in facts:
        demand(holds, number, f"{who} {message}")


# -- suites of promises -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Promise:
    """What a kind of code promises."""

    name: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Check(Generic[F]):
    """One check: its name, the promises that it looks at, and the function that does."""

    name: str
    numbers: tuple[int, ...]
    hold: F


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check that passed has looked at."""

    promises: tuple[str, ...]
    examples: int
    """How many generated cases were run."""


class Suite(Generic[F]):
    """The numbered promises of one kind of code, and the checks of them in the order of their definition.

    Args:
        documented: the function that holds code to them, whose docstring lists them, as ``1. name: Sentence.``
    """

    def __init__(self, documented: Callable[..., object]) -> None:
        listed = _PROMISE.findall(documented.__doc__ or "")
        self.promises = {int(number): Promise(name, " ".join(sentence.split())) for number, name, sentence in listed}
        self.checks: list[Check[F]] = []

    def check(self, *numbers: int) -> Callable[[F], F]:
        """Make a function the next check, of these promises; the function's name is its name."""

        def register(hold: F) -> F:
            self.checks.append(Check(hold.__name__.strip("_").replace("_", " "), numbers, hold))
            return hold

        return register

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Give a broken promise of the block its sentence."""
        try:
            yield
        except ConformanceError as error:
            error.promise = self.promises[error.invariant].sentence
            raise

    def hold(self: Suite[Callable[[S], int | None]], subject: S) -> Checked:
        """Hold a subject to all that it promises, and return what that was; the first broken promise is raised."""
        checks = [check for check in self.checks if not subject.unmade.issuperset(check.numbers)]
        ran = sum(check.hold(subject) or 0 for check in checks)
        kept_promises = {number for check in checks for number in check.numbers} - subject.unmade
        return Checked(tuple(promise.name for number, promise in self.promises.items() if number in kept_promises), ran)


class Subject:
    """Code under check: what it and its action are called in messages, and how it is run.

    The class says which promises are broken when the code stops the event loop's thread (``BLOCKING``), never ends
    (``ENDLESS``), leaves tasks behind (``LEAKY``) or keeps a cancellation to itself (``CANCELLED``).
    """

    BLOCKING: ClassVar[int]
    ENDLESS: ClassVar[int]
    LEAKY: ClassVar[int]
    CANCELLED: ClassVar[int]
    unmade: set[int] | frozenset[int] = frozenset()  # the promises that this one does not make
    HOW_TIME_PASSES: ClassVar[str] = (
        "time is virtual: it stands for threads and for processes that asyncio started, a moment for connections, and "
        "within `asyncio.get_running_loop().external()`: put what else is awaited from outside there"
    )

    def __init__(self, name: str, action: str, patience: float, examples: int) -> None:
        self.name, self.action, self.patience, self.examples = name, action, patience, examples

    def search(self, strategy: st.SearchStrategy[T], hold: Callable[[T], object], part: int = 1) -> int:
        """Run ``hold`` on generated values, on one of ``part`` examples: see :func:`search`."""
        return search(strategy, hold, self.examples // part)

    async def in_time(self, work: Coroutine[object, object, T], late: str) -> T:
        """Await ``work``, which must end in time and leave the loop to others; ``late`` says what it did not do."""
        stepped = Stepped(work)
        try:
            async with asyncio.timeout(self.patience) as limit:
                result = await stepped
        except TimeoutError:
            if not limit.expired():
                raise
            late = f"{late} within {self.patience:g} s; {self.HOW_TIME_PASSES}"
            raise ConformanceError(self.ENDLESS, late) from None
        self.check_busy(stepped)
        return result

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run ``work`` in virtual time.

        Raises:
            SlowError: it stopped the loop's thread for long, or runs on for ever.
            ConformanceError: it stopped the loop's thread, can never end, leaves tasks, or lets some fail unheard.
        """
        loop = VirtualTimeLoop(horizon=HORIZON)
        unheard = loop.complaints()
        blockages: list[blocked_loop.Blockage] = []
        try:
            with blocked_loop.blocking_detected(lambda: loop.beat) as blockages:
                result = run_virtual(work, loop=loop)
            first = ", ".join(unheard[:1])
            demand(not unheard, self.LEAKY, f"what {self.name} started failed, and nobody heard: {first}")
            return result
        except blocked_loop.LoopInterrupted:
            pass  # the blockage says where
        except Deadlock as error:
            never = f"{self.action} never ends ({self.HOW_TIME_PASSES})"
            raise ConformanceError(self.ENDLESS, f"{never}: {error}") from None
        except Endless as error:
            raise SlowError(self.ENDLESS, f"{self.action} never ends: {error}") from None
        except LeakedTasks as error:
            tasks = str(error).partition("; ")[2] or error
            raise ConformanceError(self.LEAKY, f"tasks that {self.name} started outlived it: {tasks}") from None
        finally:
            if blockages:  # it says more than what came of it
                raise self._blocked(blockages[0])
        raise AssertionError("an interrupted loop has a blockage")

    def _blocked(self, blockage: blocked_loop.Blockage) -> ConformanceError:
        instead = "await something, or use a thread"
        if blockage.refused:
            return ConformanceError(self.BLOCKING, f"{self.name} blocks the event loop with {blockage.call}; {instead}")
        what = f"keeps the event loop for more than {blocked_loop.BLOCKING_SECONDS:g} s"
        what = what if blockage.call is None else f"blocks the event loop in '{blockage.call}'"
        return SlowError(self.BLOCKING, f"{self.name} {what}, at {blockage.where}; {instead}")

    def check_busy(self, stepped: Stepped[T]) -> None:
        """Raise for code that computed for so long in one step that all others had to wait."""
        if stepped.busiest > BUSY_SECONDS:
            kept = f"kept the event loop busy for {stepped.busiest:.1f} s between two awaits"
            raise SlowError(self.BLOCKING, f"{self.name} {kept}; compute in a thread")

    def cancel_everywhere(
        self, begin: Callable[[str], AbstractAsyncContextManager[Coroutine[object, object, object]]], case: str = ""
    ) -> None:
        """Cancel what ``begin`` gives at each of its awaits in turn; ``begin`` is told where it will be cancelled."""
        for number in range(1, MOST_WAITS):
            where = f"cancelled at its await number {number}"
            stepped, stopped = self.run(_cancelled_at(number, begin(where)))
            if not stepped.cancelled:
                return
            what = f"{self.name}, {where}{case}"
            demand(stopped, self.CANCELLED, f"{what}, did not stop within {STOP_SECONDS:g} s")
            demand(stepped.let_cancellation_out, self.CANCELLED, f"{what}, swallowed it; let CancelledError pass")


async def _cancelled_at(
    number: int, begun: AbstractAsyncContextManager[Coroutine[object, object, T]]
) -> tuple[Stepped[T], bool]:
    """Cancel what is begun at its ``number``-th wait; return how that went, and whether it stopped in time."""
    cancelled_or_ended = asyncio.Event()

    def cancel() -> None:
        cancelled_or_ended.set()
        task.cancel()

    async def run(stepped: Stepped[T]) -> T:
        return await stepped

    async with begun as work:
        stepped = Stepped(work, number, cancel)
        task = asyncio.get_running_loop().create_task(run(stepped))
        task.add_done_callback(lambda _: cancelled_or_ended.set())
        await cancelled_or_ended.wait()
        await asyncio.wait({task}, timeout=STOP_SECONDS)
        stopped = task.done()
        for _ in range(8):  # one that swallows several is not let go on
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=1.0)
        if not task.cancelled():
            task.exception()
        return stepped, stopped


# -- cases --------------------------------------------------------------------------------------------------------


class _Found(KeyboardInterrupt):
    """Takes a failure out of Hypothesis as it is. Of this kind because Hypothesis shrinks any other."""


def search(
    strategy: st.SearchStrategy[T],
    hold: Callable[[T], object],
    examples: int,
    *,
    seed: int | None = 0,
    slow: Callable[[Exception], bool] = lambda error: isinstance(error, SlowError),
) -> int:
    """Run ``hold`` on generated values until it raises, shrink, and raise for the simplest; return how many ran.

    Args:
        strategy: draws the values.
        hold: what is to hold of each.
        examples: how many values to draw.
        seed: of the drawing; ``None``: what the Hypothesis settings in force say.
        slow: whether a failure takes seconds each time; it is raised as it is.
    """
    import hypothesis  # here: engines are checked without it
    from hypothesis.errors import Flaky

    from fsm_rollout.testing.simulation.simulate import quietly

    # 1. Each value, and the smallest failure so far.
    ran = since = 0
    smallest: Exception | None = None

    def test(value: T) -> None:
        nonlocal ran, since, smallest
        ran += 1
        since += smallest is not None
        try:
            hold(value)
        except Exception as error:
            smallest = error  # a later one is smaller: Hypothesis tries nothing larger
            if slow(error):
                raise _Found from None
            raise
        finally:
            if smallest is not None and since >= SHRINKING_RUNS:
                raise _Found from None

    # 2. Hypothesis draws and shrinks, without its database and its own report.
    searched = hypothesis.settings(
        max_examples=max(1, examples),
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],  # explaining runs it all again, line by line
        verbosity=hypothesis.Verbosity.quiet,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )(hypothesis.given(strategy)(test))
    # 3. The failure comes out as it is.
    try:
        with quietly():
            (searched if seed is None else hypothesis.seed(seed)(searched))()
    except _Found:
        assert smallest is not None
        raise smallest from None
    except Flaky:
        if smallest is None:  # what it draws from is not the same twice
            raise
        smallest.add_note("  and not when the same case ran again: something is kept between runs, or random")
        raise smallest from None
    return ran


# -- code by its name ---------------------------------------------------------------------------------------------


def named(code: object) -> tuple[str, str]:
    """Return the ``module:Name`` under which an object is imported (a string is one), and its name in messages."""
    if isinstance(code, str):
        return code, code
    return str(path_of(code)), str(getattr(code, "__name__", repr(code)))
