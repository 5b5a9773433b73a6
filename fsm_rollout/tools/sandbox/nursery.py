"""The nursery: one process that forks a guard for each session, so that a session costs milliseconds.

Invariant: whoever ends first takes the rest along. The nursery ends when the pipe to the run is closed, however the run
ended; a guard ends with the nursery (the kernel sees to it) or when its session is closed; and with a guard, which is
the first process of a process namespace, ends all that its code has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import tempfile
from functools import partial

from fsm_rollout.tools.sandbox.guard import descendants, guard
from fsm_rollout.tools.sandbox.kernel import ADOPT, libc
from fsm_rollout.tools.sandbox.walls import fork_within


def nursery(control: socket.socket) -> None:
    """Fork a guard for each descriptor that comes, until the pipe to the run is closed."""
    guards: dict[int, str] = {}
    libc.prctl(ADOPT, 1)  # what a guard leaves behind without namespaces comes here
    while True:
        readable, _, _ = select.select([control], [], [], 1.0)
        if readable:
            data, descriptors, _, _ = socket.recv_fds(control, 65536, 1)
            if not data:
                break
            settings = json.loads(data)
            folder = "" if settings["namespaces"] else tempfile.mkdtemp(prefix="sandbox-", dir=settings["folder"])
            with socket.socket(fileno=descriptors[0]) as session:
                work = partial(guard, settings, session, folder)
                guards[fork_within(work, session, [control], namespaces=settings["namespaces"])] = folder
        _reap(guards)
    for pid in guards:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for folder in guards.values():
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _reap(guards: dict[int, str]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
            if folder := guards.pop(pid, ""):
                shutil.rmtree(folder, ignore_errors=True)
