"""A worker process: calls tools' functions, one at a time, for the process that started it.

Invariant: the pipe that it was started with carries requests and answers and nothing else; what a tool (or a program
that it runs) prints goes to the standard error. The caller's script is never run again here. A worker
outlives its caller by a second at most, however that ends, and leaves nothing that a tool started in its session.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import threading
from contextlib import suppress
from typing import BinaryIO

from fsm_rollout.tools.process_placement import answered

LOOK_EVERY = 1.0
"""Seconds between two looks whether the process that started this one is still there."""


def main(parent: int) -> None:
    """Serve until the other side, the process ``parent``, is gone."""
    threading.Thread(target=_watch, args=(parent,), name="fsm-rollout-watch", daemon=True).start()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    with suppress(OSError, EOFError):  # a pipe whose other side is gone
        _serve(requests, answers)
    _end()


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    sys.path[:] = pickle.load(requests)
    while size := int.from_bytes(requests.read(8), "big"):
        importlib.invalidate_caches()
        answer = answered(requests.read(size))
        answers.write(len(answer).to_bytes(8, "big") + answer)
        answers.flush()


def _watch(parent: int) -> None:
    """End with the parent: one that is killed during a call cannot say so, and the pipe is read between calls only."""
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(LOOK_EVERY)
    _end()


def _end() -> None:
    """End this process, and with it all that tools have started in its session."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
