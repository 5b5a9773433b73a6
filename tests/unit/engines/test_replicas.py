"""The lives of a pool's replicas, and the orders that all of them follow. In virtual time."""

import asyncio
import logging
import math
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from fsm_rollout.engines import replicas as replicas_module
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Engine, EngineFacts, HalfLoaded
from fsm_rollout.engines.replica import LocalPlacement, Placement
from fsm_rollout.engines.router import LeastLoadedRouter
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.engines.updating import ServerAddress, updating
from fsm_rollout.engines.weight_sources import Bucket, Tensors
from fsm_rollout.errors import EngineError
from fsm_rollout.scheduler.shared_servers import LoadedByDriver
from fsm_rollout.testing import run_virtual
from tests.embedded import tokenizer
from tests.unit.engines.kit import TEXT, TIMES, Fragile, Place, answers, ask, done, make, now, pooled, right, run, soon

NOTICED = TIMES.ping_every + TIMES.ping + 5  # seconds in which a loss is seen, and mended


def states(client: EngineClient) -> list[str]:
    return [replica.state for replica in client.pool.replicas]


def restarts(client: EngineClient) -> list[int]:
    return [replica.restarts for replica in client.pool.replicas]


# -- lives -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listens", [True, False])
@pooled(2, router=LeastLoadedRouter())
async def test_a_hung_replica_is_noticed_in_the_stated_time(client: EngineClient, place: Place, listens: bool) -> None:
    """One does not even answer pings, the other does but says nothing of its requests."""
    await answers(client, "warm")
    hung, begin = place.last(), now()
    if listens:
        hung._next_piece = lambda answer: None  # type: ignore[method-assign]
    else:
        hung.stuck = True
    for answer in await answers(client, *map(str, range(6))):
        right(answer)
    limit = TIMES.silence + TIMES.ping_every if listens else TIMES.ping_every + TIMES.ping
    assert now() - begin <= limit + 8 + 1  # and the answer itself takes eight seconds
    assert restarts(client) == [1, 0]


@pooled(2, turns=[Turn(text=TEXT, chunks=9, delay=35)])
async def test_a_slow_but_talking_replica_is_left_alone(client: EngineClient, place: Place) -> None:
    await answers(client, "a", "b")
    assert restarts(client) == [0, 0]


@pooled(2, restarts=2)
async def test_when_all_are_lost_for_good_the_cause_is_named(client: EngineClient, place: Place) -> None:
    asked = soon(client, *map(str, range(4)))
    await asyncio.sleep(1.5)
    place.failing_starts = 100
    for index in range(2):
        place.last(index).die()
    for answer in await asked + await answers(client, "new"):
        assert "all 2 replica(s) are lost for good: replica-0: no memory left" in str(answer.error)
    assert states(client) == ["dead", "dead"]
    assert place.starts["replica-0"] == 1 + 2
    for _ in range(2):
        with pytest.raises(EngineError, match="lost for good: replica-0: no memory left"):
            await client.update_weights({})
    assert client.weight_version == 0


@pooled(2, restarts=1)
async def test_a_replica_that_finishes_work_is_forgiven(client: EngineClient, place: Place) -> None:
    for life in range(5):
        await answers(client, f"{life}-a", f"{life}-b")
        place.last().die()
        await asyncio.sleep(10)
        assert states(client) == ["up", "up"]
    assert restarts(client) == [5, 0]


@pytest.mark.parametrize("hangs", [True, False])
@pooled()
async def test_a_lost_engine_that_cannot_be_closed_is_replaced_all_the_same(
    client: EngineClient, place: Place, hangs: bool
) -> None:
    asked = soon(client, "a")
    await asyncio.sleep(2.5)
    life = place.last()
    life.stopped = True  # as far as it can be

    async def stop() -> None:
        await (asyncio.Event().wait() if hangs else asyncio.sleep(0))
        raise OSError("no such process")

    life.aclose = stop  # type: ignore[method-assign]
    life.die()
    right((await asked)[0])


