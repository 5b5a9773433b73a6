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

from fsm_rollout.tools.sandbox.guard import descendants, guard
from fsm_rollout.tools.sandbox.kernel import ADOPT, DIE_WITH_PARENT, NAMESPACES, checked, libc
from fsm_rollout.tools.sandbox.walls import map_users
from fsm_rollout.tools.sandbox.wire import Settings


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
            pid = _fork_guard(settings, descriptors[0], control, folder)
            guards[pid] = folder
            os.close(descriptors[0])
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


def _fork_guard(settings: Settings, descriptor: int, control: socket.socket, folder: str) -> int:
    """Fork a guard, into namespaces of its own where ``settings`` say so; return its process id."""
    entered, has_entered = os.pipe()  # told when the process is in its namespaces
    mapped, users_mapped = os.pipe()  # closed once their users are mapped
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for ours in (control.detach(), entered, users_mapped):
                os.close(ours)
            if settings["namespaces"]:
                checked(libc.unshare, NAMESPACES)
                os.write(has_entered, b"!")
            libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)  # ends with the nursery
            os.close(has_entered)
            os.read(mapped, 1)
            os.close(mapped)
            if not settings["namespaces"] or _is_first(descriptor):
                guard(settings, socket.socket(fileno=descriptor), folder)
            status = 0
        except BaseException as error:  # whatever it is, this process ends here; the run hears why
            _tell_failure(descriptor, error)
        finally:
            os._exit(status)
    os.close(has_entered)
    os.close(mapped)
    try:
        if os.read(entered, 1):
            map_users(pid)
    except OSError as error:
        _tell_failure(descriptor, error)
        os.kill(pid, signal.SIGKILL)
    finally:
        os.close(entered)
        os.close(users_mapped)
    return pid


def _is_first(descriptor: int) -> bool:
    """Fork the first process of the new process namespace, which this one is not in; return which of them returns.

    The other waits for it, without the session's descriptor, and ends when it ends.
    """
    pid = os.fork()
    if pid == 0:
        libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        return True
    os.close(descriptor)
    os.waitpid(pid, 0)
    return False


def _tell_failure(descriptor: int, error: BaseException) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
