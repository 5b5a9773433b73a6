"""What failed is tried again from where it stood, and a request is given up only for failures of its own."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.errors import EngineError, PromptTooLong
from fsm_rollout.testing import run_virtual
from fsm_rollout.trajectory.enums import FinishReason
from tests.cases import cases
from tests.embedded import tokenizer
from tests.unit.engines.kit import TEXT, Fragile, Place, answers, ask, done, make, now, pooled, right, run, soon

# -- what goes on ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0.5, 2.5, 7.5])
@pooled(3)
async def test_what_a_dead_replica_had_goes_on_elsewhere(client: EngineClient, place: Place, after: float) -> None:
    asked = soon(client, *map(str, range(9)))
    await asyncio.sleep(after)
    place.last(1).die()
    for answer in await asked:
        right(answer)
    lost = client.pool.replicas[1]
    assert (lost.restarts, lost.moved, lost.cause) == (1, 3, "its process is gone")
    again = [request for life in place.all for request in life.asked if request.request_id.endswith("#2")]
    assert len(again) == 3
    for request in again:  # the rest is asked for, not the whole again
        (answer,) = [each for each in asked.result() if each.request.trajectory_id == request.trajectory_id]
        assert request.ids.tolist() == [65, 66, 67, *answer.ids[: request.sampled]]
        assert (request.sampled > 0) == (after > 1)


@pooled(2, silence=5)
async def test_what_a_talking_replica_never_answers_is_tried_at_another(client: EngineClient, place: Place) -> None:
    """It works on others, and fast, so it is not lost; the router would send what it swallows there again."""
    swallowing, swallowed = place.last(0), list[str]()

    async def some(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            if chunk.request_id[0] in "0123":
                swallowed.append(chunk.request_id)
            else:
                yield chunk

    generate = swallowing.generate
    swallowing.generate = lambda requests: some(generate(requests))  # type: ignore[method-assign]
    swallowing._script = lambda request: Turn(text=TEXT * 9, chunks=60, delay=1.0)
    found = await answers(client, *map(str, range(8)))
    for answer in found[:4]:
        right(answer)
    assert set(swallowed) == {"0", "2"}
    assert [replica.restarts for replica in client.pool.replicas] == [0, 0]


@pooled()
async def test_all_tokens_but_the_last_word_are_enough(client: EngineClient, place: Place) -> None:
    """The last tokens came, the replica died, and no other one has to sample anything."""
    life = place.last()
    life._script = [Turn(text=TEXT, delay=1.0)]

    async def lose_the_last_word(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            yield replace(chunk, finish_reason=None)
        await asyncio.Event().wait()

    life._unless_stuck = lose_the_last_word  # type: ignore[method-assign]
    cut, whole = client.submit(ask("a", max_tokens=5, ignore_eos=True)), client.submit(ask("b"))
    await asyncio.sleep(2)
    life.die()
    assert await done(cut, whole) == ["length", "stop"]
    assert len(cut.ids) == 5
    right(whole, TEXT)
    assert place.asked == [2], "nobody was asked again"


def test_what_is_tried_again_keeps_its_order() -> None:
    """One crash befalls many requests; a set of their ids would have another order in each process."""
    engine = Fragile([Turn(text="yes", delay=1.0, crash="lost", fails=1)])
    names = [f"r{number}" for number in range(50)]
    run(engine, lambda client: answers(client, *names))
    assert [request.trajectory_id for request in engine.asked] == names + names


# -- how often -------------------------------------------------------------------------------------------------------


def tried(place: Place, count: int, **tries: Any) -> tuple[PendingRequest, int, float]:
    """Return one request, how often a replica got it, and how long that took."""

    async def main() -> tuple[PendingRequest, int, float]:
        client, began = EngineClient(make(place, count, restarts=100, **tries)), now()
        (pending,) = await answers(client, "a")
        took = now() - began
        await client.pool.aclose()
        return pending, sum(place.asked), took

    return run_virtual(main())


class Crashes(Fragile):
    """Its process ends with what it says."""

    def _crash(self, stream: Any, message: str) -> None:
        self.failure = EngineError(message)
        super()._crash(stream, message)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("attempts", [1, 3, 5])
@pytest.mark.parametrize("again", [True, False])
def test_what_kills_every_replica_is_tried_so_often_and_no_more(count: int, attempts: int, again: bool) -> None:
    """Also where what an engine fails by itself is not tried again."""
    place = Place(lambda _: Crashes([Turn(text=TEXT, crash="the kernel crashed", delay=0.5, chunks=2)]))
    pending, tries, took = tried(place, count, attempts=attempts, again=again)
    assert tries == attempts
    assert str(pending.error) == f"EngineError: {attempts} tries failed, the last one: the kernel crashed"
    assert len(pending.ids) > 0
    assert took < 20 * attempts


@pytest.mark.parametrize(("attempts", "again", "tries"), [(1, True, 1), (4, True, 4), (4, False, 1)])
def test_what_fails_by_itself_is_tried_again_if_it_may(attempts: int, again: bool, tries: int) -> None:
    place = Place(lambda _: Fragile([Turn(text="a", error="Overload: full")]))
    pending, times, _ = tried(place, 2, attempts=attempts, again=again)
    assert (str(pending.error), times) == ("Overload: full", tries)
    assert pending.error is not None
    assert pending.error.kind == "Overload"


@pooled(engine={"max_context": 4})
async def test_a_prompt_that_does_not_fit_is_not_tried_again(client: EngineClient, place: Place) -> None:
    long, short = client.submit(ask("long", ids=9)), client.submit(ask("short", ids=1))
    assert await done(long, short) == ["abort", "length"]
    assert isinstance(long.error, PromptTooLong)
    assert long.attempt == 1


def test_an_engine_that_fails_everything_is_started_again() -> None:
    built: Counter[str] = Counter()

    def build(name: str) -> Fragile:
        built[name] += 1
        first = name == "replica-0" and built[name] == 1
        return Fragile([Turn(text="", crash="the scheduler process died", delay=0.5)]) if first else Fragile()

    async def body(client: EngineClient) -> None:
        for answer in await answers(client, *map(str, range(6))):
            right(answer)
        assert built["replica-0"] == 2
        assert "the scheduler process died" in client.pool.replicas[0].cause

    run(Place(build), body, 2, attempts=4)


@pytest.mark.parametrize("another", [True, False])
def test_a_second_try_may_keep_away_from_the_replica_that_failed(another: bool) -> None:
    def build(name: str) -> Fragile:
        return Fragile([Turn(text="a", error="Boom: no" if name == "replica-0" else None)])

    async def body(client: EngineClient) -> None:
        (pending,) = await answers(client, "a")
        expected = ("stop", "replica-1") if another else ("abort", "replica-0")
        assert (pending.finish_reason, pending.replica) == expected
        assert [replica.restarts for replica in client.pool.replicas] == [0, 0]

    run(Place(build), body, 2, another_replica=another)


# -- what fails together ---------------------------------------------------------------------------------------------


class Unruly(ScriptedEngine):
    """Answers nobody of a dispatch to the end, in one way of several."""

    def __init__(self, how: str) -> None:
        super().__init__([], tokenizer=tokenizer())
        self.how = how

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        for request in requests:
            match self.how:
                case "raises":
                    raise RuntimeError("out of memory")
                case "other id":
                    yield Chunk("who?", finish_reason=FinishReason.STOP)
                case "aborts":
                    yield Chunk(request.request_id, finish_reason=FinishReason.ABORT)
                case "no end":
                    yield Chunk(request.request_id)


@cases("engines")
def test_a_broken_engine_ends_its_requests_with_an_error(how: str, says: str) -> None:
    async def body(client: EngineClient) -> None:
        for answer in await answers(client, "a", "b"):
            assert says in str(answer.error)

    run(Unruly(how), body, attempts=2)


class Poisoned(Fragile):
    """Falls as a whole, with all that it has under way, when it meets a poisoned request: at once, or some time later.

    ``dose`` says of a trajectory after how many seconds of its generation the engine falls.
    """

    def __init__(self, dose: dict[str, float]) -> None:
        super().__init__(lambda _: Turn(text="one two three four", delay=1.0, chunks=3))
        self.dose = dose
        self.falls = self.calls = 0

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        self.calls += 1
        chunks = super().generate(requests)
        for request in requests:
            if request.trajectory_id in self.dose:
                delay = self.dose[request.trajectory_id]
                asyncio.get_running_loop().call_later(delay, self._fall, request.request_id)
        return chunks

    def _fall(self, request_id: str) -> None:
        if request_id in self._running:
            self.falls += 1
            self.crash("the model failed: OutOfMemoryError: 3.2 GiB wanted")


def poison(engine: Poisoned, waves: Sequence[Sequence[str]], apart: float = 0.0) -> None:
    """Ask for the requests of each wave in one dispatch, the waves ``apart`` seconds from one another."""

    async def body(client: EngineClient) -> list[PendingRequest]:
        asked: list[PendingRequest] = []
        for wave in waves:
            asked += [client.submit(ask(name)) for name in wave]
            await asyncio.sleep(apart)
        await done(*asked)
        return asked

    for pending in run(engine, body):
        name = pending.request.request_id
        if name in engine.dose:
            assert isinstance(pending.error, EngineError)
            assert name in str(pending.error) or not pending.shared, "the culprit is named"
            assert "OutOfMemoryError" in str(pending.error)
        else:
            right(pending, "one two three four")


@pytest.mark.parametrize(("at", "seconds", "count"), [(0, 0.0, 32), (17, 0.0, 32), (31, 0.0, 32), (5, 2.5, 8)])
def test_a_poisoned_request_ends_alone_and_is_named(at: int, seconds: float, count: int) -> None:
    """Also one that fails the engine after it has had tokens."""
    names = [f"r{number}" for number in range(count)]
    engine = Poisoned({names[at]: seconds})
    poison(engine, [names])
    if not seconds:
        # Whole, whole again, in halves of 16, 8, 4, 2, 1, as often as it may fail alone, beside some that had passed.
        assert engine.falls <= 2 + 5 + 2 + 2
        assert engine.calls <= 2 + 2 * 5 + 2 + 4


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.dictionaries(st.integers(0, 12), st.sampled_from([0.0, 0.5, 1.5, 2.9]), max_size=3),
    st.sampled_from([0.0, 0.01, 0.7]),
)
def test_the_healthy_all_come_through(waves: list[int], dose: dict[int, float], apart: float) -> None:
    """Any number of poisoned requests among any number of dispatches."""
    names = iter([f"r{number}" for number in range(sum(waves))])
    parts = [[next(names) for _ in range(count)] for count in waves]
    poison(Poisoned({f"r{at}": seconds for at, seconds in dose.items()}), parts, apart)


class Spoils(ScriptedEngine):
    """Fails each call with a certain request in it, a second later, and no other."""

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        if any(request.trajectory_id == "5" for request in requests):
            await asyncio.sleep(1.0)
            raise EngineError("OutOfMemoryError: 3.2 GiB wanted")
        async for chunk in super().generate(requests):
            yield chunk


def test_others_go_on_while_one_is_looked_for() -> None:
    """Requests that come while parts of a dispatch are tried take as long as ever, until one is tried by itself."""

    async def body(client: EngineClient) -> None:
        dispatch = [client.submit(ask(str(number))) for number in range(16)]
        took = []
        for number in range(3):
            await asyncio.sleep(1.3)
            began = now()
            (newcomer,) = await answers(client, f"new {number}")
            took.append(now() - began)
            assert newcomer.error is None
        assert not dispatch[5].done.happened, "its trial goes on"
        assert took == pytest.approx([0.5] * 3)
        await done(*dispatch)
        assert [pending.error is None for pending in dispatch] == [number != 5 for number in range(16)]

    run(Spoils(lambda _: Turn(text="one two", delay=0.5), tokenizer=tokenizer()), body)


@pytest.mark.virtual_time
async def test_what_is_on_trial_waits_for_no_place_in_a_memory_that_is_full() -> None:
    """Who has a place waits for the one that an engine may die of, which therefore needs none."""

    class Full(Fragile):
        def load(self) -> Load:
            return replace(super().load(), capacity=1000)

        def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
            if any(request.turn and request.trajectory_id == "07" for request in requests):
                raise EngineError("it cannot have this one")
            return super().generate(requests)

    pool = EnginePool(Place(lambda _: Full()), 1, restarts=9)
    client, names = EngineClient(pool), [f"{number:02}" for number in range(9)]
    await done(*(client.submit(ask(name, ids=70)) for name in names))
    asked = [client.submit(ask(name, turn=1, ids=105)) for name in reversed(names)]  # more than is admitted
    async with asyncio.timeout(600):
        assert Counter(await done(*asked)) == {FinishReason.STOP: 8, FinishReason.ABORT: 1}
    await pool.aclose()
