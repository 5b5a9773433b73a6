"""Servers of programs that take spans and figures, each a process of its own with a folder of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.kit import ROOT

T = TypeVar("T")
PATIENCE = 180  # seconds for what a loaded machine takes its time for


@dataclass(frozen=True)
class Server:
    """Where it listens, and where it keeps what it was told."""

    url: str
    folder: Path


@contextmanager
def serving(folder: Path, *arguments: str, **environment: str) -> Iterator[Server]:
    """Start a server; ``{port}`` and ``{other}`` are ports that are free. It ends with all that it has started."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = dict(zip(("port", "other"), (taken.getsockname()[1] for taken in sockets), strict=True))
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    own = {name: text.format(**ports) for name, text in environment.items()}
    url, log = f"http://127.0.0.1:{ports['port']}", folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *(argument.format(**ports) for argument in arguments)],
            cwd=folder, env={**os.environ, **offline, **own}, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            until(lambda: process.poll() is not None or answers(url), "it answers")
            assert process.poll() is None, log.read_text()
            yield Server(url, folder)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)
    return True


def until(found: Callable[[], T], what: str) -> T:
    """Return what is found as soon as it is something."""
    for _ in range(PATIENCE * 10):
        if result := found():
            return result
        threading.Event().wait(0.1)
    raise AssertionError(f"not within {PATIENCE} s: {what}")
