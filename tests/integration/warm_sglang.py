"""SGLang's server, forked from a process that has imported SGLang: a start of its own imports for 8 s of a core.

All else is as when :class:`ServerProcess` starts a program: standard input and output, environment, session, exit code.
One test still starts the program (the documentation's page on SGLang).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

from fsm_rollout.engines.sglang import cpu, process
from tests.kit import ROOT


class WarmSGLang:
    """Stands in for the module ``subprocess`` where the server is started."""

    PIPE, STDOUT = subprocess.PIPE, subprocess.STDOUT

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        self._orders.recv(100)  # it has imported SGLang

    def Popen(self, command: list[str], *, env: Mapping[str, str], stdout: IO[bytes], **_: Any) -> ForkedServer:  # noqa: N802
        """Fork a server; ``command`` is what would have been started."""
        assert command[1:] == ["-m", process.__name__]
        (reads, stdin), (status, says) = os.pipe(), os.pipe()
        with self._lock:
            socket.send_fds(self._orders, [json.dumps(dict(env)).encode()], [reads, stdout.fileno(), says])
            pid = int(self._orders.recv(100))
        os.close(reads)
        os.close(says)
        return ForkedServer(pid, stdin, status)

    def close(self) -> None:
        """End the process that forks; servers end with their standard input."""
        self._orders.close()
        self._process.wait()


class ForkedServer:
    """As much of a ``subprocess.Popen`` as is asked for."""

    def __init__(self, pid: int, stdin: int, status: int) -> None:
        self.pid = pid
        self.stdin = open(stdin, "wb")  # noqa: SIM115  # closed by whoever ends the server
        self._status = status
        self._returncode: int | None = None

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        with open(self._status) as status:
            self._returncode = int(status.read())
        return self._returncode

    def poll(self) -> int | None:
        """Return the exit code, once :meth:`wait` has."""
        return self._returncode


def _fork_servers(orders: socket.socket) -> None:
    """Fork a server for each order: its environment, and its standard input, its output and where its end is told."""
    os.set_inheritable(orders.fileno(), False)
    cpu.prepare(1)
    import sglang.launch_server
    import sglang.srt.plugins
    import sglang.srt.server_args  # noqa: F401

    orders.send(b"ready")
    while True:
        environment, descriptors, _, _ = socket.recv_fds(orders, 1 << 20, 3)
        if not environment:
            return
        pid = os.fork()
        if not pid:
            orders.close()
            _become_server(json.loads(environment), *descriptors)
        stdin, output, says = descriptors
        os.close(stdin)
        os.close(output)
        threading.Thread(target=_tell_end, args=(pid, says), daemon=True).start()
        orders.send(str(pid).encode())


def _tell_end(pid: int, says: int) -> None:
    _, status = os.waitpid(pid, 0)
    with open(says, "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))


def _become_server(environment: dict[str, str], stdin: int, output: int, says: int) -> None:
    os.setsid()
    for descriptor, target in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    for descriptor in (stdin, output, says):
        os.close(descriptor)
    for name in {*os.environ} - {*environment}:
        del os.environ[name]
    os.environ.update({name: text for name, text in environment.items() if os.environ.get(name) != text})
    sys.stdin = open(0)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    status = 1
    try:
        process.main()
        status = 0
    except SystemExit as ended:
        print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    os._exit(status)


if __name__ == "__main__":
    _fork_servers(socket.socket(fileno=int(sys.argv[1])))
