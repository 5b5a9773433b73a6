"""New weights reach every replica, now or later, and what has a part of them samples nothing. In virtual time."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import EngineFacts, HalfLoaded
from fsm_rollout.engines.updating import ServerAddress, updating
from fsm_rollout.engines.weight_sources import Bucket, Tensors
from fsm_rollout.errors import EngineError
from fsm_rollout.scheduler.shared_servers import LoadedByDriver
from tests.unit.engines.kit import NOTICED, TIMES, Fragile, Place, answers, pooled, restarts, right, run, soon, states


@pooled(2)
async def test_all_that_was_loaded_is_loaded_again_from_the_last_folder_on(client: EngineClient, place: Place) -> None:
    loaded: list[tuple[Any, int | None]] = []

    class Notes(Fragile):
        async def update_weights(self, weights: Any, version: int | None = None) -> int:
            loaded.append((weights if isinstance(weights, str) else sorted(weights), version))
            return version or 0

    tensor = torch.zeros(1)
    for names in (["a"], "folder", ["b", "c"], ["c", "d"], ["b"], ["d"]):
        await client.update_weights(names if isinstance(names, str) else dict.fromkeys(names, tensor))
    place.build = lambda name: Notes()
    place.last().die()
    await asyncio.sleep(TIMES.ping_every + 5)
    # The first update of "b" and "c" has nothing left: two later ones together have replaced it.
    assert loaded == [("folder", 2), (["c", "d"], 4), (["b"], 5), (["d"], 6)]


@pooled(2)
async def test_a_replica_whose_weights_are_gone_waits_for_the_next_ones(client: EngineClient, place: Place) -> None:
    """Training has changed them in place: what it made of them is another version, which nobody has been given yet."""
    tensor = torch.ones(2)
    await client.update_weights({"w": tensor})
    tensor += 1
    place.last().die()
    await asyncio.sleep(TIMES.ping_every + 5)
    assert states(client) == ["starting", "up"]
    assert len(place.lives["replica-0"]) == 2
    await answers(client, "a")
    assert await client.update_weights({"w": tensor}) == 2
    await asyncio.sleep(1)
    assert states(client) == ["up", "up"]
    assert len(place.lives["replica-0"]) == 2, "the life that has waited"
    assert place.last().weight_version == 2
    assert [len(life.asked) for life in place.lives["replica-0"]] == [0, 0]


class Adopting(Fragile):
    """A server of others, which says what it ``has``."""

    has = 0

    @property
    def url(self) -> str:
        """One name is enough here."""
        return "replica-1"

    async def adopt(self, version: int, *, doubted: bool = False, adapted: bool | None = None) -> None:
        if self.has != version:
            raise HalfLoaded(f"it has {self.has}")
        self._weight_version = version


class Bucketed(Fragile):
    """Takes weights in buckets, and has a number for each tensor."""

    address = ServerAddress("http://there", None, 1)

    def __init__(self) -> None:
        super().__init__()
        self.model, self.is_mixed = {"v": 0.0, "w": 0.0}, False

    async def begin_update(self, known: Mapping[str, torch.Tensor], *, local: bool) -> None:
        """Nothing has to be told."""

    async def load_bucket(self, bucket: Bucket) -> None:
        self.model |= {name: tensor.item() for name, tensor in bucket.tensors.items()}
        self.is_mixed = True

    async def end_update(self, version: int | None) -> None:
        if version is None and self.is_mixed:
            raise HalfLoaded("a part")
        self.is_mixed, self._weight_version = False, version or 0


def of(**values: float) -> Tensors:
    """Return new weights that are known only as they are read, a bucket each."""
    return Tensors(lambda: {name: torch.tensor([value]) for name, value in values.items()}, bucket_bytes=4)


@pytest.mark.parametrize("ours", [True, False])
def test_what_an_update_that_failed_has_left_is_never_sampled_from(ours: bool) -> None:
    """A process of ours starts again; a server of others waits for weights that replace all that was mixed up."""
    place = Place(lambda _: Bucketed())
    place.urls = None if ours else ["a", "b"]

    def models() -> list[dict[str, float]]:
        return [cast(Bucketed, place.last(index)).model for index in range(2)]

    async def main(client: EngineClient) -> None:
        await answers(client, "warm")
        assert await client.update_weights(of(v=1.0)) == 1
        lost = "what has a part samples nothing until it has whole ones: .*not finite: [^;]*; a part$"
        with pytest.raises(EngineError, match=lost):
            await client.update_weights(of(w=2.0, v=2.0, u=math.nan))
        await asyncio.sleep(NOTICED)
        if ours:
            assert (models(), states(client)) == ([{"v": 1.0, "w": 0.0}] * 2, ["up", "up"])
            return
        assert states(client) == ["starting", "starting"], "what `w` was, nobody knows"
        await client.update_weights(of(v=3.0))
        await asyncio.sleep(NOTICED)
        assert states(client) == ["starting", "starting"], "and still nobody does"
        await client.update_weights(of(v=4.0, w=4.0))
        await asyncio.sleep(1)
        assert (models(), states(client)) == ([{"v": 4.0, "w": 4.0}] * 2, ["up", "up"])
        for answer in await answers(client, *map(str, range(4))):
            right(answer)

    run(place, main, 2)


def test_a_server_that_missed_an_update_is_asked_again_as_soon_as_the_driver_has_it_whole() -> None:
    """Also where that was the first update, before which nobody could say what the server had."""
    place, whole = Place(lambda _: Adopting()), list[str]()
    place.urls = ["a", "b"]

    async def driver_has(url: str) -> int:
        whole.append(url)
        await asyncio.sleep(7)
        cast(Adopting, place.last(1)).has = 1
        return 1

    async def main(client: EngineClient) -> None:
        lives = client.pool.here()
        missed = lives.all[1]
        missed.mix(None)
        lives.lose(missed, missed.engine, "it may have a part", half=True)
        cast(Adopting, place.last(0)).has = 1
        assert await client.update_weights(LoadedByDriver(driver_has, False), 1) == 1
        assert states(client) == ["up", "starting"]
        await asyncio.sleep(10)
        assert (whole, states(client)) == (["replica-1"], ["up", "up"])
        assert len(place.lives["replica-1"]) == 1, "the life that has waited"

    run(place, main, 2)


@pytest.mark.parametrize("ours", [True, False])
def test_whole_tensors_take_the_place_of_what_a_trainer_has_loaded_by_its_own_means(ours: bool) -> None:
    """Which cannot be had again: a replica that comes back, or had a part of it, waits for whole ones and no longer."""

    class Known(Bucketed):
        @property
        def facts(self) -> EngineFacts:
            return replace(super().facts, tensors=frozenset({"v", "w"}))

    place = Place(lambda _: Known())
    place.urls = None if ours else ["a", "b"]

    async def main(client: EngineClient) -> None:
        client.pool.here()
        async with updating(client.update_weights):
            pass
        await client.update_weights(of(v=2.0))
        place.last().die()
        await asyncio.sleep(TIMES.ping_every + 3)
        assert states(client) == ["starting", "up"], "what `w` was, only the trainer knows"
        await client.update_weights(of(v=3.0, w=3.0))
        await asyncio.sleep(NOTICED)
        assert states(client) == ["up", "up"]
        place.last(1).die()
        await asyncio.sleep(TIMES.ping_every + 3)
        assert states(client) == ["up", "up"]
        with pytest.raises(ZeroDivisionError):
            async with updating(client.update_weights):
                raise ZeroDivisionError
        await asyncio.sleep(NOTICED)
        await client.update_weights(of(v=4.0, w=4.0))
        await asyncio.sleep(NOTICED)
        assert states(client) == ["up", "up"]
        assert [cast(Bucketed, place.last(index)).model for index in range(2)] == [{"v": 4.0, "w": 4.0}] * 2

    run(place, main, 2)


@pooled(2)
async def test_weights_that_come_while_a_replica_loads_older_ones_are_loaded_too(
    client: EngineClient, place: Place
) -> None:
    class Slow(Fragile):
        async def update_weights(self, weights: Any, version: int | None = None) -> int:
            await asyncio.sleep(5)
            return await super().update_weights(weights, version)

    await client.update_weights("first")
    place.build = lambda name: Slow()
    place.last().die()
    await asyncio.sleep(TIMES.ping_every + 3)
    assert states(client) == ["starting", "up"]
    assert await client.update_weights("second") == 2
    await asyncio.sleep(30)
    assert states(client) == ["up", "up"]
    assert place.last().weight_version == 2


def test_how_long_an_update_holds_everything_is_known_by_phase() -> None:
    class Deliberate(Fragile):
        async def pause(self) -> None:
            await asyncio.sleep(0.5)
            await super().pause()

        async def update_weights(self, weights: Any, version: int | None = None) -> int:
            await asyncio.sleep(5.0)
            return await super().update_weights(weights, version)

        async def resume(self) -> None:
            await asyncio.sleep(0.25)
            await super().resume()

    async def main(client: EngineClient) -> None:
        under_way = soon(client, *map(str, range(4)))
        for _ in range(2):
            await asyncio.sleep(1.5)
            await client.update_weights("a folder")
        await under_way
        assert {phase: (seen.count, seen.figures()["max"]) for phase, seen in client.pool.update_times.items()} == {
            "check": (2, 0.0), "hold": (2, 0.5), "load": (2, 5.0), "release": (2, 0.25), "paused": (2, 5.75)
        }  # fmt: skip

    run(Place(lambda _: Deliberate()), main, 2)


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf")])
@pooled(2)
async def test_weights_that_nobody_takes_change_nothing(client: EngineClient, place: Place, bad: float | None) -> None:
    """What are no numbers is refused before anybody is asked."""
    asked = soon(client, *map(str, range(4)))
    await asyncio.sleep(1.5)
    for life in place.all:
        life.refuses.add("update" if bad is None else "pause")
    says = r"no replica took the weights, so nothing has changed: .*a shape does not"
    weights: dict[str, torch.Tensor] = {}
    if bad is not None:
        says = r"new weight 'b' is not finite: . NaN and . infinite of 3 values"
        weights = {"a": torch.ones(2), "b": torch.tensor([1.0, bad, 2.0])}
    with pytest.raises(EngineError, match=says):
        await client.update_weights(weights)
    assert client.weight_version == 0
    for answer in await asked:
        right(answer)
        assert answer.versions == [(len(answer.ids), 0)]
    assert restarts(client) == [0, 0]


@pooled(2)
async def test_a_replica_that_alone_fails_an_update_comes_back_with_it(client: EngineClient, place: Place) -> None:
    asked = soon(client, *map(str, range(4)))
    await asyncio.sleep(1.5)
    place.last().refuses.add("update")
    assert await client.update_weights({}) == 1
    for answer in await asked:
        right(answer)
        assert [version for _, version in answer.versions] == [0, 1]
    await asyncio.sleep(5)
    assert (restarts(client), states(client)) == ([1, 0], ["up", "up"])
    assert place.last().weight_version == 1


class Refuses(Fragile):
    """Cannot load what it is given, or dies of it."""

    dies = False
    tried: list[int | None]

    async def update_weights(self, weights: Any, version: int | None = None) -> int:
        self.tried.append(version)
        if self.dies:
            self.die()
        self.refuses.add("update")
        return await super().update_weights(weights, version)


@pytest.mark.parametrize(("dies", "says"), [(False, "a shape"), (True, "is gone")])
@pooled()
async def test_weights_that_come_while_all_are_lost_are_looked_at_before_they_count(
    client: EngineClient, place: Place, dies: bool, says: str
) -> None:
    """Else nobody would come back, as nobody could load them; what all die of is not loaded a third time."""
    tried: list[int | None] = []

    def build(name: str) -> Fragile:
        life = Refuses()
        life.dies, life.tried = dies, tried
        return life

    await answers(client, "a")
    place.build = build
    place.last().die()
    while not dies and states(client) == ["up"]:  # noqa: ASYNC110  # until a ping finds out
        await asyncio.sleep(0.1)
    with pytest.raises(EngineError, match=f"no replica took the weights, so nothing has changed: .*{says}"):
        await client.update_weights({"w": torch.ones(1)})
    assert tried in ([1], [1, 1])  # the first of two tries may have been its predecessor's
    assert client.weight_version == 0
    await asyncio.sleep(5)
    assert states(client) == ["up"]


@pooled(2)
async def test_an_update_that_its_caller_gives_up_is_carried_out_everywhere(client: EngineClient, place: Place) -> None:
    client.pool.here()
    updating = asyncio.create_task(client.update_weights({}))
    await asyncio.sleep(0)
    updating.cancel()
    await asyncio.sleep(5)
    assert [client.weight_version, *(life.weight_version for life in place.all)] == [1, 1, 1]
    await answers(client, "a")
