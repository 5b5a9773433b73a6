"""Events that happen once."""

from __future__ import annotations

import asyncio

import pytest

from fsm_rollout.concurrency.once import Once


async def test_all_who_wait_go_on_and_one_who_was_cancelled_harms_nobody() -> None:
    once = Once()
    waiting = [asyncio.ensure_future(once.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert not once.happened
    assert [task.done() for task in waiting] == [True, False, False]
    once.set()
    once.set()
    assert once.happened
    await asyncio.gather(*waiting[1:])
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    await once.wait()
