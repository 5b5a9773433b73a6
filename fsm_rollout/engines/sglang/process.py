"""SGLang's own server, started here and ended with us: both ends of that.

Invariant: the server lives at most as long as whoever started it. It has a pipe as its standard input; when that
closes, because the engine is closed or its process has died in whatever way, the server ends all of SGLang's processes
and itself. When the server is killed itself, at any time, SGLang's processes die with it.

    python -m fsm_rollout.engines.sglang.process < a line of JSON, and then nothing until the end

Why a process of its own: SGLang installs signal handlers and answers any failure with SIGQUIT, which by default kills
the process it is in; it keeps its settings in globals, so two engines in one process would share them; closing one
kills *all* children of its process; and it starts processes that import the main script again. None of that may happen
to whoever uses the engine. It also keeps SGLang's own Python work off the caller's interpreter.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from fsm_rollout.engines.sglang import cpu as sglang_cpu
from fsm_rollout.errors import EngineError, did_you_mean

_SERVER = "FSM_ROLLOUT_SGLANG_SERVER"  # tells SGLang's processes the id of the server's
_SET_DEATH_SIGNAL = 1  # Linux's `PR_SET_PDEATHSIG`
CLOSE_WITHIN = 20.0  # seconds that a process has to end once it is killed
# How much of the process's output an error shows, of how much that it looks through.
OUTPUT_LINES, OUTPUT_BYTES = 15, 16_384

# -- the process that starts the server -------------------------------------------------------------------------------


class ServerProcess:
    """SGLang's server as a child of this process, at ``url`` on this machine alone, for those with its ``api_key``.

    Args:
        arguments: of SGLang's ``ServerArgs``.
        threads: of each of SGLang's processes; default: see :func:`fsm_rollout.engines.sglang.cpu.prepare`.
    """

    def __init__(self, arguments: Mapping[str, object], threads: int | None) -> None:
        self.api_key = secrets.token_hex(16)
        self._port = socket.socket()  # bound and not listening, it keeps the port from all but the server
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        port = self._port.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fsm_rollout.engines.sglang.process"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,  # a Ctrl-C in the terminal is for the caller alone
        )
        self.pid = self._process.pid
        self.exited: Future[int] = Future()  # its exit code
        self._waiter = threading.Thread(target=self._wait, name="fsm-rollout-sglang-exit", daemon=True)
        self._waiter.start()
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        address = {"host": "127.0.0.1", "port": port, "api_key": self.api_key}
        start = json.dumps({"arguments": {**arguments, **address}, "threads": threads})
        with suppress(OSError):  # it has ended already, and its output says why
            self._stdin.write(start.encode() + b"\n")
            self._stdin.flush()

    def _wait(self) -> None:
        self.exited.set_result(self._process.wait())

    def failure(self, reason: str | None = None) -> EngineError:
        """Say what happened to the process, and show the end of its output."""
        if reason is None:
            reason = f"the process of SGLang has ended (exit code {self._process.poll()})"
        output = b""
        with suppress(OSError, ValueError):  # closed already
            log = self._log.fileno()
            output = os.pread(log, OUTPUT_BYTES, max(0, os.fstat(log).st_size - OUTPUT_BYTES))
        return EngineError(explained(reason, output.decode(errors="replace")))

    def kill(self) -> list[psutil.Process]:
        """End the process and all below it soon, and return them."""
        return _kill(self.pid)

    def stop(self) -> None:
        """End the process and all below it, and wait for that; more than once if need be."""
        psutil.wait_procs(self.kill(), timeout=CLOSE_WITHIN)  # it knows a process from a later one of its id
        self._waiter.join(CLOSE_WITHIN)
        with suppress(OSError):
            self._stdin.close()
        self._log.close()
        self._port.close()


# Lines that a process prints while nothing is wrong: warnings, progress bars.
_NOISE = re.compile(r"\w*Warning\b|\bWARNING\b|\bINFO\b|\bW\d{4} |\d%\|.*\||\bit/s\]|^\s*warnings\.warn\(")
# Lines that say what went wrong.
_TELLING = re.compile(
    r"crashed|exit code|out of memory|^(?!Traceback)[\w.]*(?:Error|Exception|Exit|Interrupt)\b(?::|$)|\b[Kk]illed\b"
)


def explained(reason: str, output: str) -> str:
    """Return ``reason`` and the end of a process's ``output``; the line that tells most of it comes first of all.

    Warnings and progress bars (which overwrite their line) are left out, unless nothing else was printed.
    """
    printed = [line[:400] for line in output.splitlines() if line.strip()]  # a carriage return ends a line, too
    lines = [line for line in printed if _TELLING.search(line.strip()) or not _NOISE.search(line)] or printed
    if not lines:
        return reason
    telling = next((line for line in reversed(lines) if _TELLING.search(line.strip())), "")
    first = f"{telling.strip()} ({reason})" if telling and telling.strip() not in reason else reason
    return "\n".join([f"{first}; the end of its output:", *lines[-OUTPUT_LINES:]])


def _kill(pid: int) -> list[psutil.Process]:
    """Kill a process and all below it, and return them; none where it has ended."""
    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return []
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    return family


def _environment() -> dict[str, str]:
    """Return the environment for the process: this one's, and this package importable."""
    path = [path for path in [os.environ.get("PYTHONPATH")] if path]
    above = Path(__file__).resolve().parents[3]
    if above.name not in ("site-packages", "dist-packages"):
        path.append(str(above))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


