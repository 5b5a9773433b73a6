"""A tool's code in another process: a heavy tool neither slows the trajectories down nor takes them with it.

Invariant: what goes there and what comes back is plain, picklable data; a call that is given up is killed, not left
running; and an error comes back as the tool raised it (as a RuntimeError with its name where it cannot travel).
"""

from __future__ import annotations

import asyncio
import importlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any, cast

from anyio import BrokenWorkerProcess, CapacityLimiter
from anyio.to_process import run_sync

from fsm_rollout.handlers import load_object
from fsm_rollout.tools import told
from fsm_rollout.tools.base import ToolResult
from fsm_rollout.tools.call import is_async


class ToolDied(Exception):
    """The process that ran a tool ended without an answer (killed, out of memory, or it crashed)."""


async def in_process(use: str, arguments: Mapping[str, Any]) -> Any:
    """Call the function ``use`` (``module:name``) in a worker process; cancelling the call kills that process.

    Workers stay for the next call of any tool, so modules are imported once in each.

    Raises:
        ToolDied: the process ended without an answer.
        Exception: whatever the function raises.
    """
    try:
        # A limiter of its own: how many run at once is the toolbox's to say.
        value, error = await run_sync(run_here, use, dict(arguments), cancellable=True, limiter=CapacityLimiter(1))
    except BrokenWorkerProcess as error:
        raise ToolDied(f"the process of tool '{use}' ended without an answer") from error
    if error is not None:
        raise error
    return value


def run_here(use: str, arguments: dict[str, Any]) -> tuple[Any, Exception | None]:
    """Call a tool's function in this process, and return what it gave, or its error, in a form that can travel."""
    importlib.invalidate_caches()
    try:
        function = cast(Callable[..., Any], load_object(use))
        value = function(**arguments)
        if is_async(function):
            value = asyncio.run(value)
        return (value if isinstance(value, ToolResult) else told.result(value)), None
    except (KeyboardInterrupt, SystemExit) as error:
        return None, RuntimeError(f"{type(error).__name__}: {error}")
    except Exception as error:
        return None, portable(error)


def portable(error: Exception) -> Exception:
    """Return an error that can be pickled and unpickled: itself if it can."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its own pickling does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
