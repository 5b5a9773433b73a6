"""Talking to SGLang's process without waiting for it.

Invariant: messages are sent by one thread, in the order in which they were put; whoever puts one returns at once, also
when the other end is busy with something else and reads nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from fsm_rollout.engines.sglang.wire import ToHost, Wire


class Outbox(threading.Thread):
    """Sends what is put into it; begins at once.

    ``failed`` is called in its thread with what keeps a message from being sent, unless it is the end of the
    connection, of which :meth:`Wire.receive` tells. Nothing is sent after either.
    """

    def __init__(self, wire: Wire, failed: Callable[[Exception], object]) -> None:
        super().__init__(name="fsm-rollout-sglang-out", daemon=True)
        self._wire = wire
        self._failed = failed
        self._messages: SimpleQueue[ToHost | None] = SimpleQueue()
        self.start()

    def put(self, message: ToHost) -> None:
        """Have a message sent; returns at once."""
        self._messages.put(message)

    def run(self) -> None:
        """Send until the end."""
        try:
            while (message := self._messages.get()) is not None:
                self._wire.send(message)
        except OSError:
            pass
        except Exception as error:
            self._failed(error)

    def close(self, within: float) -> None:
        """Close the wire, also in the middle of a message, and wait up to ``within`` seconds for the thread."""
        self._messages.put(None)
        self._wire.close()
        if self is not threading.current_thread():
            self.join(within)
