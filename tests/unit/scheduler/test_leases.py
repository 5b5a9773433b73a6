"""What a driver says to its shards, where these come and go at awkward moments."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from fsm_rollout.scheduler.leases import Leases
from fsm_rollout.scheduler.run_state import GroupTable


class Shard:
    """One that only notes what it is told."""

    def __init__(self, number: int) -> None:
        self.number, self.asked, self.alive, self.stats = number, False, True, dict[str, Any]()
        self.groups, self.queued, self.lag = dict[str, Any](), dict[str, None](), dict[str, Any]()
        self.told: list[str] = []

    def send(self, what: str, *_: Any) -> None:
        self.told.append(what)


def test_a_shard_that_joins_while_the_run_ends_is_told_of_that_too() -> None:
    async def main() -> None:
        changed = asyncio.Event()

        async def change() -> None:
            changed.clear()
            await changed.wait()

        run = cast(Any, SimpleNamespace(n=1, stop=None, changed=changed, change=change))
        starter = SimpleNamespace(run=SimpleNamespace(step=None, trace=None), run_number=0)
        said = {"starter": starter, "evaluation": None, "histories": False, "batch_options": {}}
        leases = Leases(cast(Any, SimpleNamespace(groups=GroupTable(), **said)))
        leases._run, leases.number = run, 0
        first, second = cast(Any, Shard(1)), cast(Any, Shard(2))
        leases._begin(first)
        ending = asyncio.create_task(leases._end_everywhere(run))
        await asyncio.sleep(0)
        leases.receive(second, "joined")
        await asyncio.sleep(0)
        for shard in (first, second):
            leases.receive(shard, "ended", None, [], {}, {})
        async with asyncio.timeout(60):
            await ending
        assert first.told == second.told == ["run", "end"]

    asyncio.run(main())
