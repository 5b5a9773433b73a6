"""The time of a visit stands still while its request has no replica. In virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Engine
from tests.unit.engines.test_pool import Fragile, Place, ask, run, script


def test_the_time_of_a_visit_stands_still_while_nobody_works_on_it(tokenizer: Any):
    """A replica that starts again may take longer than a visit may."""

    class Slow(Place):
        seconds = 0.0

        async def start(self, name: str) -> Engine:
            await asyncio.sleep(self.seconds)
            return await super().start(name)

    place = Slow(lambda name: Fragile(script, tokenizer=tokenizer))

    async def body(pool: EnginePool) -> None:
        deadline = Deadline(12.0)
        with deadline:
            pending = EngineClient(pool).submit(ask("a"), deadline)
            await asyncio.sleep(2.5)
            place.seconds = 40
            place.last(0).die()
            await pending.done.wait()
        assert (pending.finish_reason, pending.error, deadline.expired) == ("stop", None, False)
        assert asyncio.get_running_loop().time() > 45

    run(place, body, 1)
