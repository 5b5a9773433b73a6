"""Messages between a driver and a shard: whole, in order, and such as run nothing."""

import asyncio
import os
import pickle
import socket
from functools import partial
from pathlib import Path

import msgspec

from fsm_rollout.scheduler.link import MOST_UNSENT, PairedLink, SocketLink, framed


class Loaded:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


async def test_a_pickle_that_a_tool_sends_down_its_shards_link_runs_nowhere(tmp_path: Path) -> None:
    """Tools run in shards, and can write to whatever their process has open."""
    got: list[tuple[object, ...]] = []
    lost = asyncio.Event()
    ours, theirs = socket.socketpair()
    _, link = await asyncio.get_running_loop().create_connection(partial(SocketLink, shard=False), sock=ours)
    link.receive, link.lost = lambda *message: got.append(message), lost.set
    with theirs:
        theirs.sendall(framed(msgspec.msgpack.encode([("log", "name", 30, "text")])))
        theirs.sendall(framed(pickle.dumps([("log", "name", 30, Loaded(tmp_path / "made"))])))
        theirs.sendall(framed(msgspec.msgpack.encode([("ready",)])))
        await lost.wait()
    link.close()
    assert not (tmp_path / "made").exists()
    assert got == [("log", "name", 30, "text")], "a shard that sends what is no message is not listened to any more"


def test_what_comes_in_pieces_is_taken_when_it_is_whole() -> None:
    got: list[tuple[object, ...]] = []
    link = SocketLink(shard=False)
    link.receive = lambda *message: got.append(message)
    sent = framed(msgspec.msgpack.encode([("ready",)])) + framed(msgspec.msgpack.encode([("log", "name", 30, "text")]))
    for place in range(len(sent)):
        link.data_received(sent[place : place + 1])
    assert got == [("ready",), ("log", "name", 30, "text")]


async def test_much_that_is_sent_in_one_pass_goes_out_while_the_pass_goes_on() -> None:
    ours, theirs = PairedLink.pair()
    blocks: list[list[int]] = []
    theirs.receive = lambda *message: blocks[-1].append(*message)
    take = theirs._take

    def taken(block: bytes) -> None:
        blocks.append([])
        take(block)

    theirs._take = taken  # type: ignore[method-assign]
    for number in range(2 * MOST_UNSENT + 1):
        ours.send(number)
        if number == MOST_UNSENT:
            await asyncio.sleep(0)  # what was written so far arrives; no flush of the whole pass has been
            assert blocks[:1] == [list(range(MOST_UNSENT))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [number for block in blocks for number in block] == list(range(2 * MOST_UNSENT + 1))
