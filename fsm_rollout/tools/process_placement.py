"""A tool's code in another process: a heavy tool neither slows the trajectories down nor takes them with it.

Invariant: arguments and results are plain, picklable data. A call that is given up is killed with all that it started.
An error comes back as the tool raised it (as a RuntimeError with its name where it cannot travel). The caller's script
is never run again in a worker, and what a tool prints goes to the standard error. A worker outlives its caller by a
second at most, however that ends, and leaves nothing that a tool started in its session.

The pools of anyio and of the standard library do none of this: they run the caller's script again, which may be a
training script without a main guard, and end the worker only.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TypeAlias, cast

from fsm_rollout.agent.handlers import load_object
from fsm_rollout.tools import tool_messages
from fsm_rollout.tools.base import ToolResult
from fsm_rollout.tools.call import ToolDied, invoke, is_async
from fsm_rollout.tools.schema import Function

WATCH_SECONDS = 1.0
"""How often a worker looks whether the process that started it is still there."""

Answer: TypeAlias = tuple[str | ToolResult | None, Exception | None]
"""What a tool returned, as text, or the error that it raised."""


async def call_in_process(use: str, arguments: Mapping[str, object]) -> object:
    """Call the function ``use`` (``module:name``) in a worker process; cancelling the call kills that process.

    Raises:
        ToolDied: the process ended without an answer, or the arguments cannot be sent.
        Exception: whatever the function raises.
    """
    try:
        request = pickle.dumps((use, dict(arguments)))
    except Exception as error:  # whatever the objects' own pickling does
        raise ToolDied(f"the call cannot be sent to another process: {error}") from error
    worker = _free_worker()
    try:
        value, raised = cast(Answer, await invoke(worker.call, {"request": request}))
    except BaseException:  # the call is given up; the thread that waits for it sees the pipe close
        await asyncio.shield(invoke(worker.kill, {}))
        raise
    _idle.append(worker)
    if raised is not None:
        raise raised
    return value


class _Worker:
    """A worker process, in a session of its own, so that it can be killed with all that it started."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        package = str(Path(__file__).parents[2])
        arguments = [package, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._pipe.send(sys.path)

    def call(self, request: bytes) -> Answer:
        """Send a request and wait for its answer; from any one thread."""
        try:
            self._pipe.send_bytes(request)
            answer = self._pipe.recv_bytes()
        except (OSError, EOFError) as error:
            raise ToolDied(f"its process ended without an answer (exit code {self._process.poll()})") from error
        return cast(Answer, pickle.loads(answer))

    def kill(self) -> None:
        """End it and everything that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


_idle: list[_Worker] = []
"""Shared by all threads; `pop` and `append` are atomic."""


def _free_worker() -> _Worker:
    """Return a worker that is free, a new one if need be: modules are imported once in each."""
    with suppress(IndexError):
        while not (worker := _idle.pop()).alive:
            worker.kill()
        return worker
    return _Worker()


@atexit.register
def _dismiss() -> None:
    while _idle:
        _idle.pop().kill()


# In the worker.

_START = """
import sys
sys.path.insert(0, sys.argv[1])
from fsm_rollout.tools.process_placement import serve
serve(int(sys.argv[2]), int(sys.argv[3]))
"""


def serve(descriptor: int, parent: int) -> None:
    """Answer calls, one at a time, until the process ``parent``, which has the other end of the pipe, is gone."""
    os.set_inheritable(descriptor, False)  # not for the programs that tools start
    threading.Thread(target=_end_with, args=(parent,), name="fsm-rollout-watch", daemon=True).start()
    pipe = Connection(descriptor)
    with suppress(OSError, EOFError):  # the other end is gone
        sys.path[:] = pipe.recv()
        while True:
            request = pipe.recv_bytes()
            importlib.invalidate_caches()
            pipe.send_bytes(_answer(*pickle.loads(request)))
    _end()


def _end_with(parent: int) -> None:
    """End with the parent: one that is killed during a call cannot say so, and the pipe is read between calls only."""
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(WATCH_SECONDS)
    _end()


def _end() -> None:
    """End this process, and with it all that tools have started in its session."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _answer(use: str, arguments: dict[str, object]) -> bytes:
    answer = run_here(use, arguments)
    try:
        return pickle.dumps(answer)
    except Exception as error:  # whatever a subclass's own pickling does
        return pickle.dumps((None, RuntimeError(f"what '{use}' returned cannot be sent back: {error}")))


def run_here(use: str, arguments: dict[str, object]) -> Answer:
    """Call a tool's function in this process, and return what it gave, or its error, in a form that can travel."""
    try:
        function = cast(Function, load_object(use))
        value = function(**arguments)
        return sendable(
            asyncio.run(cast("Coroutine[object, object, object]", value)) if is_async(function) else value
        ), None
    except (KeyboardInterrupt, SystemExit) as error:
        return None, RuntimeError(f"{type(error).__name__}: {error}")
    except Exception as error:  # whatever the tool raises
        return None, portable(error)


def sendable(value: object) -> str | ToolResult:
    """Return what a tool returned in a form that any process can unpickle."""
    return value if isinstance(value, ToolResult) else tool_messages.result(value)


def portable(error: Exception) -> Exception:
    """Return an error that can be pickled and unpickled: itself if it can."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its own pickling does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
