"""Runs commands in an :mod:`enclosure <fsm_rollout.tools.sandbox.enclosure>`: the side of the run.

Invariant: however the call ends, cancelled too, nothing of the commands runs on. Podman or docker unpacks an image of
containers, and runs nothing: its folder is whole or not there, and is never written to afterwards; no file of it lies
outside, and all belong to whom programs behind the walls run as.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

from fsm_rollout.errors import ToolError
from fsm_rollout.tools.sandbox.walls import NOBODY


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
        image: a folder of an image's files (:func:`unpacked`): they are seen, and can be written over, in the place of
            the system's.
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
            sys.executable, "-I", "-S", jail, str(theirs.fileno()), "enclosure", "enclosure",
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


_unpacker = ThreadPoolExecutor(1)  # one at a time, whichever event loops ask


async def unpacked(image: str, folder: Path) -> Path:
    """Return where an image's files are below ``folder``, unpacked once; it is pulled where it is not here yet.

    Raises:
        ToolError: neither podman nor docker is installed, or there is no such image.
    """
    return await asyncio.get_running_loop().run_in_executor(_unpacker, _unpacked, image, folder)


def _unpacked(image: str, folder: Path) -> Path:
    program = next(filter(None, map(shutil.which, ("podman", "docker"))), None)
    if program is None:
        raise ToolError(f"image '{image}' needs podman or docker, to be unpacked; install one of them")
    container = _said(program, "create", image, "true")
    try:
        name = _said(program, "inspect", "--format", "{{.Image}}", container)
        whole = folder / name.removeprefix("sha256:")
        if not whole.exists():
            folder.mkdir(parents=True, exist_ok=True)
            begun = Path(mkdtemp(dir=folder))
            begun.chmod(0o755)
            try:
                with (
                    subprocess.Popen([program, "export", container], stdout=subprocess.PIPE) as exported,
                    tarfile.open(fileobj=exported.stdout, mode="r|") as files,
                ):
                    files.extractall(begun, filter=_taken)
                if exported.returncode:
                    raise ToolError(f"image '{image}' could not be exported: exit code {exported.returncode}")
                try:
                    begun.rename(whole)
                except OSError:
                    if not whole.exists():  # else another process was the first
                        raise
            finally:
                shutil.rmtree(begun, ignore_errors=True)
    finally:
        subprocess.run([program, "rm", container], stdout=subprocess.DEVNULL, check=False)
    return whole


def _said(program: str, *words: str) -> str:
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"{Path(program).name} {' '.join(words)}: {done.stderr.strip()[-600:]}")
    return done.stdout.strip()


def _taken(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Return a file as it is unpacked; ``None``: it is not, as a device, or where it would lie outside."""
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return None
    if member.islnk() and not Path(folder, member.linkname).resolve().is_relative_to(Path(folder).resolve()):
        return None
    user = NOBODY if os.geteuid() == 0 else os.geteuid()
    mode = None if member.mode is None else member.mode | (0o700 if member.isdir() else 0o600)
    return tarfile.tar_filter(member, folder).replace(uid=user, gid=user, uname="", gname="", mode=mode)
