"""The ledger of requests: who is asked when, and that each ends once with all that was streamed. In virtual time."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.errors import EngineError
from tests.embedded import tokenizer
from tests.unit.engines.kit import (
    TEXT,
    Fragile,
    Place,
    answers,
    ask,
    done,
    make,
    now,
    pooled,
    right,
    run,
    scripted,
    soon,
)  # fmt: skip

# -- who is asked when -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
@pooled(turns=lambda r: Turn(text=TEXT, delay=10.0 if r.trajectory_id == "slow" else 1.0))
async def test_what_is_asked_in_one_pass_is_one_call_per_replica_and_nobody_waits_for_another(
    client: EngineClient, place: Place, count: int
) -> None:
    asked = [client.submit(ask(name)) for name in ("slow", *"abcdefghijk")]
    await done(*asked[1:])
    assert (now(), client.pool.dispatches, place.asked) == (1.0, count, [12 // count] * count)
    await done(asked[0])
    assert now() == 10.0


@pooled(turns=[Turn(text="one two three four five", chunks=5, delay=1.0)], engine={"max_running": 1})
async def test_what_prepares_a_dispatch_is_called_for_dispatches_alone(client: EngineClient, place: Place) -> None:
    """The journal is written then: not for each chunk that comes while requests wait for room."""
    called_before: list[int] = []
    await client.begin(lambda: called_before.append(client.pool.dispatches))
    await answers(client, *map(str, range(40)))
    assert called_before == list(range(client.pool.dispatches))
    await client.drain()
    await answers(client, "more")
    assert len(called_before) == client.pool.dispatches - 1


@pooled(2, engine={"max_running": 2})
async def test_what_goes_on_comes_before_what_returns_and_that_before_what_begins(
    client: EngineClient, place: Place
) -> None:
    """Each replica has what it is given at first, and the rest waits; so it does when a replica is lost.

    What was lost with it comes before all that begins, too, but may wait for its own replica while another has room.
    """
    first = [client.submit(ask(f"first-{i:03}")) for i in range(150)]
    await asyncio.sleep(1.5)
    place.last().die()
    later = [client.submit(ask(f"returns-{i}", turn=1 + i)) for i in range(8)]
    later.append(client.submit(replace(ask("goes on", turn=5), sampled=1)))
    await done(*first, *later)
    for each in (*first, *later[:-1]):
        right(each)
    lost = place.all[0].asked
    came = [line for life in place.all for line in life.log if isinstance(line.what, Request) and line.at > 1.5]
    names = [line.what.request_id for line in sorted(came, key=attrgetter("at"))]
    returns = [f"returns-{i}" for i in range(8)]
    assert names[0] == "goes on"
    assert [name for name in names[1:] if "#" not in name] == [*returns, *(f"first-{i:03}" for i in range(64, 150))]
    again = [name for name in names if "#" in name]
    assert again == [f"{request.request_id}#2" for request in lost]
    assert max(map(names.index, again)) < names.index("first-064")


@pytest.mark.parametrize("load", [None, KeyError("running"), Load()])
def test_an_engine_that_does_not_say_how_busy_it_is_gets_all_there_is(
    load: object, caplog: pytest.LogCaptureFixture
) -> None:
    """One alone has nobody to leave requests to, and nothing is known of its room."""

    class Silent(ScriptedEngine):
        came = 0

        def load(self) -> Any:
            if isinstance(load, Exception):
                raise load
            return load

        async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
            self.came += len(requests)
            while self.came < 300:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
            async for chunk in super().generate(requests):
                yield chunk

    async def body(client: EngineClient) -> None:
        async with asyncio.timeout(30.0):
            for answer in await answers(client, *map(str, range(300))):
                right(answer, "yes")

    run(Silent(lambda r: Turn(text="yes"), tokenizer=tokenizer()), body)
    warnings = [record.getMessage() for record in caplog.records]
    assert ["does not say how busy it is" in warning for warning in warnings] == [True] * (load != Load())


# -- ids -------------------------------------------------------------------------------------------------------------


def test_an_id_that_the_engine_still_has_is_not_used_again() -> None:
    """An abort slower than the grace leaves the request there; the next under its name is answered, with its own."""

    class Late(ScriptedEngine):
        async def abort(self, request_ids: Iterable[str]) -> None:
            """Take it an hour later."""

    def script(request: Request) -> Turn:
        slow = request.trajectory_id == "slow"
        return Turn(text="new" if "#" in request.request_id else "old", delay=900.0 if slow else 100.0)

    engine = Late(script, tokenizer=tokenizer(), log=True)

    async def body(client: EngineClient) -> None:
        late, slow = client.submit(ask("a")), client.submit(ask("slow"))
        await asyncio.sleep(1.0)
        await client.abort(late)
        again, beside = client.submit(ask("a")), client.submit(ask("b"))
        await done(again, beside)
        right(again, "new")
        assert not late.ids
        after = client.submit(ask("a"))  # the engine is done with the first, if not with all of its call
        await done(after, slow)
        assert [again.attempt, beside.attempt, after.attempt] == [1, 1, 1]

    run(engine, body, silence=1000)
    assert [line.what.request_id for line in engine.log if isinstance(line.what, Request)] == [
        "a",
        "slow",
        "a#2",
        "b",
        "a",
    ]


class FailsFirst(ScriptedEngine):
    """Fails its first dispatch, a while after something in it has ended."""

    dispatches = 0

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        self.dispatches += 1
        first = self.dispatches == 1
        async for chunk in super().generate(requests):
            yield chunk
            if first and chunk.finish_reason is not None:
                await asyncio.sleep(1.0)
                raise EngineError("out of memory")


@pytest.mark.parametrize("together", [True, False])
def test_requests_of_one_name_never_share_an_id(together: bool) -> None:
    """Neither when they fail together, nor when one is asked for again beside the dispatch that it was of."""
    turns = {"short": Turn(text="yes", delay=1.0), "a": Turn(text="yes", delay=9.0)}

    async def body(client: EngineClient) -> None:
        other = EngineClient(client.pool)
        asked = [client.submit(ask("a")), client.submit(ask("short"))]
        if together:
            asked.append(other.submit(ask("a")))
        else:
            await done(asked[1])
            asked.append(other.submit(ask("short")))
        await done(*asked)
        for answer in asked:
            right(answer, "yes")
        assert asked[2].attempt == (2 if together else 1)

    run(FailsFirst(lambda r: turns[r.trajectory_id], tokenizer=tokenizer()), body)


# -- ends ------------------------------------------------------------------------------------------------------------


@pooled(2, engine={"max_running": 1})
async def test_aborts_end_what_waits_at_once_and_what_runs_with_its_tokens(client: EngineClient, place: Place) -> None:
    """All that are aborted in one pass are one message to each replica."""
    told: list[int] = []
    for life in place.all:
        life.abort = lambda ids, abort=life.abort: (told.append(len(ids)), abort(ids))[1]  # type: ignore[method-assign,misc]
    asked = [client.submit(ask(f"{i:03}")) for i in range(100)]
    await asyncio.sleep(3.5)
    await asyncio.gather(*map(client.abort, asked))
    assert {answer.finish_reason for answer in asked} == {"abort"}
    assert sum(bool(answer.ids) for answer in asked) == len(told) == 2
    assert [replica.in_flight for replica in client.pool.replicas] == [0] * len(place.lives)
    assert now() == 3.5


@pooled()
async def test_an_abort_that_nobody_answers_ends_all_the_same(client: EngineClient, place: Place) -> None:
    asked = soon(client, "a")
    await asyncio.sleep(2.5)
    place.last().stuck = True
    await asyncio.sleep(1)
    await asyncio.gather(*map(client.abort, client.pool.under_way()))
    assert (await asked)[0].finish_reason == "abort"


@pooled(turns=[Turn(text="one two three", delay=30.0)])
async def test_a_request_aborted_in_the_turn_of_its_flush_never_reaches_the_engine(
    client: EngineClient, place: Place
) -> None:
    """The abort comes between the flush and the call to the engine, which does not know the request then."""
    stays, goes = client.submit(ask("stays")), client.submit(ask("goes"))
    await asyncio.get_running_loop().create_task(client.abort(goes))  # begins right behind the flush
    assert (now(), goes.finish_reason) == (0.0, "abort")
    assert await done(stays) == ["stop"]
    assert [request.request_id for request in place.last().asked] == ["stays"]
    assert client.pool.dispatches == 1


@given(
    st.lists(st.sampled_from(["stop", "mended", "crash", "error", "abort"]), min_size=1, max_size=8), st.integers(1, 3)
)
def test_every_request_ends_once_with_all_that_was_emitted(kinds: list[str], max_running: int) -> None:
    """Oracle: the engine's log, request by request."""
    more: dict[str, dict[str, Any]] = {
        "stop": {},
        "abort": {"hang": True},
        "mended": {"error": "Overload: x", "fails": 1},
        "crash": {"crash": "y", "fails": 1},
        "error": {"error": "Overload: x"},
    }

    def script(request: Request) -> Turn:
        name, _, kind = request.trajectory_id.partition("-")
        return Turn(text=f"number {name} says {kind}", chunks=3, delay=0.5, **more[kind])

    engine = ScriptedEngine(script, tokenizer=tokenizer(), log=True, max_running=max_running)

    async def body(client: EngineClient) -> list[PendingRequest]:
        asked = [client.submit(ask(f"{index}-{kind}")) for index, kind in enumerate(kinds)]
        await asyncio.sleep(100)
        for pending in asked:
            await client.abort(pending)
        return asked

    for pending in run(engine, body, silence=1000):
        name = pending.request.request_id
        chunks = [line.what for line in engine.log if isinstance(line.what, Chunk)]
        emitted = [token for chunk in chunks if chunk.request_id.split("#")[0] == name for token in chunk.ids]
        assert pending.done.happened
        assert list(pending.ids) == emitted
        assert len(pending.logprobs) == sum(count for count, _ in pending.versions) == len(emitted)


