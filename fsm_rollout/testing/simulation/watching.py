"""Watching a user's handlers: what each visit came to, and where one blocks or hangs.

Invariant: a watched handler does exactly what it does unwatched. Two things are seen that a run alone does not tell:
where a visit that had to be stopped was waiting, and that a callback keeps the event loop for too long in real time
(virtual time cannot pass meanwhile, so no timeout could ever end it). How slow a machine is makes no fault: what
computes is measured in CPU seconds, short waits count only in calls that are made to wait, and what a module does once,
when it is imported, is let be (interrupting it would leave half a module).
"""

from __future__ import annotations

import ast
import asyncio
import dis
import linecache
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.concurrency.deadline import being_cancelled
from fsm_rollout.states import State
from fsm_rollout.testing.simulation.source_lines import is_users
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from fsm_rollout.states.context import HandlerContext

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
    waits_in: str | None = None
    """The call that it waited in there, as it is written, where that is known."""


class HandlerBlocked(KeyboardInterrupt):
    """Ends a run whose loop is blocked. Of this kind because no ordinary ``except`` and no task may keep it."""


class WatchedState(State):
    """A user's handler, watched."""

    def __init__(self, real: State, watch: Watch) -> None:
        super().__init__(real.name, real.spec)
        self.real, self.watch = real, watch
        self.triggers = real.triggers  # type: ignore[misc]  # those of this handler, not of the class
        self.spends = real.spends  # type: ignore[misc]

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Run the handler."""
        try:
            outcome = await self.real.run(trajectory, ctx)
        except LimitReached:
            raise
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            self._note(trajectory, error, _deepest(error.__traceback__))
            raise
        self._note(trajectory, outcome, "")
        return outcome

    def timed_out(self, trajectory: Trajectory, ctx: HandlerContext) -> None:
        """Let the handler close what it left open."""
        self.real.timed_out(trajectory, ctx)

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


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _waiting_call(frame: FrameType | None) -> str | None:
    """Return the user's call that a thread waits in, if that call, or one that it makes, is known to wait.

    A thread that is being started is waited for, too; how long that takes is the machine's doing.
    """
    known = False
    while frame is not None and frame.f_code.co_qualname not in ("Thread.start", "Handle._run"):
        text, name = _present_call(frame)
        known = known or name in WAITS
        if is_users(frame.f_code.co_filename):
            return text if known else None
        frame = frame.f_back
    return None


def _present_call(frame: FrameType) -> tuple[str, str]:
    """Return the call that a frame is in, as it is written, and its name; of ``with lock:`` that is ``acquire``."""
    code, nothing = frame.f_code, ("", "")
    line, end_line, column, end_column = list(code.co_positions())[frame.f_lasti // 2]
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    if line is None or end_line is None or end_line > len(lines):
        return nothing
    text = [written.encode() for written in lines[line - 1 : end_line]]
    text[-1] = text[-1][:end_column]
    text[0] = text[0][column:]
    said = b"".join(text).decode()
    if dis.opname[code.co_code[frame.f_lasti]] == "BEFORE_WITH":
        return said.partition("\n")[0], "acquire"
    try:
        node = ast.parse(f"({said})", mode="eval").body
    except (SyntaxError, ValueError):
        return nothing
    function = node.func if isinstance(node, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return " ".join(said.split()), name


@contextmanager
def watchdog(watch: Watch, beats: Callable[[], int | None], seconds: float = BLOCKING_SECONDS) -> Iterator[None]:
    """Interrupt the block when the event loop makes no step for ``seconds``, or waits in a known call.

    ``beats`` counts the loop's steps; ``None`` while it rightly waits for something outside. It works in the main
    thread of a Unix process, where an alarm can interrupt anything; elsewhere nothing is watched. An alarm that
    somebody else has set goes on afterwards.

    Raises:
        HandlerBlocked: in the code that blocks; ``watch.blocked`` says where.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    beat: int | None = -1
    still = 0
    place: object = None
    cpu = kept = 0.0

    def alarm(number: int, frame: FrameType | None) -> None:
        nonlocal beat, still, place, cpu, kept
        before, beat = (beat, place, cpu), beats()
        place, cpu = frame and (id(frame), frame.f_lasti), time.thread_time()
        if beat is None or beat != before[0]:
            still, kept = 0, 0.0
            return
        still = still + 1 if place == before[1] and cpu - before[2] < STILL_CPU_SECONDS else 0
        kept += GLANCE_SECONDS if still else cpu - before[2]
        waits_in = _waiting_call(frame) if still >= STILL else None
        if (waits_in is not None or kept >= seconds) and not is_importing(frame):
            watch.blocked, watch.waits_in = _place(frame), waits_in
            raise HandlerBlocked(watch.blocked)

    before = signal.signal(signal.SIGALRM, alarm)
    left, every = signal.setitimer(signal.ITIMER_REAL, GLANCE_SECONDS, GLANCE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, every)
        signal.signal(signal.SIGALRM, before)
