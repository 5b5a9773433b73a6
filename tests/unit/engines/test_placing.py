"""Where requests go: by the router, and as far as the replicas have room. In virtual time."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.placing import Placing
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Load, Request
from fsm_rollout.engines.replica import LocalPlacement, Replica
from fsm_rollout.engines.router import ReplicaView
from fsm_rollout.engines.scripted.engine import ScriptedEngine, SessionEnded, Turn
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
    now,
    pooled,
    right,
    run,
    soon,
)  # fmt: skip


class Sized(Fragile):
    """Says how much memory it has, and notes how often it was asked."""

    def __init__(self, capacity: int, *turns: Any, **engine: Any) -> None:
        super().__init__(*turns, **engine)
        self.capacity, self.looks = capacity, 0

    def load(self) -> Load:
        self.looks += 1
        return replace(super().load(), capacity=self.capacity)


@pytest.mark.parametrize("capacity", [0, 100_000])
@pytest.mark.parametrize(("chats", "turns"), [(64, 6), (150, 1)])
def test_a_full_replica_is_not_waited_for_while_another_idles(capacity: int, chats: int, turns: int) -> None:
    """One replica is a hundred times slower: the other one does nearly all, and who is resident there moves."""

    def build(name: str) -> Sized:
        said = [Turn(text=TEXT, chunks=8, delay=30.0 if name == "replica-0" else 0.3)] * turns
        return Sized(capacity, said, max_running=4)

    async def body(client: EngineClient) -> None:
        async def chat(index: int) -> None:
            for turn in range(turns):
                await done(client.submit(replace(ask(str(index), turn), request_id=f"{index}-{turn}")))

        await asyncio.gather(*(chat(i) for i in range(chats)))
        requests = [replica.requests for replica in client.pool.replicas]
        assert sum(requests) == chats * turns
        assert requests[0] < chats * turns / 4

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


def test_who_comes_back_while_nobody_waits_goes_on_where_less_than_half_as_much_is_held() -> None:
    """And its context is kept no more where it was, nor that of who waits for it."""
    engines: dict[str, Sized] = {}

    def build(name: str) -> Sized:
        return engines.setdefault(name, Sized(100_000))

    async def body(client: EngineClient) -> None:
        async def say(name: str, turn: int, tokens: int, trajectory: str) -> str:
            asked = replace(ask(name, turn), group_id="g", trajectory_id=trajectory, request_id=f"{name}{turn}")
            ids = as_ids([*range(3), *[ord(name)] * tokens])
            await done(pending := client.submit(replace(asked, ids=ids)))
            return pending.replica

        siblings = [await say("a", 0, 500, "g/0"), await say("b", 0, 1500, "g/1"), await say("c", 0, 500, "g/0/helper")]
        later = [await say("c", 1, 510, "g/0/helper"), await say("b", 1, 1510, "g/1")]
        assert (siblings, later) == (["replica-0"] * 3, ["replica-1", "replica-0"])
        ended = [line.what.session for line in engines["replica-0"].log if isinstance(line.what, SessionEnded)]
        assert ended == ["a", "c"]

    run(Place(build), body, 2)


@pytest.mark.parametrize(("room", "goes_to"), [(50, "replica-0"), (1000, "replica-1")])
def test_nobody_moves_to_a_replica_that_has_no_room_for_his_context(room: int, goes_to: str) -> None:
    """Others take up that one's memory: nothing of ours is held there, and what is alone is admitted anywhere."""

    async def body(client: EngineClient) -> None:
        async def say(name: str, turn: int, tokens: int) -> str:
            asked = replace(ask(name, turn), group_id="g", trajectory_id=f"g/{name}", request_id=f"{name}{turn}")
            ids = as_ids([*range(3), *[ord(name)] * tokens])
            await done(pending := client.submit(replace(asked, ids=ids)))
            return pending.replica

        assert [await say("a", 0, 1500), await say("b", 0, 500)] == ["replica-0"] * 2
        assert await say("b", 1, 510) == goes_to

    run(Place(lambda name: Sized(100_000 if name == "replica-0" else room)), body, 2)


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
    pool.placing.share, parts, seconds = shards, [0] * shards, itertools.count(1)
    pool.placing.look(pool.replicas, True, next(seconds))
    assert pool.placing.residency is not None
    (memory,) = pool.placing.residency.memories.values()
    assert memory.capacity == capacity // shards, "before anything of ours runs there"
    pool.replicas[0].in_flight = 1
    for held in (0, theirs):
        for turn in range(40 * shards):  # each fills its part, and looks again
            engine.others = held + sum(parts) - parts[turn % shards]
            pool.placing.look(pool.replicas, True, next(seconds))
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


def test_what_waits_for_the_only_replica_is_not_looked_at_while_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = list[Replica]()
    monkeypatch.setattr(Placing, "_keep_waiting", lambda placing, replica: counted.append(replica))
    engine = Fragile(lambda request: Turn(text=TEXT, chunks=4), max_running=4)
    assert len(run(engine, lambda client: answers(client, *map(str, range(100))))) == 100
    assert not counted
