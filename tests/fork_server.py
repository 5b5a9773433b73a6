"""Processes forked from one that has imported what takes long: torch costs seconds of a core, a fork next to nothing.

What tests look at is the same: exit statuses, what is printed, signals, files left behind, how the interpreter ends.
Only those that test what is imported, and from where, start a fresh process.

With pytest-xdist one such process serves all: its workers are forked from it (this file stands in for their Python),
and so are the programs that tests start. SGLang's servers have one of their own.
"""

import atexit
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO, Any

ADDRESS = "FSM_ROLLOUT_TESTS_FORK_SERVER"
"""Where the process listens from which all processes of a test run are forked."""
HEAVY = (
    "fsm_rollout.cli", "fsm_rollout.jobs.runner", "fsm_rollout.batch.batch", "fsm_rollout.engines.transformers.engine",
    "transformers.models.qwen3.modeling_qwen3", "pytest", "tests.kit",
)  # fmt: skip
"""What takes longest to import of what programs need."""
COLLECTED = (
    "fsm_rollout.serve.server", "fsm_rollout.testing.plugin.agent_checks", "fsm_rollout.testing.conformance.state",
    "hypothesis", "transformers.models", "anthropic",
)  # fmt: skip
"""What more takes long of what pytest-xdist's workers import when they collect."""
ROOT = Path(__file__).resolve().parent.parent


# -- who asks for processes -------------------------------------------------------------------------------------------


class ForkServer:
    """The process that forks others, as long as this one lives.

    Args:
        imports: The modules that it imports.
    """

    def __init__(self, imports: Iterable[str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.address = f"{self._folder.name}/listens"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)
            command = [sys.executable, "-m", __name__, str(listener.fileno()), *imports]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = Popen(command, stdin=PIPE, cwd=ROOT, env=environment, pass_fds=[listener.fileno()])
        atexit.register(self.close)

    def close(self) -> None:
        """End the process; those that it has forked go on."""
        atexit.unregister(self.close)
        self._process.communicate()
        self._folder.cleanup()


class Forked:
    """A process that somebody else has forked: as much of a ``subprocess.Popen`` as is asked for."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(_line(connection))
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code, or raise TimeoutError."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            self.returncode = int(_line(self._connection))
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, once somebody has waited for it."""
        return self.returncode

    def kill(self) -> None:
        """Kill it if it still runs."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _line(connection: socket.socket) -> bytes:
    """Read a line, and no byte of what follows; nothing follows where the server has ended."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := connection.recv(1)):
            raise RuntimeError("the process that forks others has ended")
        line += byte
    return line


def fork(address: str, code: str, streams: Sequence[int], **order: Any) -> Forked:
    """Have the server at an address run code as ``python -c`` does.

    Args:
        address: Of the server.
        code: What is run.
        streams: What become its standard input, output and errors.
        order: What else :func:`_become` reads, where it is not as here.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    text = json.dumps({"cwd": os.getcwd(), "environment": dict(os.environ), **order, "code": code})
    socket.send_fds(connection, [b" "], streams)
    connection.sendall(text.encode() + b"\n")
    return Forked(connection)


# -- the server -------------------------------------------------------------------------------------------------------


def serve(listener: socket.socket) -> None:
    """Fork a process for each order, and say its id and its exit code, until the standard input ends."""
    reads, writes = socket.socketpair()
    writes.setblocking(False)
    before = [
        (number, signal.signal(number, handler))
        for number, handler in ((signal.SIGCHLD, lambda *_: None), (signal.SIGINT, signal.SIG_IGN))
    ]
    signal.set_wakeup_fd(writes.fileno())
    asked: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for file in (0, reads, listener):
            selector.register(file, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if 0 in ready:
                return
            if reads in ready:
                reads.recv(4096)
                while asked:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if not pid:
                        break
                    with asked.pop(pid) as connection, suppress(OSError):  # whoever asked may be gone
                        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            if listener in ready:
                connection, _ = listener.accept()
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
                with connection.makefile("rb") as sent:
                    order = json.loads(sent.readline())
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    for number, handler in before:
                        signal.signal(number, handler)
                    for file in (reads, writes, listener, connection, *asked.values()):
                        file.close()
                    _become(order, descriptors)
                asked[pid] = connection
                for descriptor in descriptors:
                    os.close(descriptor)
                with suppress(OSError):
                    connection.sendall(b"%d\n" % pid)


def _become(order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Be the program of an order, to its end."""
    if order.get("session"):
        os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    for descriptor in descriptors:
        if descriptor > 2:
            os.close(descriptor)
    os.chdir(order["cwd"])
    for name in {*os.environ} - {*order["environment"]}:
        del os.environ[name]
    os.environ.update({name: text for name, text in order["environment"].items() if os.environ.get(name) != text})
    sys.path[:], sys.argv = order.get("path", sys.path), order.get("argv", ["-c"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]
    status = 0
    try:
        exec(compile(order["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    if order.get("finalized"):  # takes a second where torch is loaded
        ctypes.pythonapi.Py_Exit(status)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "-u":  # pytest-xdist starts this as if it were Python: -u -c CODE
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the worker
        worker = fork(os.environ[ADDRESS], sys.argv[3], (0, 1, 2))
        for taken in range(2):
            os.close(taken)
        sys.exit(worker.wait())
    for module in sys.argv[2:]:
        with suppress(Exception):  # an extra may be missing; what is broken fails the tests that import it
            import_module(module)
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # to finalize the interpreter takes a second of what it has imported