@pytest.mark.parametrize(("other", "says"), [(None, "no memory left"), (Fragile, "do not serve the same model")])
def test_a_start_that_fails_leaves_nothing_behind(other: type[Fragile] | None, says: str) -> None:
    def build(name: str) -> Fragile:
        life = Fragile()
        if name == "replica-1":
            life.eos_ids = frozenset({1})
        return life

    place = Place(build)
    place.failing_starts = 1 if other is None else 0
    with pytest.raises(EngineError, match=says):
        make(place, 3)
    assert all(life.stopped for life in place.all)


async def test_a_start_that_is_given_up_is_not_waited_for() -> None:
    """A thread that builds an engine cannot be ended; what it builds is dropped."""
    may_go_on, built = threading.Event(), []

    def build(name: str) -> ScriptedEngine:
        may_go_on.wait(600)
        built.append(name)
        return Fragile()

    starting = asyncio.ensure_future(LocalPlacement(build).start("replica-0"))
    await asyncio.sleep(0.05)
    starting.cancel()
    await asyncio.wait([starting])
    assert not built
    may_go_on.set()


def test_an_interruption_while_replicas_start_is_not_put_off_until_they_have() -> None:
    """A Ctrl-C under ``asyncio.run`` cancels the task, which has the thread and so hears nothing of it."""
    may_go_on, tasks = threading.Event(), []

    def build(name: str) -> ScriptedEngine:
        tasks[0].cancel()
        may_go_on.wait(600)
        return Fragile()

    async def main() -> None:
        tasks.append(asyncio.current_task())
        make(LocalPlacement(build))

    try:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(main())
    finally:
        may_go_on.set()


def test_a_start_that_takes_long_says_what_it_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Place):
        async def start(self, name: str) -> Engine:
            while waits and name == "replica-1" and not caplog.messages:  # noqa: ASYNC110  # a log has no event
                await asyncio.sleep(0)
            return await super().start(name)

    async def main() -> None:
        await make(Slow(), 2).aclose()

    waits = False
    with caplog.at_level(logging.INFO):
        run_virtual(main())
    assert [message.partition("; ")[2] for message in caplog.messages if "is up after" in message] == [
        "1 to go",
        "0 to go",
    ]
    caplog.clear()
    waits = True
    monkeypatch.setattr(replicas_module, "TELL_START_AFTER", 0.0)
    run_virtual(main())
    (message,) = caplog.messages
    assert re.fullmatch(r"still starting: waiting for (replica-0, )?replica-1, up to \d+ s \(start_timeout\)", message)


@pytest.mark.parametrize("seconds", [1.5, 4.0])
def test_a_close_that_takes_long_says_what_it_waits_for(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: EngineClient) -> None:
        await client.pause()
        stop = place.last(1).aclose

        async def slow() -> None:
            await asyncio.sleep(seconds)
            await stop()

        place.last(1).aclose = slow  # type: ignore[method-assign]

    place = Place()
    run(place, body, 2)
    assert caplog.messages == ["still closing: waiting for replica-1"] * (seconds > 2)


# -- weights ---------------------------------------------------------------------------------------------------------


@pooled(2)
async def test_a_dead_replica_comes_back_with_the_weights_and_works_again(client: EngineClient, place: Place) -> None:
    await answers(client, "warm")
    assert await client.update_weights({"w": torch.ones(2)}) == 1
    assert await client.update_weights("somewhere", 7) == 7
    assert await client.update_weights({}, 8) == 8
    place.last().die()
    await asyncio.sleep(5)
    assert states(client) == ["up", "up"]
    assert [life.weight_version for life in place.lives["replica-0"]] == [8, 8]
    for answer in await answers(client, *map(str, range(4))):
        assert answer.versions == [(len(answer.ids), 8)]
    assert len(place.last().asked) == 2


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


def test_a_trainer_that_finds_all_servers_unwell_is_told_why() -> None:
    """And not that what it has loaded by its own means cannot be had again."""

    class Unwell(Bucketed):
        async def end_update(self, version: int | None) -> None:
            raise HalfLoaded("a rank of it is gone")

    async def main(client: EngineClient) -> None:
        client.pool.here()
        with pytest.raises(EngineError, match="a rank of it is gone"):
            async with updating(client.update_weights):
                pass

    run(Place(lambda _: Unwell()), main, 2)


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


