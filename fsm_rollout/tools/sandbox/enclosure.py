"""Programs behind walls that let one address through: foreign agents, with files and tests of their own.

Invariant: what runs here sees no file of the host but programs (to read only), and reaches no machine and no socket but
the one port of the loopback interface that it was given; all that it has written and started ends with it. What it has
started is gone before the next command runs, and a command's own files are written anew before it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import socket
import struct
import threading
from functools import partial
from typing import Any

from fsm_rollout.tools.sandbox.guard import kill_all_but
from fsm_rollout.tools.sandbox.walls import OUTPUT, build_root, confine, fork_within
from fsm_rollout.tools.sandbox.wire import JSONLines, Settings

WORK, HOME = "/tmp/work", "/tmp/home"  # in the walls: where files are put and commands run, and what is their HOME
SHOWN = 20_000  # characters of the end of a command's output that come back
_SET_FLAGS, _UP = 0x8914, 1


def enclosure(run: socket.socket) -> None:
    """Read a job from the run, do it behind walls, and say how its commands ended; end when the run hangs up."""
    job: Settings | None = JSONLines(run).next()
    if job is None:
        return
    ours, theirs = socket.socketpair()
    with theirs:
        fork_within(partial(_work, job, theirs), theirs, [run, ours], namespaces=True)
    data, descriptors, _, _ = socket.recv_fds(ours, 1 << 16, 1)
    if descriptors:
        listener = socket.socket(fileno=descriptors[0])
        threading.Thread(target=_let_through, args=(listener, job["port"]), daemon=True).start()
        while ours not in (readable := select.select([ours, run], [], [])[0]):
            if run in readable and not run.recv(1):
                os._exit(0)  # and the walls fall with this process
        with ours.makefile("rb") as told:
            data = told.readline()
    run.sendall(data or b'{"failed": "the enclosure ended"}\n')


def _work(job: Settings, run: socket.socket) -> None:
    """Do a job, as what starts all in these namespaces, and say how its commands ended."""
    listener = _listener(job["port"])
    socket.send_fds(run, [b"!"], [listener.detach()])
    build_root(job)
    _write(job["files"])
    os.makedirs(HOME, mode=0o777, exist_ok=True)
    os.chmod(HOME, 0o777)
    ended = [_command(command, job) for command in job["commands"]]
    run.sendall(json.dumps({"ended": ended}).encode() + b"\n")


def _listener(port: int) -> socket.socket:
    """Raise the namespace's own loopback interface and listen on it; connections to it are had from outside."""
    listener = socket.socket()
    fcntl.ioctl(listener, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    return listener


def _write(files: dict[str, str]) -> None:
    """Write files, by paths below WORK, or absolute ones below /tmp, for anybody to change."""
    for name, text in {".": "", **files}.items():
        path = os.path.normpath(os.path.join(WORK, name))
        if not path.startswith((WORK, HOME)):
            raise ValueError(f"{name}: is not below {WORK} or {HOME}")
        folder = path if name == "." else os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        while folder != "/tmp":
            os.chmod(folder, 0o777)
            folder = os.path.dirname(folder)
        if name != ".":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # never through a link that a command has left
            with open(path, "x") as file:
                file.write(text)
            os.chmod(path, 0o666)


def _command(command: dict[str, Any], job: Settings) -> dict[str, Any]:
    """Run one command to its end; return its exit code and the end of what it wrote."""
    _write(command["files"])
    output = os.open(f"{OUTPUT}/output", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    pid = os.fork()
    if pid == 0:
        try:
            confine(job, WORK, (output,))
            os.umask(0o022)
            resource.setrlimit(resource.RLIMIT_DATA, (job["data"], job["data"]))
            os.dup2(output, 1)
            os.dup2(output, 2)
            words = command["words"]
            os.execvpe(words[0], words, dict(os.environ) | {"HOME": HOME} | command["env"])
        except BaseException as error:
            os.write(output, f"{command['words'][0]} could not be started: {error}".encode())
            os._exit(127)
    while True:  # what is orphaned comes here, too
        ended, status = os.wait()
        if ended == pid:
            break
    kill_all_but(set())
    size = os.fstat(output).st_size
    text = os.pread(output, 4 * SHOWN, max(0, size - 4 * SHOWN)).decode(errors="replace")[-SHOWN:]
    os.close(output)
    return {"code": os.waitstatus_to_exitcode(status), "output": text}


def _let_through(listener: socket.socket, port: int) -> None:
    """Connect what comes to the walls' port with the same port outside."""
    while True:
        inner, _ = listener.accept()
        outer = socket.create_connection(("127.0.0.1", port))
        for source, target in ((inner, outer), (outer, inner)):
            threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
