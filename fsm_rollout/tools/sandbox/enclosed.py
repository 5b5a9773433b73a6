"""Runs commands in an :mod:`enclosure <fsm_rollout.tools.sandbox.enclosure>`: the side of the run.

Invariant: however the call ends, cancelled too, nothing of the commands runs on.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsm_rollout.errors import ToolError


@dataclass(frozen=True, slots=True)
class Command:
    """A program with its arguments, and the files that are written, anew, before it starts."""

    words: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by their paths below ``/tmp/work``, where commands run, or below ``/tmp/home``, their HOME."""


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended, and the last of what it wrote."""

    code: int
    """Its exit code; negative for the signal that killed it."""
    output: str


async def run_enclosed(
    commands: Sequence[Command], *, port: int, program: Path | None = None, image: Path | None = None,
    shown: Sequence[str] = (),
    disk_mb: int = 256, memory_mb: int = 4096, processes: int = 512,
) -> list[CommandEnd]:  # fmt: skip
    """Run commands one after the other in one folder, behind walls that let one port of this machine through.

    Args:
        commands: they find each other's files, and never each other's processes.
        port: of the loopback interface; all else that listens anywhere cannot be reached.
        program: a folder that is seen as ``/program``.
        image: a folder of an image's files (:func:`~fsm_rollout.tools.sandbox.images.unpacked`): they are seen, and can
            be written over, in the place of the system's.
        shown: folders that can be read beside the system's.
        disk_mb: the size of all files that they write.
        memory_mb: data that a process may have.
        processes: and threads, at a time (Linux 5.14).

    Raises:
        ToolError: the kernel gives no user namespaces, or a wall could not be built.
    """
    ours, theirs = socket.socketpair()
    jail = str(Path(__file__).with_name("jail.py"))
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", jail, str(theirs.fileno()), "enclosure",
            pass_fds=[theirs.fileno()], env={}, start_new_session=True,
        )  # fmt: skip
    finally:
        theirs.close()
    try:
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 24)
        job = {
            "commands": [{"words": [*c.words], "env": dict(c.env), "files": dict(c.files)} for c in commands],
            "port": port, "files": {}, "shown": [*shown], "program": program and str(program),
            "image": image and str(image),
            "namespaces": True, "root": os.geteuid() == 0,
            "disk": disk_mb << 20, "memory": 1 << 46, "data": memory_mb << 20, "processes": processes, "packages": [],
        }  # fmt: skip
        writer.write(json.dumps(job).encode() + b"\n")
        line = await reader.readline()
        writer.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    answer = json.loads(line or b'{"failed": "it ended at once"}')
    if "failed" in answer:
        raise ToolError(f"no walls could be built for the program: {answer['failed']}")
    return [CommandEnd(**ended) for ended in answer["ended"]]
