"""The process that makes a run's spans and sends them, so that the run itself only tells it what has happened.

Invariant: what travels are events, as the journal has them, and messages arrive in the order in which they were sent;
spans are made there by the same code as later from the journal. A process that ends too early, or cannot keep up, costs
spans and no trajectory: one is told of whole or, where too much waits already, not at all.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from fsm_rollout.concurrency.child_process import ChildProcess
from fsm_rollout.report.run_spans import SpanMaker
from fsm_rollout.report.telemetry import TracedTrajectory
from fsm_rollout.trajectory.event_bytes import encode, pack, unpacker
from fsm_rollout.trajectory.events import AnyEvent, Prompted
from fsm_rollout.trajectory.pictures import StoredPicture

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)

EVERY = 0.2  # seconds between two blocks of messages
MOST_WAITING = 2**18  # so many messages may wait; beyond that no further trajectory is told of
LOST = "the process that sends spans has ended; `fsm-rollout export RUN --format otlp` sends them later"

_Message = tuple[Any, ...]  # what it is, and its parts
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(list[_Message]).decode
_UNSEEN = StoredPicture(b"", "", 0, 0)
_read = unpacker(lambda _: _UNSEEN)  # spans show no pictures


class SpanBook:
    """Makes the spans of a run's trajectories as their events come; ``on_end`` takes them."""

    def __init__(self, maker: SpanMaker, on_end: Callable[[ReadableSpan], None]) -> None:
        self._maker, self._on_end = maker, on_end
        self._known: dict[str, TracedTrajectory] = {}

    def takes_more(self) -> bool:
        """Say whether another trajectory may begin in it."""
        return True

    def take(self, trajectory_id: str, event: AnyEvent, *, sends: bool = True) -> None:
        """Take in the next event of a trajectory; ``sends``: the spans that end with it are wanted."""
        traced = self._known.get(trajectory_id)
        if traced is not None:
            made = traced.take(event)
            if sends:
                for span in made:
                    self._on_end(span)
        elif isinstance(event, Prompted):
            self._known[trajectory_id] = TracedTrajectory(self._maker, event)

    def forget(self, trajectory_id: str) -> None:
        """Take in no more of a trajectory."""
        del self._known[trajectory_id]

    def run(self, step: int | None, start: float, end: float, trajectories: int) -> None:
        """Make the span of the run, or of a training step of it."""
        self._on_end(self._maker.run_span(step, start, end, trajectories))

    def close(self) -> None:
        """End what is still open, as far as it has come."""
        for traced in self._known.values():
            for span in traced.rest():
                self._on_end(span)
        self._known.clear()


class SpanProcess:
    """The run's end. Events are taken in by the event loop, and sent by a thread.

    Args:
        entry: what the process runs, ``module:function``; it gets the number of a socket.
        settings: plain data for it.
    """

    def __init__(self, entry: str, settings: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = ChildProcess(entry, theirs.fileno())
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(_encode(settings))
        self._waiting: list[_Message] = []
        self._runs, self._down_until, self._enough = 0, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._converse, name="fsm-rollout-spans", daemon=True)
        self._thread.start()

    @property
    def is_down(self) -> bool:
        """Whether it has said a while ago that nobody takes the spans."""
        return time.monotonic() < self._down_until

    def book(self, maker: SpanMaker) -> RemoteBook:
        """Return what takes in the events of a run."""
        self._runs += 1
        self._waiting.append(("begin", self._runs, *maker.said()))
        return RemoteBook(self._waiting, self._runs)

    def close(self) -> None:
        """Let it send what is left, and end it. Blocks; safe to call twice."""
        self._enough.set()
        self._thread.join()
        self._process.kill()

    def _converse(self) -> None:
        connection = self._connection
        try:
            while not self._enough.wait(EVERY):
                self._send()
                while connection.poll():
                    self._hear(connection.recv_bytes())
            self._send()
            connection.send_bytes(_encode([("end", 0)]))
            while self._hear(connection.recv_bytes()):
                pass
        except (OSError, EOFError):
            logger.warning(LOST)
            self._down_until = float("inf")
        connection.close()

    def _send(self) -> None:
        count = len(self._waiting)  # the event loop may add to them meanwhile
        if count:
            self._connection.send_bytes(_encode(self._waiting[:count]))
            del self._waiting[:count]

    def _hear(self, block: bytes) -> bool:
        """Take in what the process says; return whether it may say more."""
        what, *parts = msgspec.msgpack.decode(block)
        if what == "warning":
            logger.warning("%s", parts[0])
        elif what == "down":
            self._down_until = time.monotonic() + parts[0]
        return bool(what != "ended")


class RemoteBook:
    """A :class:`SpanBook` that another process keeps."""

    def __init__(self, waiting: list[_Message], run: int) -> None:
        self._waiting, self._run = waiting, run

    def takes_more(self) -> bool:
        """Say whether another trajectory may begin in it."""
        return len(self._waiting) < MOST_WAITING

    def take(self, trajectory_id: str, event: AnyEvent, *, sends: bool = True) -> None:
        """Take in an event; ``sends``: the spans that end with it are wanted."""
        self._waiting.append(("take", self._run, trajectory_id, encode(event), sends))

    def forget(self, trajectory_id: str) -> None:
        """Take in no more of a trajectory."""
        self._waiting.append(("forget", self._run, trajectory_id))

    def run(self, step: int | None, start: float, end: float, trajectories: int) -> None:
        """Make the span of the run, or of a training step of it."""
        self._waiting.append(("run", self._run, step, start, end, trajectories))

    def close(self) -> None:
        """End what is still open, as far as it has come."""
        self._waiting.append(("close", self._run))


def keep_books(connection: Connection, on_end: Callable[[ReadableSpan], None]) -> None:
    """Be the process: make the spans of what the run tells, until it has ended; ``on_end`` takes them."""
    books: dict[int, SpanBook] = {}
    while True:
        for what, number, *parts in _decode(connection.recv_bytes()):
            match what:
                case "take":
                    trajectory_id, payload, sends = parts
                    (event,) = _read(pack([payload]))
                    books[number].take(trajectory_id, event, sends=sends)
                case "begin":
                    books[number] = SpanBook(SpanMaker.told(*parts), on_end)
                case "end":
                    return
                case _:  # of the run itself: what a book does
                    getattr(books[number], what)(*parts)


def say(connection: Connection, *message: Any) -> None:
    """Tell the run something: ``warning`` and a text, ``down`` and for how many seconds, or ``ended``."""
    connection.send_bytes(_encode(message))
