"""A tool's code in another process: a heavy tool neither slows the trajectories down nor takes them with it.

Invariant: what goes there and what comes back is plain, picklable data; a call that is given up is killed with all that
it started; and an error comes back as the tool raised it (as a RuntimeError with its name where it cannot travel).
"""

from __future__ import annotations

import asyncio
import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from fsm_rollout.agent.handlers import load_object
from fsm_rollout.tools import tool_messages
from fsm_rollout.tools.base import ToolResult
from fsm_rollout.tools.call import invoke, is_async

_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from fsm_rollout.tools.worker import main; main(int(sys.argv[2]))"
)


class ToolDied(Exception):
    """What ran a tool elsewhere ended without an answer, or could not be told of the call. Not the model's fault."""


class _Worker:
    """A worker process, in a session of its own, so that it can be ended with all that it started."""

    def __init__(self) -> None:
        package = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, package, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._send(pickle.dumps(sys.path))

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def call(self, request: bytes) -> Any:
        """Send a request and wait for its answer; from any one thread."""
        assert self._process.stdout is not None
        try:
            self._send(len(request).to_bytes(8, "big") + request)
            size = self._process.stdout.read(8)
            answer = self._process.stdout.read(int.from_bytes(size, "big")) if len(size) == 8 else b""
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile
            raise ToolDied(f"its process ended without an answer: {error}") from error
        if not answer:
            raise ToolDied(f"its process ended without an answer (exit code {self._process.poll()})")
        return pickle.loads(answer)

    def kill(self) -> None:
        """End it and everything that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


_lock = threading.Lock()
_idle: list[_Worker] = []


def _worker() -> _Worker:
    """Return a worker that is free, a new one if need be: modules are imported once in each."""
    while True:
        with _lock:
            worker = _idle.pop() if _idle else None
        if worker is None:
            return _Worker()
        if worker.alive:
            return worker
        worker.kill()


@atexit.register
def _dismiss() -> None:
    while _idle:
        _idle.pop().kill()


async def in_process(use: str, arguments: Mapping[str, Any]) -> Any:
    """Call the function ``use`` (``module:name``) in a worker process; cancelling the call kills that process.

    Raises:
        ToolDied: the process ended without an answer, or the arguments cannot be sent.
        Exception: whatever the function raises.
    """
    try:
        request = pickle.dumps((use, dict(arguments)))
    except Exception as error:  # whatever the objects' own pickling does
        raise ToolDied(f"the call cannot be sent to another process: {error}") from error
    worker = _worker()
    try:
        value, raised = await invoke(worker.call, {"request": request})
    except BaseException:  # a call that is given up; the thread that waits for it sees the pipe close
        await asyncio.shield(invoke(worker.kill, {}))
        raise
    with _lock:
        _idle.append(worker)
    if raised is not None:
        raise raised
    return value


def answered(request: bytes) -> bytes:
    """Carry out a request here and return the answer, packed."""
    use, arguments = pickle.loads(request)
    value, error = run_here(use, arguments)
    try:
        return pickle.dumps((value, error))
    except Exception as unpicklable:
        return pickle.dumps((None, RuntimeError(f"what '{use}' returned cannot be sent back: {unpicklable}")))


def run_here(use: str, arguments: dict[str, Any]) -> tuple[Any, Exception | None]:
    """Call a tool's function in this process, and return what it gave, or its error, in a form that can travel."""
    try:
        function = cast(Callable[..., Any], load_object(use))
        value = function(**arguments)
        if is_async(function):
            value = asyncio.run(value)
        return (value if isinstance(value, ToolResult) else tool_messages.result(value)), None
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
