"""Lines of JSON between the run, a session's guard and its code."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

TICK = 0.05  # seconds between two looks at what running code uses
MOST_BYTES = 8 << 20  # of one line, either way
Settings = dict[str, Any]  # those of a session, as the run has sent them


class JSONLines:
    """Lines of JSON from a socket or a pipe; ``None`` at its end."""

    def __init__(self, source: socket.socket | int) -> None:
        self._source = source
        self._data = b""

    def next(self, until: float | None = None, tick: Callable[[], None] | None = None) -> Any:
        """Return the next one; TimeoutError when ``until`` has come, and ``tick`` is called while it is waited for."""
        while b"\n" not in self._data:
            if until is not None and time.monotonic() > until:
                raise TimeoutError
            if until is not None:
                readable, _, _ = select.select([self._source], [], [], TICK)
                if not readable:
                    if tick is not None:
                        tick()
                    continue
            piece = (
                self._source.recv(65536) if isinstance(self._source, socket.socket) else os.read(self._source, 65536)
            )
            if not piece:
                return None
            self._data += piece
            if len(self._data) > MOST_BYTES:
                raise ValueError("the line is too long")
        line, _, self._data = self._data.partition(b"\n")
        return json.loads(line)
