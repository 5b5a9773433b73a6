"""A worker process: calls tools' functions, one at a time, for the process that started it.

Invariant: the pipe that it was started with carries requests and answers and nothing else; what a tool (or a program
that it runs) prints goes to the standard error. The caller's script is never run again here.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys

from fsm_rollout.tools.elsewhere import answered


def main() -> None:
    """Serve until the other side is gone."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.path[:] = pickle.load(requests)
    while True:
        try:
            size = int.from_bytes(requests.read(8), "big")
        except OSError:
            return
        if not size:
            return
        importlib.invalidate_caches()
        answer = answered(requests.read(size))
        answers.write(len(answer).to_bytes(8, "big") + answer)
        answers.flush()
