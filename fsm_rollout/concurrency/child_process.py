"""Python processes of this package's own, for tools and for shards.

Invariant: the caller's script is never run again in one, and what it prints goes to the standard error. It leads a
session of its own, so it can be killed with all that it has started there, and it outlives its parent by a second at
most, however that ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from contextlib import suppress
from importlib import import_module
from pathlib import Path

WATCH_SECONDS = 1.0  # how often a child looks whether its parent is still there
_START = """
import sys
sys.path.insert(0, sys.argv[1])
from fsm_rollout.concurrency.child_process import main
main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
"""


class ChildProcess:
    """A process that calls ``entry`` (``module:function``) with a descriptor that it inherits, and ends after that."""

    def __init__(self, entry: str, descriptor: int) -> None:
        package = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, package, entry, str(descriptor), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[descriptor],
            start_new_session=True,  # a Ctrl-C is for the parent, which stops its children in order
        )
        self._end = weakref.finalize(self, _kill, self._process)
        self._end.atexit = False  # it ends with its parent by itself

    @property
    def exit_code(self) -> int | None:
        """How it ended; ``None`` while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it and everything that it has started; so ends a process that is thrown away. Safe to call twice."""
        self._end()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(entry: str, descriptor: int, parent: int) -> None:
    """Be a child of the process ``parent``."""
    os.set_inheritable(descriptor, False)  # not for the programs that tools start
    threading.Thread(target=_end_with, args=(parent,), name="fsm-rollout-watch", daemon=True).start()
    module, _, name = entry.partition(":")
    try:
        getattr(import_module(module), name)(descriptor)
    except (OSError, EOFError):
        pass  # the parent is gone
    except BaseException:
        traceback.print_exc()
    _end()


def _end_with(parent: int) -> None:
    """End with the parent: one that is killed cannot say so, and a child at work does not hear that its pipe closes."""
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(WATCH_SECONDS)
    _end()


def _end() -> None:
    """End this process, and with it all that was started in its session."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
