"""The time of a visit stands still while its request has no replica. In virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pool import PoolEngine
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from tests.unit.engines.test_pool import Place, ask, run, script


def test_the_time_of_a_visit_stands_still_while_nobody_works_on_it(tokenizer: Any):
    """A replica that starts again may take longer than a visit may."""
    place = Place(lambda name: ScriptedEngine(script, tokenizer=tokenizer))

    def slow_start(name: str) -> Any:
        life = Place.replica(place, name)
        start = life.start

        async def later() -> Any:
            await asyncio.sleep(40)
            return await start()

        life.start = later  # type: ignore[method-assign]
        return life

    async def body(pool: PoolEngine) -> None:
        deadline = Deadline(12.0)
        async with deadline:
            ticket = EngineClient(pool).submit(ask("a"), deadline)
            await asyncio.sleep(2.5)
            place.replica = slow_start  # type: ignore[method-assign]
            place.last(0).dead.set()
            await ticket.done.wait()
        assert (ticket.finish_reason, ticket.error, deadline.expired) == ("stop", None, False)
        assert asyncio.get_running_loop().time() > 45

    run(place, body, 1)
