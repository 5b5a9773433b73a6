"""The guard of one session, and the nursery, the one process that forks a guard for each: a session costs milliseconds.

A guard passes calls on to the code's process, watches what it uses, and ends it.

Invariant: the guard runs no code of a session. Between two calls nothing of a session runs but what waits for the next.
Whoever ends first takes the rest along. The nursery ends when the pipe to the run is closed, however the run ended; a
guard ends with the nursery (the kernel sees to it) or when its session is closed; and with a guard, which is the first
process of a process namespace, ends all that its code has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from functools import partial

from fsm_rollout.tools.sandbox.interpreters import serve
from fsm_rollout.tools.sandbox.kernel import ADOPT, libc
from fsm_rollout.tools.sandbox.walls import OUTPUT, build_root, confine, fork_within
from fsm_rollout.tools.sandbox.wire import JSONLines, Settings

_PAGE = resource.getpagesize()
_HERTZ = os.sysconf("SC_CLK_TCK")


def guard(settings: Settings, run: socket.socket, folder: str) -> None:
    """Serve one session: pass calls on, watch them, and begin the code's process anew when it has ended."""
    # 1. Where it is: a file system of its own, or a folder of its own.
    if settings["namespaces"]:
        build_root(settings)
        folder = "/tmp"
    else:
        libc.prctl(ADOPT, 1)  # what leaves its parent comes here, where it is found
        os.setsid()
    process: _Process | None = None
    lines = JSONLines(run)
    run.sendall(b'{"ready": true}\n')
    # 2. Calls, one after the other.
    while (request := lines.next()) is not None:
        if process is None:
            process = _Process(settings, folder)
        text, ended = process.call(request, settings, run)
        if ended is not None:
            process.kill()
            process = None
        kill_all_but(process.kept if process is not None else set())
        answer = {"text": text[: settings["output"]], "cut": len(text) > settings["output"], "ended": ended}
        run.sendall(json.dumps(answer).encode() + b"\n")
    kill_all_but(set())


class _Exceeded(Exception):
    """Running code uses more than it may."""


class _Process:
    """The process of a session's code."""

    def __init__(self, settings: Settings, folder: str) -> None:
        request, self._requests = os.pipe()
        answers, answer = os.pipe()
        self.pid = os.fork()
        self.kept = {self.pid}  # the processes that wait for the next call
        if self.pid == 0:
            try:
                os.close(self._requests)
                os.close(answers)
                confine(settings, folder, keep=(request, answer))
                serve(settings["language"], request, answer, OUTPUT if settings["namespaces"] else folder)
            finally:
                os._exit(1)
        os.close(request)
        os.close(answer)
        self._answers = answers
        self._lines = JSONLines(answers)

    def call(self, request: dict[str, str], settings: Settings, run: socket.socket) -> tuple[str, str | None]:
        """Have code run; return its output, and why the session ended with it, if it did.

        When ``run`` is closed, the connection to who asked, nobody waits for the output, and the code is ended.
        """
        used = _use(self.pid)[1]
        until = time.monotonic() + settings["seconds"]

        def watch() -> None:
            if select.select([run], [], [], 0)[0] and not run.recv(1, socket.MSG_PEEK):
                raise _Exceeded("exit")
            memory, cpu, processes = _use(self.pid)
            if memory > settings["memory"]:
                raise _Exceeded("memory")
            if cpu - used > settings["cpu_seconds"]:
                raise _Exceeded("cpu time")
            if processes > settings["processes"]:
                raise _Exceeded("processes")

        try:
            data = json.dumps({**request, "output": settings["output"] + 1}).encode() + b"\n"
            while data:  # a pipe that is not read is full after 64 kB
                _, writable, _ = select.select([], [self._requests], [], max(0.0, until - time.monotonic()))
                if not writable:
                    raise TimeoutError
                data = data[os.write(self._requests, data[:4096]) :]
            answer = self._lines.next(until, watch)
        except TimeoutError:
            return "", "time"
        except _Exceeded as error:
            return "", str(error)
        except (ValueError, OSError):
            return "", "broken"
        if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
            return "", "exit"
        shell = answer.get("shell") if settings["language"] == "bash" else None
        self.kept = {self.pid, shell} if isinstance(shell, int) else {self.pid}
        return answer["text"], "exit" if answer.get("exit") else None

    def kill(self) -> None:
        """End it, and all that it has started."""
        kill_all_but(set())
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        for descriptor in (self._requests, self._answers):
            os.close(descriptor)


def _others() -> list[int]:
    """Return the processes of this guard's session."""
    if os.getpid() == 1:
        with contextlib.suppress(OSError):
            return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != 1]
        return []
    return list(descendants(os.getpid()))


def descendants(root: int) -> Iterator[int]:
    """Yield the processes below a process, as far as they have not left it."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                parents.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    waiting = list(parents.get(root, ()))
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += parents.get(pid, ())


def kill_all_but(kept: set[int]) -> None:
    """Kill the other processes of the session, the code's own among them if it is not kept, and wait for their end."""
    for _ in range(100):  # what forks while it is killed is killed in the next round
        if not kept and os.getpid() == 1:
            with contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)
        strays = [pid for pid in _others() if pid not in kept]
        for pid in strays:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] > 0:
                pass
        if not strays:
            return
        time.sleep(0.001)


def _use(code: int) -> tuple[int, float, int]:
    """Return the memory in bytes, the CPU time in seconds and the number of a session's processes."""
    memory, ticks, count = 0, 0, 0
    for pid in {*_others(), code}:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                pages, own = use_of(file.read(), with_children=pid == code)
            memory += pages * _PAGE
            ticks += own
            count += 1
    return memory, ticks / _HERTZ, count


def use_of(stat: bytes, *, with_children: bool) -> tuple[int, int]:
    """Return the pages that a process has, and its ticks, from its ``/proc/PID/stat``; also its ended children's."""
    fields = stat.rpartition(b")")[2].split()
    return int(fields[21]), sum(map(int, fields[11:15] if with_children else fields[11:13]))


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
