"""Sessions of sandboxed code, and where they run.

Invariant: a session is a process tree of its own, and nothing of it is left once it is closed, or once this process has
ended, however it ended (:mod:`fsm_rollout.tools.sandbox.jail` sees to that). Only lines of JSON cross the border.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

from fsm_rollout.errors import ToolError
from fsm_rollout.tools.sandbox.system_calls import filters
from fsm_rollout.trajectory.trace_ids import traceparent

logger = logging.getLogger(__name__)

Language = Literal["python", "bash"]
JAIL = Path(__file__).with_name("jail.py")
START_SECONDS = 60.0  # how long the first session may take to begin on a busy machine
GRACE_SECONDS = 30.0  # how long the answer to a call may take beyond its own limit
LINE = 16 << 20  # bytes of an answer


@dataclass(frozen=True)
class CodeLimits:
    """What the code of one session may use."""

    seconds: float = 10.0  # of wall time, per call
    cpu_seconds: float = 10.0  # of CPU time over all its processes, per call
    memory_mb: int = 512  # of memory over all its processes
    disk_mb: int = 64  # of its folder, and of any one file
    processes: int = 16  # at once
    output: int = 20_000  # characters of a call's output that are returned

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e9:
                raise ToolError(f"the sandbox's {name} must be a positive number, got {value!r}")


@dataclass(frozen=True, slots=True)
class Output:
    """What a call came to."""

    text: str  # what the code has written, and the value of its last expression
    cut: bool = False  # whether there was more of it
    # Why the session ended with the call: `time`, `cpu time`, `memory`, `processes`, `exit`, `broken`.
    ended: str | None = None


class Backend(Protocol):
    """Where a session's code runs. It is made as ``Backend(language, limits)``, once for each trajectory.

    A session keeps what its calls have made. After a call that has ended it, the next call begins another.
    """

    async def execute(self, code: str) -> Output:
        """Run code to its end, or to a limit; a cancelled call ends the session."""
        ...

    async def close(self) -> None:
        """End the session and all that its code has started. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class Protection:
    """What keeps code in its session on this machine."""

    namespaces: bool  # whether it has processes, a network, a file system and users of its own
    system_calls: bool  # whether the kernel refuses what no computation needs
    why_not: str | None = None  # why there are no namespaces

    def __str__(self) -> str:
        calls = ", system calls filtered" if self.system_calls else ""
        if self.namespaces:
            return f"no network, a file system, users and processes of its own (namespaces), limits{calls}"
        network = "no network but this machine's sockets" if self.system_calls else "NETWORK OPEN"
        return (
            f"limits, an environment and a folder of its own{calls}; {network}; this user's files and processes are "
            f"NOT hidden, because namespaces are not available: {self.why_not}"
        )


class _Nursery:
    """The process that forks sessions; there is one for this process, from the first session on."""

    def __init__(self) -> None:
        self._control, end = socket.socketpair()
        self._lock = threading.Lock()
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(JAIL), str(end.fileno())],
                pass_fds=(end.fileno(),), env={}, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self._pid = os.getpid()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        """Whether it serves this process: after a fork it serves the parent."""
        return self._pid == os.getpid() and self._process.poll() is None

    def begin(self, settings: dict[str, object]) -> socket.socket:
        """Have a session begin and return the pipe to it."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [json.dumps(settings).encode()], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise ToolError(f"the sandbox's processes cannot be started: {error}") from error
        return ours

    def close(self) -> None:
        """End all sessions."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)


_nurseries: list[_Nursery] = []
_starting = threading.Lock()


def _nursery() -> _Nursery:
    with _starting:
        if not _nurseries or not _nurseries[0].alive:
            _nurseries[:] = [_Nursery()]
        return _nurseries[0]


@cache
def protection() -> Protection:
    """Return what keeps sandboxed code in its session here; tried once. ToolError if no process can be started."""
    filtered = filters(os.uname().machine)
    with _nursery().begin(_settings("python", CodeLimits(), namespaces=True, packages=False)) as pipe:
        pipe.settimeout(START_SECONDS)
        try:
            line = pipe.makefile("rb").readline()
        except OSError as error:
            return Protection(False, filtered, str(error))
    try:
        answer = json.loads(line)
    except ValueError:
        answer = {"failed": "the kernel refuses to make them"}
    return Protection("ready" in answer, filtered, answer.get("failed"))


def _settings(language: Language, limits: CodeLimits, *, namespaces: bool, packages: bool) -> dict[str, object]:
    site_packages = sysconfig.get_path("purelib") if packages else None
    named = {sys.base_prefix, sys.exec_prefix, *([sys.prefix] if packages else [])}
    prefixes = named | {os.path.realpath(path) for path in named}  # each may be a link
    return {
        "language": language,
        "namespaces": namespaces,
        "root": os.geteuid() == 0,
        "folder": tempfile.gettempdir(),
        "shown": sorted(path for path in prefixes if not f"{path}/".startswith(("/usr/", "/tmp/")) and path != "/"),
        "packages": [site_packages] if site_packages is not None else [],
        "memory": limits.memory_mb << 20,
        "disk": limits.disk_mb << 20,
        **vars(limits),
    }


class LocalSession:
    """A :class:`Backend` on this machine.

    Args:
        language: ``python`` or ``bash``.
        limits: what the code may use.
        packages: whether this Python's installed packages can be imported (they are read-only).
        namespaces: refuse to run where there are none.

    Raises:
        ToolError: (from ``execute``) there are no namespaces and they are required, or no process can be started.
    """

    def __init__(
        self, language: Language, limits: CodeLimits, *, packages: bool = True, namespaces: bool = False
    ) -> None:
        self._language: Language = language
        self._limits = limits
        self._packages = packages
        self._required = namespaces
        self._one_at_a_time = asyncio.Lock()
        self._pipe: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def execute(self, code: str) -> Output:
        """Run code to its end, or to a limit."""
        async with self._one_at_a_time:
            reader, writer = self._pipe = self._pipe or await self._begin()
            try:
                writer.write(json.dumps({"code": code, "trace": traceparent.get()}).encode() + b"\n")
                async with asyncio.timeout(self._limits.seconds + GRACE_SECONDS):
                    await writer.drain()
                    line = await reader.readline()
                answer = json.loads(line)
                return Output(str(answer["text"]), bool(answer["cut"]), answer["ended"])
            except (ValueError, KeyError, OSError):  # its guard was killed, or is stuck
                await self.close()
                return Output("", ended="broken")
            except BaseException:  # given up: nobody waits for the code any more
                await self.close()
                raise

    async def _begin(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        known = await loop.run_in_executor(None, protection)
        if self._required and not known.namespaces:
            raise ToolError(f"the sandbox needs namespaces, which are not available here: {known.why_not}")
        settings = _settings(self._language, self._limits, namespaces=known.namespaces, packages=self._packages)
        pipe = (await loop.run_in_executor(None, _nursery)).begin(settings)
        reader, writer = await asyncio.open_connection(sock=pipe, limit=LINE)
        try:
            async with asyncio.timeout(START_SECONDS):
                answer = json.loads(await reader.readline())
        except (ValueError, OSError) as error:
            writer.close()
            raise ToolError(f"a sandbox's session cannot begin: {error}") from error
        except BaseException:
            writer.close()
            raise
        if "ready" not in answer:
            writer.close()
            raise ToolError(f"a sandbox's session cannot begin: {answer.get('failed')}")
        return reader, writer

    async def close(self) -> None:
        """End the session and all that its code has started. Safe to call twice."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe[1].close()
            with suppress(OSError):
                await pipe[1].wait_closed()