@pooled()
async def test_weights_for_an_engine_that_died_unnoticed_reach_its_successor(
    client: EngineClient, place: Place
) -> None:
    await answers(client, "a")
    place.last().die()
    assert await client.update_weights({"w": torch.ones(1)}) == 1
    assert place.last().weight_version == 1
    assert restarts(client) == [1]


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


# -- holds -----------------------------------------------------------------------------------------------------------


@pooled(2)
async def test_a_replica_that_returns_while_all_are_held_is_held(client: EngineClient, place: Place) -> None:
    asked = soon(client, *map(str, range(4)))
    await asyncio.sleep(2.5)
    await client.pause()
    sent = [replica.tokens for replica in client.pool.replicas]
    place.last().die()
    await asyncio.sleep(100)
    assert states(client) == ["up", "up"]
    fresh = soon(client, "new")
    await asyncio.sleep(100)
    assert [request.request_id for request in place.last().asked] == ["new"]
    assert [replica.tokens for replica in client.pool.replicas] == sent
    assert not asked.done()
    await client.resume()
    for answer in await asked + await fresh:
        right(answer)


@pooled()
async def test_nobody_starts_again_while_all_sleep(client: EngineClient, place: Place) -> None:
    """The memory is somebody else's then; weights that come meanwhile are there afterwards."""
    await answers(client, "a")
    await client.pause()
    await client.sleep()
    place.last().die()
    await asyncio.sleep(100)
    assert (states(client), len(place.all)) == (["starting"], 1)
    assert await client.update_weights({"w": torch.ones(1)}) == 1
    await client.wake()
    await client.resume()
    (answer,) = await answers(client, "b")
    right(answer)
    assert answer.versions == [(len(answer.ids), 1)]
    assert len(place.all) == 2


@pooled(2)
async def test_an_order_that_one_cannot_follow_costs_that_one(client: EngineClient, place: Place) -> None:
    await answers(client, "a")
    place.last().refuses.add("pause")
    await client.pause()
    assert states(client) == ["starting", "up"]
    await client.resume()
    place.last(1).refuses.add("sleep")
    await asyncio.sleep(5)
    place.last().refuses.add("sleep")
    await client.sleep()  # those that come back will
    assert states(client) == ["starting", "starting"]


class Slow(ScriptedEngine):
    """Takes a second for every order, of which the first half is enough to obey."""

    async def pause(self) -> None:
        await super().pause()
        await asyncio.sleep(1.0)

    async def resume(self) -> None:
        await asyncio.sleep(1.0)
        await super().resume()

    async def sleep(self) -> None:
        await super().sleep()
        await asyncio.sleep(1.0)

    async def wake(self) -> None:
        await asyncio.sleep(1.0)
        await super().wake()


@pytest.mark.parametrize(
    ("before", "order"), [("begin", "drain"), ("pause", "resume"), ("sleep", "wake"), ("wake", "pause")]
)
@pytest.mark.parametrize("after", [0.5, 1.5])
def test_an_order_that_its_caller_gives_up_holds_nobody_for_good(before: str, order: str, after: float) -> None:
    engine = Slow([Turn(text="yes")], tokenizer=tokenizer())

    async def body(client: EngineClient) -> None:
        await getattr(client, before)()
        order_given = asyncio.ensure_future(getattr(client, order)())
        await asyncio.wait([order_given], timeout=after)
        order_given.cancel()
        await client.resume()
        await client.begin()
        assert await done(client.submit(ask("a"))) == ["stop"]
        await client.drain()
        assert engine._asleep

    run(engine, body, sleeps=True)


# -- coming and going ------------------------------------------------------------------------------------------------


@pooled()
async def test_a_replica_that_comes_has_the_weights_and_the_holds_of_the_others(
    client: EngineClient, place: Place
) -> None:
    await client.update_weights("new", 7)
    await client.pause()
    assert await client.pool.add() == "replica-1"
    asked = soon(client, *map(str, range(40)))
    await asyncio.sleep(100)
    assert not asked.done()
    await client.resume()
    for answer in await asked:
        right(answer)
        assert {version for _, version in answer.versions} == {7}
    assert place.asked == [20, 20]
    assert await client.update_weights({}) == 8
    assert [life.weight_version for life in place.all] == [8, 8]


