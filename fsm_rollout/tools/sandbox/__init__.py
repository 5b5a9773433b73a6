"""Tools that run a model's code: ``fsm_rollout.tools.sandbox:python`` and ``fsm_rollout.tools.sandbox:bash``.

    tools:
      python: {use: "fsm_rollout.tools.sandbox:python", kwargs: {seconds: 5, memory_mb: 256}, timeout: 60}

Each trajectory has one session, in which names, files and the working directory stay from call to call until the
trajectory ends. A session is a process tree of its own with limits on memory, CPU time, wall time, processes, file
sizes and output. What a call has left running ends with the call, and all sessions end with the run, even if that is
killed.

Where the kernel gives user namespaces (most Linux machines, many containers) the code has, besides, no network, sees no
process and no file but its own empty folder and (read-only) the system's and Python's programs and packages, and is
nobody. Elsewhere it has the limits, a scrubbed environment and an empty folder, and runs as the run's user: it could
read that user's files, end that user's processes and, in many small files, fill the disk. The kernel also refuses, in
both cases, what no computation needs (ptrace, new namespaces, and without namespaces sockets to other machines).
:func:`protection` says which it is; a run says so when it begins; ``kwargs: {namespaces: true}`` refuses to run
without.

This holds for x86-64 and for aarch64, of which only x86-64 has been run: what is asked of the kernel goes through the C
library, and the numbers of the refused calls are compared with the kernel's headers. On other machines no call is
refused.

It is meant for code of a model in training, which is careless and sometimes finds what it should not. It is no virtual
machine: who expects attacks on the kernel gives a backend of his own (``kwargs: {backend: "module:Class"}``), a class
that is made with ``(language, limits)`` and has the two methods of :class:`Backend`; containers and services fit it.
"""

from __future__ import annotations

from typing import cast

from fsm_rollout.errors import ToolError
from fsm_rollout.names.objects import load_object
from fsm_rollout.tools.base import Tool
from fsm_rollout.tools.sandbox.session import (
    Backend,
    CodeLimits,
    Language,
    LocalSession,
    Output,
    Protection,
    protection,
)

__all__ = ["Backend", "CodeLimits", "LocalSession", "Output", "Protection", "bash", "protection", "python"]

_ENDED = {
    "time": "the code ran longer than {0.seconds:g} s",
    "cpu time": "the code used more than {0.cpu_seconds:g} s of CPU time",
    "memory": "the code used more than {0.memory_mb} MB of memory",
    "processes": "the code started more than {0.processes} processes",
    "exit": "the code ended its session",
    "broken": "the session broke",
}


class _CodeTool(Tool):
    """A tool whose calls run code in the trajectory's session."""

    language: Language

    def __init__(
        self,
        seconds: float = CodeLimits.seconds,
        cpu_seconds: float = CodeLimits.cpu_seconds,
        memory_mb: int = CodeLimits.memory_mb,
        disk_mb: int = CodeLimits.disk_mb,
        processes: int = CodeLimits.processes,
        output: int = CodeLimits.output,
        packages: bool = True,
        namespaces: bool = False,
        backend: str | None = None,
    ) -> None:
        self._limits = CodeLimits(seconds, cpu_seconds, memory_mb, disk_mb, processes, output)
        if backend is None:
            self._session: Backend = LocalSession(self.language, self._limits, packages=packages, namespaces=namespaces)
            return
        made = load_object(backend)
        if not callable(made):
            raise ToolError(f"backend '{backend}' is a {type(made).__name__}; name a class with execute and close")
        self._session = cast(Backend, made(self.language, self._limits))

    @classmethod
    def at_start(cls) -> str:
        """Return what a run says of the tool when it begins."""
        return f"runs code in a sandbox: {protection()}"

    async def execute(self, code: str) -> str:
        """Run code.

        Args:
            code: The code.
        """
        output = await self._session.execute(code)
        notes = []
        if output.cut:
            notes.append(f"[the output is longer; these are its first {self._limits.output:,} characters]")
        if output.ended is not None:
            why = _ENDED.get(output.ended, output.ended).format(self._limits)
            notes.append(f"[{why}; the next call begins a new session, without what was defined before]")
        text = "\n".join([*([output.text.rstrip("\n")] if output.text else []), *notes])
        return text or "[no output]"

    async def release(self) -> None:
        """End the session."""
        await self._session.close()


class python(_CodeTool):  # noqa: N801  # its name in a YAML
    """Python code, run in the trajectory's session."""

    language: Language = "python"

    async def execute(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of its last expression. Names stay defined.

        Args:
            code: The code.
        """
        return await super().execute(code)


class bash(_CodeTool):  # noqa: N801  # its name in a YAML
    """A script for bash, run in the trajectory's session."""

    language: Language = "bash"

    async def execute(self, code: str) -> str:
        """Run a bash script and return what it writes. Variables and the working directory stay.

        Args:
            code: The script.
        """
        return await super().execute(code)
