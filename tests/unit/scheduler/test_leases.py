"""What a driver says to its shards, where these come and go at awkward moments."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsm_rollout.errors import EngineError
from fsm_rollout.scheduler.leases import Leases
from fsm_rollout.scheduler.run_state import GroupTable
from fsm_rollout.scheduler.shard_placement import Started
from fsm_rollout.scheduler.shards import MOST_PAUSE, Shards
from fsm_rollout.testing import run_virtual


class Shard:
    """One that only notes what it is told."""

    def __init__(self, number: int) -> None:
        self.number, self.asked, self.alive, self.stats = number, False, True, dict[str, Any]()
        self.groups, self.queued, self.lag = dict[str, Any](), dict[str, None](), dict[str, Any]()
        self.told: list[str] = []

    def send(self, what: str, *_: Any) -> None:
        self.told.append(what)


async def test_a_shard_that_joins_while_the_run_ends_is_told_of_that_too() -> None:
    changed = asyncio.Event()

    async def change() -> None:
        changed.clear()
        await changed.wait()

    run = cast(Any, SimpleNamespace(n=1, stop=None, changed=changed, change=change))
    starter = SimpleNamespace(run=SimpleNamespace(step=None, trace=None), run_number=0)
    said = {"starter": starter, "evaluation": None, "histories": False, "batch_options": {}, "lag": None}
    recorder = SimpleNamespace(listeners=())
    leases = Leases(cast(Any, SimpleNamespace(groups=GroupTable(), recorder=recorder, **said)))
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


class Obedient:
    """The link to a shard that does what it is told, in a second, unless ``refuses`` says that it cannot."""

    def __init__(self, refuses: Callable[[tuple[Any, ...]], bool]) -> None:
        self.told, self._refuses = list[tuple[Any, ...]](), refuses
        self.receive: Any = None
        self.lost: Any = None
        self.wire_bytes = 0

    def send(self, kind: str, *parts: Any) -> None:
        if kind == "call":
            number, *call = parts
            self.told.append(tuple(call))
            error = ("EngineError", [], f"it cannot {call}") if self._refuses(tuple(call)) else None
            asyncio.get_running_loop().call_later(1, self.receive, "answer", number, error, None)


class Fleet:
    """Shards of which each that starts is noted; those of these numbers (from 1) refuse some calls, or do not start."""

    shards: Shards

    def __init__(self, refuses: dict[int, tuple[Any, ...]], fail: Sequence[int] = ()) -> None:
        self.links, self._refuses, self._fail, self.starts = list[Obedient](), refuses, fail, 0
        self.ended = list[Obedient]()

    def begin(self, count: int) -> None:
        self.shards = Shards(count, self._start, lambda number: b"")

    def _start(self, setup: bytes) -> Started:
        self.starts += 1
        if self.starts in self._fail:
            raise EngineError("the GPU of the one that died is not free yet")
        refused = self._refuses.get(self.starts)
        link = Obedient(lambda call: call == refused)
        self.links.append(link)
        return Started({}, cast(Any, link), lambda: self.ended.append(link))

    async def missing(self) -> None:
        """Have those that are missing started, and wait."""
        self.shards.start_missing()
        while len(self.shards.alive) < self.shards.count:  # noqa: ASYNC110  # in virtual time
            await asyncio.sleep(1)

    def told(self, shard: int) -> list[tuple[Any, ...]]:
        return self.links[shard - 1].told


def directed(main: Callable[[Fleet], Any], refuses: dict[int, tuple[Any, ...]], fail: Sequence[int] = ()) -> None:
    """Run ``main`` with two such shards, in virtual time."""

    async def body() -> None:
        fleet = Fleet(refuses, fail)
        fleet.begin(2)
        await fleet.shards.here()
        await main(fleet)
        await fleet.shards.aclose()

    run_virtual(body())


FIRST, SECOND = ("load", "first", 1), ("load", "second", 2)


def test_a_shard_that_cannot_start_is_started_again_and_the_run_goes_on() -> None:
    async def main(fleet: Fleet) -> None:
        fleet.shards.all[0].started.link.lost()
        await fleet.missing()
        assert (fleet.starts, [shard.number for shard in fleet.shards.all]) == (5, [2, 5])
        assert asyncio.get_running_loop().time() < MOST_PAUSE

    directed(main, {}, fail=(3, 4))


@pytest.mark.parametrize("first", [1, 2])
def test_none_stays_where_one_of_the_first_cannot_start(first: int) -> None:
    fleet = Fleet({}, fail=(first,))
    with pytest.raises(EngineError, match="not free yet") as raised:
        fleet.begin(3)
    assert set(fleet.ended) == set(fleet.links), f"while {raised} is kept"


def test_why_one_of_the_first_cannot_start_is_said_also_where_an_earlier_one_comes_up_after_it() -> None:
    failed = threading.Event()

    class Watched(Shards):
        def _first_started(self, place: int) -> None:
            try:
                super()._first_started(place)
            finally:
                failed.set()

    def start(place: bytes) -> Started:
        if place == b"1":
            raise EngineError("no such reward")
        assert failed.wait(600)
        return Started({}, cast(Any, SimpleNamespace()), lambda: None)

    with pytest.raises(EngineError, match="no such reward"):
        Watched(2, start, lambda place: str(place).encode())


def test_weights_that_some_shards_cannot_load_are_in_all_that_stay() -> None:
    """Else two sets of weights would have one number."""

    async def main(fleet: Fleet) -> None:
        shards = fleet.shards
        await shards.take_weights(*FIRST)
        assert [shard.number for shard in shards.alive] == [2]
        await fleet.missing()
        assert (fleet.told(3), [shard.number for shard in shards.alive]) == ([FIRST], [2, 3])
        with pytest.raises(EngineError, match="it cannot"):
            await shards.take_weights(*SECOND)
        assert [shard.number for shard in shards.alive] == [2, 3], "all have what they had"
        shards.all[0].started.link.lost()
        await fleet.missing()
        assert fleet.told(4) == [FIRST]

    directed(main, {1: FIRST, 2: SECOND, 3: SECOND})


def test_a_shard_that_joins_during_an_update_is_never_left_held() -> None:
    """Its first weights fail, and are replaced meanwhile; one whose last ones fail takes no part."""

    async def main(fleet: Fleet) -> None:
        shards = fleet.shards
        await shards.order("hold", "update")
        await shards.take_weights(*FIRST)
        for number in (3, 4):
            shards.all[0].started.link.lost()
            joined = asyncio.create_task(fleet.missing())
            if number == 3:
                while not fleet.links[number - 1 :] or FIRST not in fleet.told(number):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                await shards.take_weights(*SECOND)
                await shards.undo("hold", "update")
            await joined
        assert fleet.told(3) == [("hold", "update"), FIRST, SECOND, ("release", "update")]
        assert fleet.told(4) == [SECOND]
        assert fleet.told(5) == [SECOND]
        assert [shard.number for shard in shards.alive] == [3, 5]

    directed(main, {3: FIRST, 4: SECOND})
