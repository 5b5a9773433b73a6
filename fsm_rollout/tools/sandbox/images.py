"""Images of containers as folders, for walls of ours: podman or docker unpacks one, and runs nothing.

Invariant: an image's folder is whole or not there, and is never written to afterwards; no file of it lies outside, and
all belong to whom programs behind the walls run as.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from tempfile import mkdtemp

from fsm_rollout.errors import ToolError
from fsm_rollout.tools.sandbox.walls import NOBODY

_unpacking = asyncio.Lock()


async def unpacked(image: str, folder: Path) -> Path:
    """Return where an image's files are below ``folder``, unpacked once; it is pulled where it is not here yet.

    Raises:
        ToolError: neither podman nor docker is installed, or there is no such image.
    """
    async with _unpacking:
        return await asyncio.to_thread(_unpacked, image, folder)


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
                begun.rename(whole)
            except BaseException:
                shutil.rmtree(begun, ignore_errors=True)
                raise
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
