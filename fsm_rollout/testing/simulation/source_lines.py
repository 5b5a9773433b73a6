"""The lines of code to name in a message, which are the user's own wherever there is one.

Invariant: a place is ``file:line, in function``, innermost first among the files that are neither Python's own nor this
package's.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakSet

T = TypeVar("T")

_PYTHONS = f"{Path(os.__file__).parent}/"
_OURS = f"{Path(__file__).parents[2]}/"
# Where each task of a virtual loop was asked for.
_started: WeakKeyDictionary[asyncio.Task[object], str] = WeakKeyDictionary()

# The tasks that a visit started; not kept alive, so that asyncio complains about those that fail unheard.
tasks_of_visit: ContextVar[WeakSet[asyncio.Task[object]] | None] = ContextVar("tasks of a visit", default=None)
# Where tasks are started that serve several visits.
_SHARED_WORK = ("fsm_rollout/engines/", "fsm_rollout/tools/", "fsm_rollout/concurrency/")


@cache
def is_users(file: str) -> bool:
    """Whether a file is neither Python's own nor of this package."""
    if file.startswith(("<", _OURS)):
        return False
    return "site-packages" in file or not file.startswith(_PYTHONS)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's among a frame and its callers, up to the event loop."""
    while frame is not None and frame.f_code.co_qualname != "Handle._run":
        if is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def place(frame: FrameType) -> str:
    """Return where a frame stands: the innermost line of the user's, else its own."""
    frame = users_frame(frame) or frame
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"


def started(work: object, start: Callable[[], asyncio.Task[T]]) -> asyncio.Task[T]:
    """Start a task, and remember which line of the user's asks for it, if one does, and whose visit.

    What serves several visits is nobody's, and so is what it starts: a tool's connection outlives a call.
    """
    tasks, code = tasks_of_visit.get(), getattr(work, "cr_code", None)
    if code is None or any(folder in code.co_filename for folder in _SHARED_WORK):
        tasks = None
    token = tasks_of_visit.set(tasks)
    try:
        task = start()
    finally:
        tasks_of_visit.reset(token)
    if (frame := users_frame(sys._getframe())) is not None:
        _started[task] = place(frame)
    if tasks is not None:
        tasks.add(task)
    return task


def described(task: asyncio.Task[object]) -> str:
    """Return ``name: outer > … > inner (file:line)``, with the innermost line of the user's that waits.

    Where the task runs none of the user's (``create_task(asyncio.sleep(1))``), the line is the one that started it.
    """
    names, inner, users_line = [], "", None
    for name, file, line in _awaits(task.get_coro()):
        names.append(name)
        if line is not None:
            inner = f"{file}:{line}"
            users_line = inner if is_users(file) else users_line
    if not names:
        return f"{task.get_name()}: {task.get_coro()!r}"
    if users_line is None and task in _started:
        users_line = f"started at {_started[task]}"
    return f"{task.get_name()}: {' > '.join(names)} ({users_line or inner})"


def _awaits(awaitable: object) -> Iterator[tuple[str, str, int | None]]:
    """Follow a coroutine down to its innermost await: names, files and lines."""
    while kind := next((kind for kind in ("cr", "ag", "gi") if hasattr(awaitable, f"{kind}_code")), None):
        code, frame = getattr(awaitable, f"{kind}_code"), getattr(awaitable, f"{kind}_frame")
        yield code.co_qualname, code.co_filename, None if frame is None else frame.f_lineno
        awaitable = getattr(awaitable, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
