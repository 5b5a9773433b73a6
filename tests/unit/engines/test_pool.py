"""The ledger of requests: who is asked when, and that each ends once with all that was streamed. In virtual time."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Chunk, Engine, Load, Request, SamplingParams
from fsm_rollout.engines.replica import LocalPlacement, Placement
from fsm_rollout.engines.router import LeastLoadedRouter, ReplicaView
from fsm_rollout.engines.scripted.engine import ScriptedEngine, SessionEnded, Turn
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.tokens import as_ids
from tests.embedded import tokenizer
from tests.unit.engines.kit import (
    TEXT,
    TIMES,
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


@pooled(3)
async def test_chunks_name_their_replica_and_its_numbers_add_up(client: EngineClient, place: Place) -> None:
    found = await answers(client, *map(str, range(9)))
    for answer in found:
        right(answer)
    assert Counter(answer.replica for answer in found) == {"replica-0": 3, "replica-1": 3, "replica-2": 3}
    replicas = client.pool.replicas
    assert [replica.requests for replica in replicas] == [3, 3, 3]
    assert (client.pool.requests, client.pool.dispatches) == (9, 3)
    assert sum(replica.tokens for replica in replicas) == sum(len(answer.ids) for answer in found)
    assert [replica.in_flight for replica in client.pool.replicas] == [0] * len(place.lives)


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
    """Each replica has a request, and the rest waits; so it does when a replica is lost."""
    first = [client.submit(ask(f"first-{i:03}")) for i in range(150)]
    await asyncio.sleep(1.5)
    place.last().die()
    later = [client.submit(ask(f"returns-{i}", turn=1 + i)) for i in range(8)]
    later.append(client.submit(replace(ask("goes on", turn=5), sampled=1)))
    await done(*first, *later)
    for each in (*first, *later[:-1]):
        right(each)
    admitted = sorted((*first, *later), key=lambda each: each.admitted_at or 0.0)
    places = [admitted.index(each) for each in (*first, *later)]
    late = 3 * 32  # what the replicas' engines have taken already
    assert max(places[len(first) :]) < late
    assert places[-1] == min(places[len(first) :])
    assert all(abs(place - rank) <= late for rank, place in enumerate(places[: len(first)]))


def test_a_full_replica_is_not_waited_for_while_another_idles() -> None:
    """One replica is a hundred times slower: the other one does nearly all."""

    def build(name: str) -> Fragile:
        return Fragile([Turn(text=TEXT, chunks=8, delay=30.0 if name == "replica-0" else 0.3)] * 6, max_running=4)

    async def body(client: EngineClient) -> None:
        async def chat(index: int) -> None:
            for turn in range(6):
                await done(client.submit(replace(ask(str(index), turn), request_id=f"{index}-{turn}")))

        await asyncio.gather(*(chat(i) for i in range(64)))
        requests = [replica.requests for replica in client.pool.replicas]
        assert sum(requests) == 64 * 6
        assert requests[0] < 64

    run(Place(build), body, 2)


def test_a_replica_that_does_not_say_yet_how_much_it_holds_is_given_its_part() -> None:
    """One on Ray says it with its first answer, so nobody would ever ask one that has come later."""

    class Quiet(Fragile):
        def load(self) -> Load:
            return replace(super().load(), capacity=1000 if self.asked else 0)

    async def body(client: EngineClient) -> None:
        for names in ("ab", "cd"):  # once they have answered, it is known how much they hold
            await answers(client, *names)
        assert await client.pool.add() == "replica-2"
        place.last().die()
        await asyncio.sleep(TIMES.ping_every + 5)
        for answer in await answers(client, *map(str, range(12))):
            right(answer)
        assert place.asked == [2, 4, 2 + 4, 4], "each has a third of what was asked at once"

    run(place := Place(lambda _: Quiet()), body, 2)


class Sized(Fragile):
    """Says how much memory it has, and notes how often it was asked."""

    def __init__(self, capacity: int, **engine: Any) -> None:
        super().__init__(**engine)
        self.capacity, self.looks = capacity, 0

    def load(self) -> Load:
        self.looks += 1
        return replace(super().load(), capacity=self.capacity)


def test_a_replica_that_has_nothing_to_do_is_given_its_part() -> None:
    """Also where it was about to leave, and stays; it is asked once how busy it is, and not with each dispatch."""

    async def shared(client: EngineClient, name: str) -> None:
        busy, before = client.submit(ask(name)), place.asked
        await asyncio.sleep(1)
        await done(busy, *await answers(client, *(f"{name}-{number}" for number in range(19))))
        assert [now - then for now, then in zip(place.asked, before, strict=True)] == [10, 10]

    async def body(client: EngineClient) -> None:
        for name in "abc":
            await answers(client, name)
        assert (place.asked, place.last(1).looks) == ([3, 0], 2), "when the pool began, and when its event loop did"
        await shared(client, "d")
        under_way = soon(client, *"efgh")
        await asyncio.sleep(1)
        leaving = asyncio.create_task(client.pool.remove("replica-1"))
        await asyncio.sleep(1)
        late = soon(client, "i")
        await asyncio.sleep(1)
        leaving.cancel()
        await done(*await under_way, *await late)
        await shared(client, "j")

    run(place := Place(lambda _: Sized(1000)), body, 2)


@pytest.mark.parametrize("capacity", [10, 20, 0])
def test_the_first_that_are_asked_have_to_fit_into_the_memory(capacity: int) -> None:
    async def body(client: EngineClient) -> None:
        for name in "abcdefgh":
            client.submit(replace(ask(name), ids=as_ids([ord(name)] * 3)))
        await asyncio.sleep(1)
        assert place.asked == [{10: 2, 20: 5, 0: 8}[capacity]], "three tokens each, and a part is left for their growth"

    run(place := Place(lambda _: Sized(capacity)), body)


def test_engines_need_not_keep_who_was_paused() -> None:
    async def body(client: EngineClient) -> None:
        for request_id, name, tokens in (("a", "a", 200), ("b", "b", 500), ("b1", "b", 900)):
            await done(client.submit(replace(ask(name), request_id=request_id, ids=as_ids([ord(name)] * tokens))))
        log = place.last().log
        assert [line.what.session for line in log if isinstance(line.what, SessionEnded)] == ["a"]

    run(place := Place(lambda _: Sized(1000)), body)


@pytest.mark.parametrize("shards", [1, 4])
def test_who_is_away_keeps_a_place_for_as_long_as_the_whole_engine_is_worth(shards: int) -> None:
    """A shard's part of the memory takes as long to be filled again as the whole does that serves all of them."""

    async def body(client: EngineClient) -> None:
        client.pool.placing.share = shards
        for name in "abc":
            await done(client.submit(replace(ask(name), ids=as_ids([ord(name)] * (480_000 // shards)))))
        assert now() == 3 * 8 + 2 * (2 * 8), "each takes 8 s, and b and c wait for two marks of 8 s"

    run(Place(lambda _: Sized(800_000, max_context=10**6)), body)


@given(capacity=st.integers(1000, 10**6), beside=st.floats(0, 1), shards=st.integers(2, 8))
def test_shards_of_a_server_give_way_to_its_other_users_and_take_one_another_for_none(
    capacity: int, beside: float, shards: int
) -> None:
    """None knows how much of what others hold is another shard's: that all have their whole parts is the guess."""

    class Used(ScriptedEngine):
        others = 0

        def load(self) -> Load:
            return Load(capacity=capacity, others=self.others)

    engine, theirs = Used([Turn(text=TEXT)], tokenizer=tokenizer()), int(beside * capacity / 2)
    pool = EnginePool(LocalPlacement(lambda name: engine))
    pool.placing.share, parts = shards, [0] * shards
    pool.placing.look(pool.replicas, True)
    assert pool.placing.residency is not None
    (memory,) = pool.placing.residency.memories.values()
    assert memory.capacity == capacity // shards, "before anything of ours runs there"
    pool.replicas[0].in_flight = 1
    for held in (0, theirs):
        for turn in range(40 * shards):  # each fills its part, and looks again
            engine.others = held + sum(parts) - parts[turn % shards]
            pool.placing.look(pool.replicas, True)
            parts[turn % shards] = memory.capacity
        assert max(parts) - min(parts) <= shards
        assert sum(parts) == pytest.approx(capacity - held * shards / (2 * shards - 1), abs=2 * shards)


class Broken:
    """Fails requests by their names."""

    def choose(self, request: Request, replicas: Sequence[ReplicaView]) -> Any:
        match request.trajectory_id:
            case "raises":
                raise KeyError("bad")
            case "nothing":
                return None
            case "name":
                return replicas[-1].name
            case "stranger":
                return ReplicaView("replica-9")
            case "later":
                return self._later(replicas)
        return replicas[-1]

    async def _later(self, replicas: Sequence[ReplicaView]) -> ReplicaView:
        return replicas[-1]


@pooled(2, router=Broken())
async def test_a_router_of_ones_own_decides_and_its_errors_stay_with_the_request(
    client: EngineClient, place: Place
) -> None:
    wrong = {
        "raises": "RouterFailed: router Broken failed: KeyError: 'bad'",
        "nothing": "RouterFailed: router Broken returned None; choose() must return one of the replicas",
        "name": "RouterFailed: router Broken returned 'replica-1'; choose() must return",
        "stranger": "RouterFailed: router Broken returned ReplicaView(name='replica-9'",
        "later": "RouterFailed: router Broken returned <coroutine object",
    }
    refused = await answers(client, *wrong)
    assert now() == 0.0
    for answer, message in zip(refused, wrong.values(), strict=True):
        assert answer.error is not None
        assert f"{answer.error.kind}: {answer.error}".startswith(message)
    assert "drop its 'async'" in str(refused[-1].error)
    first, _, last = await answers(client, "a", "nothing", "b")
    right(first)
    right(last)
    assert [replica.requests for replica in client.pool.replicas] == [0, 2]
    assert not client.pool.under_way()


class Last:
    """Always the last replica."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def choose(self, request: Request, replicas: Sequence[ReplicaView]) -> ReplicaView:
        self.seen.append((replicas[-1].in_flight, replicas[-1].waiting))
        return replicas[-1]


def test_a_router_sees_how_many_wait_for_a_replica_that_is_full() -> None:
    router = Last()
    run(Place(), lambda client: answers(client, *map(str, range(40))), 2, router=router)
    assert router.seen[:40] == [*((number, 0) for number in range(32)), *((32, number) for number in range(8))]


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_answered_does_not_depend_on_the_number_of_replicas(model: Any, tokenizer: Any, count: int) -> None:
    requests = [
        Request(f"r{i}", as_ids([i, 70, 80]), SamplingParams(12, seed=i, ignore_eos=True), trajectory_id=f"t{i}")
        for i in range(8)
    ]

    async def main(pool: EnginePool) -> list[list[int]]:
        client = EngineClient(pool)
        asked = [client.submit(request) for request in requests]
        await done(*asked)
        await pool.aclose()
        return [list(answer.ids) for answer in asked]

    alone = asyncio.run(main(EnginePool(Placement(TransformersEngine(model, tokenizer)))))
    place = LocalPlacement(lambda name: TransformersEngine(model, tokenizer))
    assert asyncio.run(main(EnginePool(place, count, router=LeastLoadedRouter()))) == alone


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


class FailsToAbort(ScriptedEngine):
    """An abort brings down the whole dispatch."""

    async def abort(self, request_ids: Any) -> None:
        self._crash(next(iter(self._running.values())).stream, "fell over")


def test_what_is_aborted_is_not_tried_again() -> None:
    engine = FailsToAbort([Turn(text="one two", hang=True)], tokenizer=tokenizer(), log=True)

    async def body(client: EngineClient) -> None:
        pending = client.submit(ask("a"))
        await asyncio.sleep(1.0)
        await client.abort(pending)
        await asyncio.sleep(100.0)
        assert (pending.finish_reason, pending.error) == ("abort", None)

    run(engine, body)
    assert sum(isinstance(line.what, Request) for line in engine.log) == 1


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


# -- silence ---------------------------------------------------------------------------------------------------------


class Mute(ScriptedEngine):
    """Says nothing at all, or nothing of what is not the first of a dispatch; or fails, or aborts, in odd ways."""

    def __init__(self, how: str) -> None:
        super().__init__([], tokenizer=tokenizer())
        self.how = how

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        if self.how == "cancelled":
            raise asyncio.CancelledError
        if self.how != "mute":
            yield Chunk(requests[0].request_id, as_ids([1]), [-1.0], finish_reason="length")  # type: ignore[arg-type]
        await asyncio.Event().wait()

    async def abort(self, request_ids: Any) -> None:
        if self.how == "deaf":
            await asyncio.Event().wait()


@pytest.mark.parametrize("how", ["selective", "cancelled", "deaf"])
def test_no_request_waits_for_ever(how: str) -> None:
    """Silence is measured for each request; an abort that hangs is waited for a bounded time."""

    async def body(client: EngineClient) -> None:
        _, silent = await answers(client, "a", "b")
        assert ("CancelledError" if how == "cancelled" else "nothing for 40 s") in str(silent.error)
        assert now() <= 40.0

    run(Mute(how), body, attempts=1)


def test_one_timer_gives_every_request_up_at_its_own_time() -> None:
    async def body(client: EngineClient) -> None:
        ends, most_timers = [], 0

        async def wait_for(name: str) -> None:
            await answers(client, name)
            ends.append(now())

        async with asyncio.TaskGroup() as tasks:
            for number in range(20):
                tasks.create_task(wait_for(str(number)))
                await asyncio.sleep(1.0)
                scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
                most_timers = max(most_timers, sum(not timer.cancelled() for timer in scheduled))
        assert ends == pytest.approx([40.0 + number for number in range(20)])
        assert most_timers == 1

    run(Mute("mute"), body, attempts=1)


# -- time stands still while nobody works ----------------------------------------------------------------------------


async def in_time(client: EngineClient, name: str, seconds: float) -> str | None:
    """Ask within so many seconds of work; return how that ended, ``None`` for out of time."""
    pending = None
    with suppress(TimeoutError), Deadline(seconds) as deadline:
        pending = client.submit(ask(name), deadline)
        await pending.done.wait()
    return None if pending is None or deadline.expired else pending.finish_reason


def test_deadlines_stand_still_while_queued_and_while_paused_and_silence_does() -> None:
    """Two requests of 4 s, one at a time, the engine paused for 10,000 s: neither has used more than 4 of its 5 s."""

    async def body(client: EngineClient) -> list[str | None]:
        both = asyncio.gather(in_time(client, "a", 5.0), in_time(client, "b", 5.0))
        await asyncio.sleep(1.0)
        await client.pause()
        late = asyncio.create_task(in_time(client, "c", 5.0))
        await asyncio.sleep(10_000.0)
        await client.resume()
        return [*await both, await late]

    engine = scripted(Turn(text="yes", delay=4.0), max_running=1)
    assert run(engine, body, attempts=1) == ["stop"] * 3


def test_a_deadline_stands_still_while_a_second_try_queues() -> None:
    """The first try fails after 2 s; the second waits 20 s for a place, and takes 2 s: four seconds of its time."""
    turns = {"a": Turn(text="one two", delay=1.0, chunks=2, crash="lost", fails=1), "long": Turn(text="x", delay=20.0)}

    async def body(client: EngineClient) -> None:
        first = asyncio.create_task(in_time(client, "a", 4.5))
        await asyncio.sleep(0.5)
        await answers(client, "long")
        assert await first == "stop"
        assert now() > 20

    run(ScriptedEngine(lambda r: turns[r.trajectory_id], tokenizer=tokenizer(), max_running=1), body)


def test_a_deadline_stands_still_while_a_replica_starts_again() -> None:
    """That may take longer than a visit may."""

    class Slow(Place):
        seconds = 0.0

        async def start(self, name: str) -> Engine:
            await asyncio.sleep(self.seconds)
            return await super().start(name)

    place = Slow()

    async def body(client: EngineClient) -> None:
        asked = asyncio.create_task(in_time(client, "a", 12.0))
        await asyncio.sleep(2.5)
        place.seconds = 40
        place.last().die()
        assert await asked == "stop"
        assert now() > 45

    run(place, body)


def test_a_hold_taken_while_paused_is_released_between_two_tries_too() -> None:
    """The request fails during the pause, and the engine goes on during the backoff: its deadline must run again."""

    async def body(client: EngineClient) -> None:
        late = asyncio.create_task(in_time(client, "a", 30.0))
        await asyncio.sleep(0.5)
        await client.pause()
        (pending,) = client.pool.under_way()
        client.pool._retries.failed(pending, EngineError("lost during the pause"))
        await client.resume()
        assert await late is None
        assert now() < 35.0

    run(scripted(Turn(text="yes", hang=True, delay=1.0)), body)


def test_what_was_paused_keeps_its_order() -> None:
    """One pause befalls many requests, which are out of time in the order in which they were asked for."""
    names, late = [f"r{number}" for number in range(50)], []

    async def body(client: EngineClient) -> None:
        async def wait_for(name: str) -> None:
            await in_time(client, name, 1.0)
            late.append(name)

        waiting = asyncio.gather(*map(wait_for, names))
        await asyncio.sleep(0.5)
        await client.pause()
        await client.resume()
        await waiting

    run(scripted(Turn(text="yes", hang=True)), body)
    assert late == names


def test_what_waits_for_a_sleeping_engine_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: EngineClient) -> list[PendingRequest]:
        await client.sleep()
        waiting = soon(client, "a", "b")
        await asyncio.sleep(100.0)
        await client.wake()
        return await waiting

    for answer in run(scripted(Turn(text="yes")), body):
        right(answer, "yes")
    told = [record.getMessage() for record in caplog.records]
    assert told == ["the engine is asleep: generations wait until it is woken"]


@pooled(sleeps=True)
async def test_an_engine_that_sleeps_between_runs_is_not_told_of(client: EngineClient, place: Place) -> None:
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = told.append  # type: ignore[method-assign]
    logging.getLogger("fsm_rollout.engines.pool").addHandler(handler)
    await client.sleep()
    waiting = soon(client, "a")
    await asyncio.sleep(1)
    await client.wake()
    right(*await waiting)
    assert told == []
