"""Slots of a tool: what waits for one costs nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import ItemsView

from fsm_rollout.tools.bounded_call import Slots


class Unread(dict[asyncio.Timeout, float]):
    """Those who wait, where nobody may go through all of them."""

    def items(self) -> ItemsView[asyncio.Timeout, float]:
        raise AssertionError("every call looks at all that wait: a thousand of them take a million looks")


async def test_a_call_that_waits_looks_at_no_other() -> None:
    slots = Slots("one at a time", 1)
    slots._waiting = Unread()
    done: list[int] = []

    async def call(number: int) -> None:
        async with slots.hold(5.0):
            await asyncio.sleep(0)
            done.append(number)

    await asyncio.gather(*map(call, range(5)))
    assert done == [0, 1, 2, 3, 4]
