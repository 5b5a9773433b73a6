"""How late a loop is: what blocks it is seen, and a simulation is never late."""

import asyncio
import time

from fsm_rollout.concurrency.loop_lag import EVERY, LoopLag
from fsm_rollout.testing.simulation.virtual_time import VirtualTimeLoop


async def test_what_blocks_the_loop_is_seen() -> None:
    lag, done = LoopLag(), asyncio.Event()
    assert lag.figures() == {}
    with lag.watched(), lag.watched():
        asyncio.get_running_loop().call_later(EVERY, done.set)
        time.sleep(5 * EVERY)  # noqa: ASYNC251  # it is to block
        await done.wait()
    found = lag.figures()
    assert found["max"] > 3 * EVERY
    assert 0 < found["p50"] <= found["p99"] <= found["max"]


def test_virtual_time_is_never_late() -> None:
    lag, loop = LoopLag(), VirtualTimeLoop()

    async def main() -> None:
        with lag.watched():
            await asyncio.sleep(1.0)

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert lag.figures() == {}
