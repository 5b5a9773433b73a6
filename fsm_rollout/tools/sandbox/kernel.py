"""What the kernel is asked for through the C library, which knows the machine it was made for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NAMESPACES = _NEWNS | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
# What prctl does: a signal when the parent ends, looks at it, orphans from below, a filter of calls, no more rights.
DIE_WITH_PARENT, VISIBLE, ADOPT, FILTER, NO_MORE_RIGHTS = 1, 4, 36, 22, 38


def checked(function: Callable[..., int], *arguments: object) -> None:
    """Call a function of the C library; OSError if it fails."""
    if function(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Put a file system, or with ``BIND`` a folder, at ``target``."""
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    checked(libc.mount, encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])


def write(path: str, text: str) -> None:
    """Write a file of the kernel's at once."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
