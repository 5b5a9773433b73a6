"""Whatever comes over a pool's replicas, no token is lost, and none bears a version that did not sample it.

Updates, replicas that join, leave or are killed, notices that one will be gone: drawn, in virtual time. The oracle is
what each engine had loaded when it sent a chunk.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import ClassVar

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Chunk
from fsm_rollout.errors import EngineError
from tests.unit.engines.kit import Fragile, Place, answers, now, right, run, soon

HAPPENS = st.tuples(
    st.sampled_from(["update", "join", "leave", "notice", "kill"]),
    st.integers(0, 5),  # to which replica
    st.sampled_from([0.0, 0.5, 1.0, 2.5, 7.0]),  # seconds until the next
)

SWAPS = st.tuples(
    st.integers(0, 3),  # which replica leaves as another comes
    st.floats(0.5, 12.0),  # seconds since the one before
    st.sampled_from([0.0, 5.0, math.inf]),  # seconds that it has for what it has begun
)


class Witnessed(Fragile):
    """Sends chunks of which its own weights are known: for each request, at which places it had tokens of which."""

    seen: ClassVar[dict[str, set[tuple[int, int]]]] = {}

    async def _unless_stuck(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        places = {request.request_id: request.sampled for request in self.asked}
        async for chunk in super()._unless_stuck(chunks):
            for _ in chunk.ids:
                seen = self.seen.setdefault(chunk.request_id.partition("#")[0], set())
                seen.add((places[chunk.request_id], self.weight_version))
                places[chunk.request_id] += 1
            yield chunk


@given(
    places=st.lists(st.integers(0, 5), min_size=1, max_size=6), killed=st.lists(st.integers(0, 5), max_size=6),
    told=st.booleans(),
)  # fmt: skip
def test_replicas_are_as_many_as_there_are_places(places: list[int], killed: list[int], told: bool) -> None:
    """Places come and go with the replicas that have them; one replica waits where there is none at all."""

    async def main(client: EngineClient) -> None:
        pool, under_way = client.pool, []
        for at, count in enumerate(places):
            under_way.append(soon(client, *(f"{at}/{number}" for number in range(4))))
            await asyncio.sleep(1.5)
            place.places = count
            up = [replica for replica in pool.replicas if replica.state == "up"]
            lost = [*up[count:], *(up[number % len(up)] for number in killed[at : at + 1] if up)]
            for replica in lost:
                replica.engine.die()  # type: ignore[union-attr]
            place.news.set()
            await asyncio.sleep(60)
            states = [replica.state for replica in pool.replicas]
            assert (states.count("up"), states.count("starting")) == (count, 0 if count else 1)
            assert "dead" not in states
        if told and places[-1] > 1:
            leaving = next(replica for replica in pool.replicas if replica.state == "up")
            await pool.remove(leaving.name)
            await asyncio.sleep(60)
            assert sum(replica.state == "up" for replica in pool.replicas) == places[-1] - 1
        place.places = 6
        place.news.set()
        for pending in [pending for some in under_way for pending in await some]:
            right(pending)

    place = Place()
    place.follows = True
    run(place, main, 3, restarts=100)


ALL_AT_ONCE = [*[("kill", 0, 0.0)] * 2, ("kill", 0, 3.5)]


@given(schedule=st.lists(HAPPENS, max_size=12), count=st.integers(1, 3), asked=st.integers(1, 9))
@example(schedule=[("update", 0, 3.5), *ALL_AT_ONCE, *ALL_AT_ONCE], count=3, asked=6)
def test_no_token_is_lost_and_none_bears_a_wrong_version(
    schedule: Sequence[tuple[str, int, float]], count: int, asked: int
) -> None:
    async def one(client: EngineClient, place: Place, what: str, number: int) -> None:
        up = [replica for replica in client.pool.replicas if replica.state == "up"]
        replica = up[number % len(up)] if up else None
        if what == "update":
            await client.update_weights({})
        elif what == "kill" and replica is not None:
            replica.engine.die()  # type: ignore[union-attr]
        with suppress(EngineError):  # the last one cannot leave; one that is killed while it comes has not come
            if what == "join":
                await client.pool.add()
            elif what in ("leave", "notice") and replica is not None:
                await client.pool.remove(replica.name, 1.0 if what == "notice" else float("inf"))

    async def main(client: EngineClient) -> None:
        Witnessed.seen.clear()
        under_way = [soon(client, *(f"{number}" for number in range(asked)))]
        tasks = []
        for at, (what, number, seconds) in enumerate(schedule):
            tasks.append(asyncio.create_task(one(client, place, what, number)))
            await asyncio.sleep(seconds)
            under_way.append(soon(client, f"then {at}"))
        await asyncio.gather(*tasks)
        for answer in [pending for some in under_way for pending in await some]:
            right(answer)
            versions = [version for count, version in answer.versions for _ in range(count)]
            assert versions == sorted(versions)
            assert len(versions) == len(answer.ids)
            assert set(enumerate(versions)) <= Witnessed.seen[answer.request.request_id]
        last = client.weight_version
        assert last == sum(what == "update" for what, _, _ in schedule)
        (answer,) = await answers(client, "at last")
        assert {of for _, of in answer.versions} == {last}

    place = Place(lambda _: Witnessed())
    run(place, main, count, restarts=100, attempts=100)  # one request may be wherever a replica dies


@settings(max_examples=6)
@given(swaps=st.lists(SWAPS, max_size=4))
def test_replicas_that_are_swapped_take_no_longer_than_those_that_stay(swaps: list[tuple[int, float, float]]) -> None:
    """2,560 answers of eight seconds on four replicas with room for 32 each, of which one leaves as another comes."""

    async def main(client: EngineClient) -> float:
        began, under_way = now(), soon(client, *map(str, range(2560)))
        leaving = []
        for number, seconds, within in swaps:
            await asyncio.sleep(seconds)
            await client.pool.add()
            up = [each for each in client.pool.replicas if each.state == "up" and not each.leaving]
            leaving.append(asyncio.ensure_future(client.pool.remove(up[number].name, within)))
        for answer in await under_way:
            right(answer)
        await asyncio.gather(*leaving)
        return now() - began

    took = run(Place(lambda _: Fragile(max_running=32)), main, 4)
    assert took <= 1.1 * (2560 / (4 * 32) * 8), "as long as it takes those that stay, and a tenth"
