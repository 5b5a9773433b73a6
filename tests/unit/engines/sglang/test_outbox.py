"""What is to be sent to SGLang's process goes out in order, and nobody waits for its reader."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from fsm_rollout.engines.sglang.outbox import Outbox
from fsm_rollout.engines.sglang.wire import Abort, Do, FromHost, ToHost, Wire

LARGE = 50_000_000
"""Bytes that no socket takes before somebody reads."""
LONG = 60.0
"""Seconds after which something that ought to end at once is given up."""


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire]]:
    here, there = socket.socketpair()
    ends = Wire(here, FromHost), Wire(there, ToHost)
    yield ends
    for end in ends:
        end.close()


def test_nobody_waits_for_a_reader_and_the_order_stays(ends: tuple[Wire, Wire]):
    here, there = ends
    failures: list[Exception] = []
    outbox = Outbox(here, failures.append)
    messages = [Do(1, "update_part", tensors=b"x" * LARGE), Abort([1]), Do(2, "pause"), Abort([2, 3])]

    def put_all() -> None:
        for message in messages:
            outbox.put(message)

    caller = threading.Thread(target=put_all, daemon=True)
    caller.start()
    caller.join(LONG)
    assert not caller.is_alive(), "it waits, and nobody has read a byte so far"
    assert [there.receive() for _ in messages] == messages
    outbox.close(LONG)
    assert not outbox.is_alive()
    assert failures == []
    assert there.receive() is None


def test_closing_ends_a_message_that_nobody_reads(ends: tuple[Wire, Wire]):
    here, _ = ends
    failures: list[Exception] = []
    outbox = Outbox(here, failures.append)
    outbox.put(Do(1, "update_part", tensors=b"x" * LARGE))
    outbox.close(LONG)
    assert not outbox.is_alive()
    assert failures == []


def test_a_reader_that_is_gone_is_no_failure_of_the_sender(ends: tuple[Wire, Wire]):
    here, there = ends
    failures: list[Exception] = []
    outbox = Outbox(here, failures.append)
    there.close()
    outbox.put(Do(1, "update_part", tensors=b"x" * LARGE))
    outbox.join(LONG)
    assert not outbox.is_alive()
    assert here.receive() is None, "who receives is told"
    outbox.put(Abort([1]))
    assert failures == []


def test_what_cannot_be_written_is_told(ends: tuple[Wire, Wire]):
    here, _ = ends
    failures: list[Exception] = []
    outbox = Outbox(here, failures.append)
    outbox.put(Abort([2**70]))
    outbox.join(LONG)
    assert [type(failure) for failure in failures] == [OverflowError]
