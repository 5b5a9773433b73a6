"""Watching a user's handlers: what each visit came to, and where one blocks or hangs.

Invariant: a watched handler does exactly what it does unwatched. Two things are seen that a run alone does not tell:
where a visit that had to be stopped was waiting, and that a callback keeps the event loop for too long in real time
(virtual time cannot pass meanwhile, so no timeout could ever end it).
"""

from __future__ import annotations

import asyncio
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from fsm_rollout.deadlines import being_cancelled
from fsm_rollout.limits import LimitReached
from fsm_rollout.states import State
from fsm_rollout.testing.places import is_users
from fsm_rollout.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from fsm_rollout.visit import Visit

BLOCKING_SECONDS = 5.0
"""Real seconds that one callback may keep the event loop before it counts as blocking."""


@dataclass(frozen=True, slots=True)
class Visited:
    """One visit of a user's handler: how it came out."""

    trajectory_id: str
    state: str
    handler: str
    outcome: object
    """What it returned, or the exception that it raised."""
    where: str = ""
    """Where it was when it was stopped, or where it raised: ``file:line, in function``."""
    declared: tuple[str, ...] = ()
    cancelled: bool = False
    """Whether it had been told to stop: by a timeout, or because its trajectory was."""

    @property
    def stopped(self) -> bool:
        """Whether it was told to stop, and did."""
        return self.cancelled and isinstance(self.outcome, asyncio.CancelledError)

    @property
    def undeclared(self) -> bool:
        """Whether it returned something that is not one of its outcomes."""
        if isinstance(self.outcome, BaseException):
            return False
        return not isinstance(self.outcome, Outcome) or self.outcome.trigger not in self.declared


@dataclass(slots=True)
class Watch:
    """All visits of users' handlers in one run, and whether the loop was blocked."""

    visits: list[Visited] = field(default_factory=list)
    blocked: str | None = None
    """Where the loop was blocked: ``file:line, in function``."""


class HandlerBlocked(KeyboardInterrupt):
    """Ends a run whose loop is blocked. Of this kind because no ordinary ``except`` and no task may keep it."""


class WatchedState(State):
    """A user's handler, watched."""

    def __init__(self, real: State, watch: Watch) -> None:
        super().__init__(real.name, real.spec)
        self.real, self.watch = real, watch
        self.triggers = real.triggers  # type: ignore[misc]  # those of this handler, not of the class
        self.spends = real.spends  # type: ignore[misc]

    async def run(self, trajectory: Trajectory, visit: Visit) -> Outcome:
        """Run the handler."""
        try:
            outcome = await self.real.run(trajectory, visit)
        except LimitReached:
            raise
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            self._note(trajectory, error, _deepest(error.__traceback__))
            raise
        self._note(trajectory, outcome, "")
        return outcome

    def timed_out(self, trajectory: Trajectory, visit: Visit) -> None:
        """Let the handler close what it left open."""
        self.real.timed_out(trajectory, visit)

    def _note(self, trajectory: Trajectory, outcome: object, where: str) -> None:
        cls = type(self.real)
        name = f"{cls.__module__}:{cls.__qualname__}"
        declared = tuple(self.real.triggers)
        cancelled = being_cancelled()
        self.watch.visits.append(
            Visited(trajectory.trajectory_id, self.name, name, outcome, where, declared, cancelled)
        )


def _deepest(tb: TracebackType | None) -> str:
    """Return the innermost place in the user's code; else the innermost."""
    frames = [frame for frame in traceback.extract_tb(tb) if frame.filename != __file__]
    own = [frame for frame in frames if is_users(frame.filename)]
    chosen = (own or frames)[-1:]
    return "".join(f"{frame.filename}:{frame.lineno}, in {frame.name}" for frame in chosen)


def _place(frame: FrameType | None) -> str:
    """Return where a frame stands: in the user's code, if any of it is on the stack."""
    stack: list[FrameType] = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    names = [(f.f_code.co_filename, f.f_lineno, f.f_code.co_qualname) for f in stack]
    loop = next((i for i, (file, *_) in enumerate(names) if file.endswith("asyncio/events.py")), len(names))
    inner = names[:loop] or names
    own = [n for n in inner if is_users(n[0])]
    file, line, name = (own or inner)[0]
    return f"{file}:{line}, in {name}"


@contextmanager
def watchdog(watch: Watch, beats: Callable[[], int | None], seconds: float = BLOCKING_SECONDS) -> Iterator[None]:
    """Interrupt the block when the event loop makes no step for ``seconds`` of real time.

    ``beats`` counts the loop's steps; ``None`` while it rightly waits for something outside. It works in the main
    thread of a Unix process, where an alarm can interrupt anything; elsewhere nothing is watched. An alarm that
    somebody else has set goes on afterwards.

    Raises:
        HandlerBlocked: in the code that blocks; ``watch.blocked`` says where.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int | None] = [-1]

    def alarm(number: int, frame: FrameType | None) -> None:
        now = beats()
        if now is not None and now == seen[0]:
            watch.blocked = _place(frame)
            raise HandlerBlocked(watch.blocked)
        seen[0] = now

    before = signal.signal(signal.SIGALRM, alarm)
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, every)
        signal.signal(signal.SIGALRM, before)
