"""The program in whose processes sandboxed code runs: the nursery of the sessions.

Invariant: it is run by itself (``python -I -S jail.py FD``), with nothing of this package but the modules of the jail,
and nothing of the environment. The run sends one descriptor per session over the Unix socket FD, with the session's
settings as JSON. Over that descriptor go lines of JSON: ``{"code": …}`` to the session,
``{"text": …, "ended": …}`` back.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from importlib import import_module
from types import FrameType, ModuleType


def main(descriptor: int, where: str = "guard", what: str = "nursery") -> None:
    """Serve a run until it ends: with sessions of code, or with what one ``enclosure`` runs."""
    # 1. The jail's modules have the names that they always have; for the packages above them stand empty ones.
    folder = os.path.dirname(os.path.abspath(__file__))
    for name in ("fsm_rollout.tools.sandbox", "fsm_rollout.tools", "fsm_rollout"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [folder]
        folder = os.path.dirname(folder)
    serve = getattr(import_module(f"fsm_rollout.tools.sandbox.{where}"), what)

    for name in [name for name in sys.modules if name.partition(".")[0] == "fsm_rollout"]:
        del sys.modules[name]  # sandboxed code may import the package itself
    # 2. A Ctrl-C is the run's; it closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    serve(socket.socket(fileno=descriptor))


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