@pytest.mark.parametrize("restarts", [True, False])
def test_what_is_asked_of_a_closed_engine_ends_at_once(restarts: bool) -> None:
    async def body(client: EngineClient) -> None:
        await answers(client, "a")
        await client.pool.aclose()
        await client.sleep()  # harmless: nobody is there
        with pytest.raises(EngineError, match="the pool is closed"):
            await client.update_weights({})
        told: list[PendingRequest] = []
        pending = client.submit(ask("b"))
        pending.on_end = told.append  # as for a worker's request: who asks is told, too
        assert await done(pending) == ["abort"]
        assert told == [pending]
        assert str(pending.error) == "the pool is closed; build another"

    run(Place() if restarts else scripted(Turn(text="yes")), body)


def test_a_closed_pool_serves_no_other_loop() -> None:
    pool = make(Place(), 2)
    asyncio.run(pool.aclose())

    async def ask_again() -> None:
        EngineClient(pool).submit(ask("a"))

    with pytest.raises(EngineError, match="the pool is closed; build another"):
        asyncio.run(ask_again())


def test_a_pool_serves_one_loop_after_another() -> None:
    quick = Place(lambda _: Fragile([Turn(text="a")]))
    pool = make(quick, 2)

    async def leave() -> None:
        quick.last()._script = lambda _: Turn(hang=True, text="a")
        EngineClient(pool).submit(ask("left behind"))
        await asyncio.sleep(0.01)

    async def go_on() -> str | None:
        quick.last()._script = [Turn(text="a")]
        return (await answers(EngineClient(pool), "left behind"))[0].finish_reason

    asyncio.run(leave())
    assert asyncio.run(go_on()) == "stop"
    assert asyncio.run(go_on()) == "stop"
    asyncio.run(pool.aclose())
    assert all(life.stopped for life in quick.all)


async def test_a_pool_may_be_closed_from_another_loop_while_its_own_still_runs() -> None:
    """As ``with Rollout(…) as rollout: await rollout.arun(…)`` does."""
    place = Place()
    pool = make(place, 2)
    await EngineClient(pool).pause()
    await asyncio.to_thread(asyncio.run, pool.aclose())
    assert all(life.stopped for life in place.all)