# -- the server's process ---------------------------------------------------------------------------------------------


def main() -> None:
    """Serve as the first line of the standard input says, until that ends."""
    start = json.loads(sys.stdin.buffer.readline() or b"null")
    if start is None:
        return
    os.environ[_SERVER] = str(os.getpid())
    os.register_at_fork(after_in_child=_die_with_server)
    threading.Thread(target=_end_with_input, daemon=True).start()
    ranks = math.prod(start["arguments"].get(f"{kind}_size", 1) for kind in ("tp", "pp", "dp"))
    arguments = {**sglang_cpu.prepare(start["threads"], ranks), **start["arguments"]}
    if arguments.get("enable_lora"):
        sglang_cpu.unpin()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    _check(arguments, inspect.signature(ServerArgs).parameters)
    # What sglang.launch_server does; but SGLang's processes import this main module again, not that one.
    load_plugins()
    run_server(ServerArgs(**arguments))


def _check(arguments: Mapping[str, object], parameters: Collection[str]) -> None:
    """Check arguments that SGLang would fail over without a plain word, or late."""
    problems = [
        f"SGLang has no argument '{name}'{did_you_mean(name, parameters)}"
        for name in arguments
        if name not in parameters
    ]
    if arguments.get("device") == "cpu" and arguments.get("enable_deterministic_inference"):
        problems.append("deterministic: SGLang draws per-request random numbers with a GPU kernel; leave it out here")
    import torch

    if str(arguments.get("device")).startswith("cuda") and not torch.cuda.is_available():
        problems.append(
            f"device '{arguments['device']}' is not there: torch {torch.__version__} sees no CUDA; leave `device` out, "
            f"which takes what there is"
        )
    if problems:
        sys.exit(f"EngineError: {'; '.join(problems)}")


def _end_with_input() -> None:
    """Wait until whoever started this is gone; then kill every process below this one, and this one."""
    while os.read(sys.stdin.fileno(), 4096):  # without the lock of sys.stdin, which a forked process would wait for
        pass
    _kill(os.getpid())


def _die_with_server() -> None:
    """Have Linux kill this process when the one that started it dies; end it if the server is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        try:
            gone = psutil.Process(int(os.environ[_SERVER])).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            gone = True
        if gone:
            os._exit(1)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # one of SGLang's processes, which does so itself, but only after seconds
    _die_with_server()
