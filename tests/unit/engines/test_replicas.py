"""The lives of a pool's replicas, and the orders that all of them follow. In virtual time."""

import asyncio
import logging
import re
import threading

import pytest
import torch

from fsm_rollout.engines import replicas as replicas_module
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Engine
from fsm_rollout.engines.replica import LocalPlacement, Placement
from fsm_rollout.engines.router import LeastLoadedRouter
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.errors import EngineError
from fsm_rollout.testing import run_virtual
from tests.embedded import tokenizer
from tests.unit.engines.kit import (
    NOTICED,
    TIMES,
    Fragile,
    Place,
    answers,
    ask,
    done,
    make,
    now,
    pooled,
    restarts,
    right,
    run,
    soon,
    states,
)

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
