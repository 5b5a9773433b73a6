"""Where code is: the lines to name in a message, which are the user's own wherever there is one.

Invariant: a place is ``file:line``, innermost first among the files that are neither Python's own nor this package's.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_PYTHONS = f"{Path(os.__file__).parent}/"
_OURS = f"{Path(__file__).parents[2]}/"


@cache
def is_users(file: str) -> bool:
    """Whether a file is neither Python's own nor of this package."""
    if file.startswith(("<", _OURS)):
        return False
    return "site-packages" in file or not file.startswith(_PYTHONS)


def caller() -> str | None:
    """Return the line of the user's that is running, if there is one between here and the event loop."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_qualname != "Handle._run":
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return None


def raised(tb: TracebackType | None) -> str | None:
    """Return the innermost line of the user's that an exception came through."""
    for frame in reversed(traceback.extract_tb(tb)):
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None


def described(task: asyncio.Task[Any], started: str | None = None) -> str:
    """Return ``name: outer > … > inner (file:line)``, with the innermost line of the user's that waits.

    Where the task runs none of the user's (``create_task(asyncio.sleep(1))``) it is ``started``, if that is known.
    """
    names, inner, own = [], "", None
    for name, file, line in _chain(task.get_coro()):
        names.append(name)
        if line is not None:
            inner = f"{file}:{line}"
            own = inner if is_users(file) else own
    if not names:
        where = repr(task.get_coro())
    elif own is None and started is not None:
        where = f"{' > '.join(names)} (started at {started})"
    else:
        where = f"{' > '.join(names)} ({own or inner})"
    return f"{task.get_name()}: {where}"


def _chain(waits: Any) -> Iterator[tuple[str, str, int | None]]:
    """Follow a coroutine down to its innermost await: names, files and lines."""
    while (kind := next((kind for kind in ("cr", "ag", "gi") if hasattr(waits, f"{kind}_code")), None)) is not None:
        code, frame = getattr(waits, f"{kind}_code"), getattr(waits, f"{kind}_frame")
        yield code.co_qualname, code.co_filename, None if frame is None else frame.f_lineno
        waits = getattr(waits, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