@pytest.mark.parametrize(("within", "stays"), [(1e9, True), (float("inf"), True), (2.5, False), (0.0, False)])
@pooled(2, router=LeastLoadedRouter())
async def test_one_that_leaves_ends_what_it_has_or_others_go_on_from_its_last_token(
    client: EngineClient, place: Place, within: float, stays: bool
) -> None:
    asked = soon(client, *map(str, range(4)))
    await asyncio.sleep(2.5)
    leaving = asyncio.create_task(client.pool.remove("replica-0", within))
    await asyncio.sleep(0)
    later = await answers(client, "later")
    for answer in [*await asked, *later]:
        right(answer)
    await leaving
    assert states(client) == ["left", "up"]
    assert place.last().stopped
    said = sum(stats.tokens for stats in client.pool.replicas)
    assert said == sum(len(answer.ids) for answer in [*await asked, *later]), "no token was sampled twice"
    assert place.asked == ([2, 3] if stays else [2, 5])
    assert "later" not in [request.request_id for request in place.last().asked]
    await asyncio.sleep(NOTICED)
    assert len(place.all) == 2, "nobody starts it again"


@pooled(3)
async def test_what_a_replica_that_was_removed_had_goes_on_at_once(client: EngineClient, place: Place) -> None:
    """Nothing has failed, so nothing is tried in parts to find what fails."""
    began, asked = now(), soon(client, *map(str, range(12)))
    for number in range(2):
        await asyncio.sleep(1.5)
        await client.pool.remove(f"replica-{number}", within=0.0)
    for answer in await asked:
        right(answer)
    assert [replica.moved > 0 for replica in client.pool.replicas] == [True, True, False]
    assert now() - began <= 8 + 3 * 1, "only the pieces that were under way are sampled again"


@pooled(2)
async def test_one_whose_leaving_is_given_up_stays(client: EngineClient, place: Place) -> None:
    asked = soon(client, *map(str, range(4)))
    await asyncio.sleep(1.5)
    leaving = asyncio.create_task(client.pool.remove("replica-0"))
    await asyncio.sleep(1)
    leaving.cancel()
    await asked
    assert not client.pool.replicas[0].leaving
    had = place.asked[0]
    await answers(client, *map(str, range(10, 40)))
    assert place.asked[0] > had
    await client.pool.remove("replica-0")


@pooled(2)
async def test_one_that_is_lost_while_it_leaves_is_not_started_again(client: EngineClient, place: Place) -> None:
    asked = soon(client, *map(str, range(40)))
    await asyncio.sleep(1.5)
    leaving = asyncio.create_task(client.pool.remove("replica-0"))
    await asyncio.sleep(0.1)
    place.last().die()
    for answer in await asked:
        right(answer)
    await leaving
    assert (states(client), len(place.all)) == (["left", "up"], 2)


@pooled(2)
async def test_who_cannot_come_or_leave_is_told_why(client: EngineClient, place: Place) -> None:
    pool = client.pool
    for call, message in {
        lambda: pool.remove("replica-3"): "no replica 'replica-3'; did you mean 'replica-",
        lambda: pool.add("http://there:30000"): "are started here, and have no url of their own",
    }.items():
        with pytest.raises(EngineError, match=message):
            await call()
    for placement, message in {
        Placement(Fragile()): "of one engine that was given; give an engine's spec",
        LocalPlacement(lambda name: Fragile(), []): "is a server that others started; say its url",
    }.items():
        with pytest.raises(EngineError, match=message):
            placement.admit(None)
    await pool.remove("replica-1")
    for name, message in {"0": " is the only replica that would stay", "1": " is dead, leaves or has left"}.items():
        with pytest.raises(EngineError, match=f"'replica-{name}'{message}"):
            await pool.remove(f"replica-{name}")
    place.build = lambda name: Fragile(max_context=99)
    with pytest.raises(EngineError, match="replica-2 does not serve the same model"):
        await pool.add()
    place.failing_starts = 1
    with pytest.raises(EngineError, match="no memory left"):
        await pool.add()
    assert states(client) == ["up", "left", "left", "left"]
    await answers(client, "a")
