"""A pool of replicas in this process, in virtual time: what it promises whatever happens to them."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Chunk, Engine, ReplicaLost, Request, SamplingParams
from fsm_rollout.engines.replica import LocalPlacement, Placement, PoolTimes
from fsm_rollout.engines.retries import Tries
from fsm_rollout.engines.router import LeastLoadedRouter, ReplicaView
from fsm_rollout.engines.scripted.engine import Logged, Script, ScriptedEngine, Turn, scripted_logprob
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.testing import run_virtual
from fsm_rollout.trajectory.tokens import as_ids

TEXT = "hello, wonderful world"


def script(request: Request) -> Turn:
    return Turn(text=f"{request.trajectory_id}: {TEXT}", chunks=8, delay=1.0)


class Fragile(ScriptedEngine):
    """A scripted replica that a test may do things to."""

    def __init__(self, turns: Script, *, tokenizer: Any, **options: Any) -> None:
        super().__init__(turns, tokenizer=tokenizer, **options)
        self.failure: EngineError | None = None
        self.stuck = self.stopped = False
        self.refuses: set[str] = set()
        self.dispatches: list[list[str]] = []

    def die(self) -> None:
        """End as a process does that is killed."""
        if self.failure is None:
            self.failure = ReplicaLost("its process is gone")
            self.crash("its process is gone")

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        self._check("generate")
        self.dispatches.append([request.request_id for request in requests])
        return self._unless_stuck(super().generate(requests))

    async def _unless_stuck(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            if self.stuck:
                await asyncio.Event().wait()
            yield chunk

    async def ping(self) -> None:
        if self.stuck:
            await asyncio.Event().wait()

    async def update_weights(self, weights: Any, version: int | None = None) -> int:
        self._check("update", "a shape does not fit")
        return await super().update_weights(weights, version)

    async def pause(self) -> None:
        self._check("pause")
        await super().pause()

    async def resume(self) -> None:
        self._check("resume")
        await super().resume()

    async def sleep(self) -> None:
        self._check("sleep")
        await super().sleep()

    async def aclose(self) -> None:
        self.stopped = True
        await super().aclose()

    def _check(self, what: str, refusal: str = "") -> None:
        if self.failure is not None:
            raise self.failure
        if what in self.refuses:
            raise EngineError(refusal or f"will not {what}")


class Place(LocalPlacement):
    """Starts fragile replicas, and keeps every one of them."""

    def __init__(self, build: Callable[[str], Fragile]) -> None:
        super().__init__(build)
        self.build = build
        self.lives: dict[str, list[Fragile]] = defaultdict(list)
        self.failing_starts = 0
        self.starts: Counter[str] = Counter()

    async def start(self, name: str) -> Engine:
        self.starts[name] += 1
        fails = self.failing_starts > 0
        self.failing_starts -= fails
        if fails:
            raise EngineError("no memory left")
        life = self.build(name)
        self.lives[name].append(life)
        return life

    def last(self, index: int) -> Fragile:
        return self.lives[f"replica-{index}"][-1]

    @property
    def all(self) -> list[Fragile]:
        return [life for lives in self.lives.values() for life in lives]


def ask(name: str, turn: int = 0, **sampling: Any) -> Request:
    params = SamplingParams(sampling.pop("max_tokens", 100), stop_ids=frozenset({256}), **sampling)
    return Request(
        f"r-{name}",
        as_ids([65, 66]),
        params,
        trajectory_id=name,
        group_id=name,
        context="main",
        session=name,
        turn=turn,
    )


async def answers(pool: EnginePool, requests: Sequence[Request]) -> dict[str, PendingRequest]:
    """Ask for everything as a rollout does."""
    client = EngineClient(pool)
    asked = {request.request_id: client.submit(request) for request in requests}
    for pending in asked.values():
        await pending.done.wait()
    await client.drain()
    return asked


def right(answer: PendingRequest, tokenizer: Any) -> None:
    """Whether an answer is what the script says, with the logprobs of the right positions."""
    start = len(answer.request.ids)
    expected = [*tokenizer.encode(f"{answer.request.trajectory_id}: {TEXT}"), 256]
    assert list(answer.ids) == expected
    assert list(answer.logprobs) == [scripted_logprob(token, start + i) for i, token in enumerate(expected)]
    assert answer.finish_reason == "stop"


@pytest.fixture
def place(tokenizer: Any) -> Place:
    return Place(lambda name: Fragile(script, tokenizer=tokenizer))


TIMES = PoolTimes(start=50, silence=40, ping_every=5, ping=10, order=10, update=20, close=2, backoff=1)


def make(place: Any, count: int = 3, *, router: Any = None, restarts: int = 3, **tries: Any) -> EnginePool:
    return EnginePool(place, count, times=TIMES, router=router, restarts=restarts, tries=Tries(**tries))


def run(place: Place, body: Any, count: int = 3, **options: Any) -> Any:
    """Run ``body(pool)`` in virtual time and close the pool; no replica may be left."""

    async def main() -> Any:
        pool = make(place, count, **options)
        try:
            return await body(pool)
        finally:
            await pool.aclose()

    result = run_virtual(main())
    assert all(life.stopped for life in place.all)
    return result


def test_chunks_name_their_replica_and_its_numbers_add_up(place: Place, tokenizer: Any):
    async def body(pool: EnginePool) -> None:
        found = await answers(pool, [ask(str(i)) for i in range(9)])
        came_from = Counter()
        for answer in found.values():
            right(answer, tokenizer)
            came_from[answer.replica] += 1
        assert came_from == {"replica-0": 3, "replica-1": 3, "replica-2": 3}
        assert [stats.requests for stats in pool.replicas] == [3, 3, 3]
        assert sum(stats.tokens for stats in pool.replicas) == sum(len(answer.ids) for answer in found.values())
        assert pool.load().running == pool.load().waiting == 0

    run(place, body)


def test_a_flush_is_one_dispatch_per_replica(place: Place):
    async def body(pool: EnginePool) -> None:
        await answers(pool, [ask(str(i)) for i in range(12)])
        assert [len(batch) for life in place.all for batch in life.dispatches] == [4, 4, 4]

    run(place, body)


@pytest.mark.parametrize("after", [0.5, 2.5, 7.5])
def test_what_a_dead_replica_had_goes_on_elsewhere(place: Place, tokenizer: Any, after: float):
    async def body(pool: EnginePool) -> None:
        asked = asyncio.create_task(answers(pool, [ask(str(i)) for i in range(9)]))
        await asyncio.sleep(after)
        place.last(1).die()
        for answer in (await asked).values():
            right(answer, tokenizer)
        stats = pool.replicas[1]
        assert (stats.restarts, stats.moved, stats.cause) == (1, 3, "its process is gone")
        if after == 2.5:  # two of eight pieces had come, so the rest is asked for after these
            moved = [batch for life in place.all for batch in life.dispatches if batch[0].endswith("#2")]
            assert sum(map(len, moved)) == 3

    run(place, body)


def test_a_dead_replica_comes_back_with_the_weights_and_works_again(place: Place):
    async def body(pool: EnginePool) -> None:
        await answers(pool, [ask("warm")])
        assert await EngineClient(pool).update_weights({"w": torch.ones(2)}) == 1
        assert await EngineClient(pool).update_weights("somewhere", 7) == 7
        assert await EngineClient(pool).update_weights({}, 8) == 8
        place.last(0).die()
        await asyncio.sleep(5)
        assert [stats.state for stats in pool.replicas] == ["up", "up"]
        assert len(place.lives["replica-0"]) == 2
        assert place.last(0).weight_version == 8
        for answer in (await answers(pool, [ask(str(i)) for i in range(4)])).values():
            assert answer.versions == [(len(answer.ids), 8)]
        assert len(place.last(0).dispatches) == 1

    run(place, body, 2)


def test_all_that_was_loaded_is_loaded_again_from_the_last_folder_on(place: Place):
    loaded: list[tuple[Any, int]] = []

    class Notes(Fragile):
        async def update_weights(self, weights: Any, version: int | None = None) -> int:
            loaded.append((weights if isinstance(weights, str) else sorted(weights), version))
            return version or 0

    async def body(pool: EnginePool) -> None:
        tensor = torch.zeros(1)
        for names in (["a"], "folder", ["b", "c"], ["c", "d"], ["b"], ["d"]):
            weights = names if isinstance(names, str) else dict.fromkeys(names, tensor)
            await EngineClient(pool).update_weights(weights)
        tensor += 5  # training goes on with the same memory
        place.build = lambda name: Notes(script, tokenizer=pool.facts.tokenizer)
        lost = place.last(0)
        lost.die()
        await asyncio.sleep(TIMES.ping_every + 5)
        # The first update of "b" and "c" has nothing left: two later ones together have replaced it.
        assert loaded == [("folder", 2), (["c", "d"], 4), (["b"], 5), (["d"], 6)]
        assert not tensor.eq(pool.here()._weights[2][1]["b"]).any()

    run(place, body, 2)


def test_weights_that_come_while_a_replica_loads_older_ones_are_loaded_too(place: Place):
    class Slow(Fragile):
        async def update_weights(self, weights: Any, version: int | None = None) -> int:
            await asyncio.sleep(5)
            return await super().update_weights(weights, version)

    async def body(pool: EnginePool) -> None:
        await EngineClient(pool).update_weights("first")
        lost = place.last(0)
        place.build = lambda name: Slow(script, tokenizer=pool.facts.tokenizer)
        lost.die()
        await asyncio.sleep(TIMES.ping_every + 3)
        assert pool.replicas[0].state == "starting"
        assert await EngineClient(pool).update_weights("second") == 2
        await asyncio.sleep(30)
        assert pool.replicas[0].state == "up"
        assert place.last(0).weight_version == 2

    run(place, body, 2)


def test_a_replica_that_returns_while_all_are_held_is_held(place: Place):
    async def body(pool: EnginePool) -> None:
        asked = asyncio.create_task(answers(pool, [ask(str(i)) for i in range(4)]))
        await asyncio.sleep(2.5)
        await EngineClient(pool).pause()
        tokens_sent = pool.replicas[0].tokens + pool.replicas[1].tokens
        place.last(0).die()
        await asyncio.sleep(100)
        assert [stats.state for stats in pool.replicas] == ["up", "up"]
        fresh = asyncio.create_task(answers(pool, [ask("new")]))
        await asyncio.sleep(100)
        assert place.last(0).dispatches == [["r-new"]]
        assert tokens_sent == pool.replicas[0].tokens + pool.replicas[1].tokens
        assert not asked.done()
        await EngineClient(pool).resume()
        assert all(answer.finish_reason == "stop" for answer in (await asked | await fresh).values())

    run(place, body, 2)


@pytest.mark.parametrize("listens", [True, False])
def test_a_hung_replica_is_noticed_in_the_stated_time(place: Place, tokenizer: Any, listens: bool):
    """One does not even answer pings, the other does but says nothing of its requests."""

    async def body(pool: EnginePool) -> None:
        loop = asyncio.get_running_loop()
        await answers(pool, [ask("warm")])
        hung, begin = place.last(0), loop.time()
        if listens:
            hung._next_piece = lambda answer: None  # type: ignore[attr-defined]
        else:
            hung.stuck = True
        for answer in (await answers(pool, [ask(str(i)) for i in range(6)])).values():
            right(answer, tokenizer)
        limit = TIMES.silence + TIMES.ping_every if listens else TIMES.ping_every + TIMES.ping
        assert loop.time() - begin <= limit + 8 + 1  # and the answer itself takes eight seconds
        assert pool.replicas[0].restarts == 1

    run(place, body, 2, router=LeastLoadedRouter())


def test_a_slow_but_talking_replica_is_left_alone(tokenizer: Any):
    place = Place(lambda name: Fragile(lambda _: Turn(text=TEXT, chunks=9, delay=35), tokenizer=tokenizer))

    async def body(pool: EnginePool) -> None:
        await answers(pool, [ask(str(i)) for i in range(2)])
        assert [stats.restarts for stats in pool.replicas] == [0, 0]

    run(place, body, 2)


def test_lost_requests_are_tried_a_bounded_number_of_times(place: Place):
    async def body(pool: EnginePool) -> PendingRequest:
        asked = asyncio.create_task(answers(pool, [ask("a")]))
        for _ in range(3):
            await asyncio.sleep(2.5)
            (busy,) = [life for life in place.all if life.dispatches and not life.failure is not None]
            busy.die()
        return (await asked)["r-a"]

    answer = run(place, body, 4)
    assert answer.finish_reason == "abort"
    assert str(answer.error) == "EngineError: 3 tries failed, the last one: its process is gone"
    assert len(answer.ids) > 0


def test_when_all_are_lost_for_good_the_cause_is_named(place: Place):
    async def body(pool: EnginePool) -> None:
        asked = asyncio.create_task(answers(pool, [ask(str(i)) for i in range(4)]))
        await asyncio.sleep(1.5)
        place.failing_starts = 100
        for index in range(2):
            place.last(index).die()
        for answer in (await asked).values():
            assert "all 2 replica(s) are lost for good: replica-0: no memory left" in str(answer.error)
        assert "lost for good" in str((await answers(pool, [ask("new")]))["r-new"].error)
        assert [stats.state for stats in pool.replicas] == ["dead", "dead"]
        assert place.starts["replica-0"] == 1 + 2

    run(place, body, 2, restarts=2)


def test_a_replica_that_finishes_work_is_forgiven(place: Place):
    async def body(pool: EnginePool) -> None:
        for life in range(5):
            await answers(pool, [ask(f"{life}-{i}") for i in range(2)])
            place.last(0).die()
            await asyncio.sleep(10)
            assert pool.replicas[0].state == "up"
        assert pool.replicas[0].restarts == 5

    run(place, body, 2, restarts=1)


def test_an_engine_that_fails_everything_is_started_again(tokenizer: Any):
    built: Counter[str] = Counter()

    def build(name: str) -> Fragile:
        built[name] += 1
        first = name == "replica-0" and built[name] == 1
        crash = Turn(text="", crash="the scheduler process died", delay=0.5)
        return Fragile((lambda _: crash) if first else script, tokenizer=tokenizer)

    place = Place(build)

    async def body(pool: EnginePool) -> None:
        for answer in (await answers(pool, [ask(str(i)) for i in range(6)])).values():
            right(answer, tokenizer)
        assert built["replica-0"] == 2
        assert "the scheduler process died" in pool.replicas[0].cause

    run(place, body, 2, attempts=4)


@pytest.mark.parametrize("another", [True, False])
def test_a_second_try_may_keep_away_from_the_replica_that_failed(tokenizer: Any, another: bool):
    def build(name: str) -> Fragile:
        turn = Turn(text="a", error="Boom: no") if name == "replica-0" else Turn(text="a")
        return Fragile([turn], tokenizer=tokenizer)

    async def body(pool: EnginePool) -> None:
        pending = (await answers(pool, [ask("a")]))["r-a"]
        assert (pending.finish_reason, pending.replica) == (
            ("stop", "replica-1") if another else ("abort", "replica-0")
        )
        assert [stats.restarts for stats in pool.replicas] == [0, 0]

    run(Place(build), body, 2, another_replica=another)


def test_what_goes_on_comes_before_what_returns_and_that_before_what_begins(tokenizer: Any):
    """Each replica has a request, and the rest waits; so it does when a replica is lost."""
    place = Place(lambda name: Fragile(script, tokenizer=tokenizer, max_running=2))

    async def body(pool: EnginePool) -> None:
        client = EngineClient(pool)
        first = [ask(f"first-{i:03}") for i in range(150)]
        goes_on = replace(ask("goes on", 5), sampled=1)
        requests = [*first, *(ask(f"returns-{i}", 1 + i) for i in range(8)), goes_on]
        pending = [client.submit(request) for request in first]
        await asyncio.sleep(1.5)
        place.last(0).die()
        pending += [client.submit(request) for request in requests[len(first) :]]
        await asyncio.gather(*(each.done.wait() for each in pending))
        for each in pending[:-1]:
            right(each, tokenizer)
        admitted = sorted(pending, key=lambda each: each.admitted_at or 0.0)
        places = [admitted.index(each) for each in pending]
        late = 3 * 32  # what the replicas' engines have taken already
        assert max(places[len(first) :]) < late
        assert places[-1] == min(places[len(first) :])
        assert all(abs(place - rank) <= late for rank, place in enumerate(places[: len(first)]))

    run(place, body, 2)


def test_a_full_replica_is_not_waited_for_while_another_idles(tokenizer: Any):
    """One replica is a hundred times slower: the other one does nearly all."""
    slow = Turn(text=TEXT, chunks=8, delay=30.0)
    quick = Turn(text=TEXT, chunks=8, delay=0.3)
    place = Place(
        lambda name: Fragile(lambda _: slow if name == "replica-0" else quick, tokenizer=tokenizer, max_running=4)
    )

    async def body(pool: EnginePool) -> None:
        async def chat(index: int) -> None:
            for turn in range(6):
                await answers(pool, [replace(ask(str(index), turn), request_id=f"r-{index}-{turn}")])

        await asyncio.gather(*(chat(i) for i in range(64)))
        done = [stats.requests for stats in pool.replicas]
        assert sum(done) == 64 * 6
        assert done[0] < 64

    run(place, body, 2)


def test_aborts_end_what_waits_at_once_and_what_runs_with_its_tokens(tokenizer: Any):
    place = Place(lambda name: Fragile(script, tokenizer=tokenizer, max_running=1))

    async def body(pool: EnginePool) -> None:
        asked = asyncio.create_task(answers(pool, [ask(f"{i:03}") for i in range(100)]))
        await asyncio.sleep(3.5)
        await asyncio.gather(*map(pool.abort, pool.under_way()))
        found = await asked
        assert {answer.finish_reason for answer in found.values()} == {"abort"}
        assert sum(bool(answer.ids) for answer in found.values()) == 2
        assert pool.load().running == pool.load().waiting == 0

    run(place, body, 2)


def test_an_aborted_request_of_a_lost_replica_ends(place: Place):
    async def body(pool: EnginePool) -> None:
        asked = asyncio.create_task(answers(pool, [ask("a")]))
        await asyncio.sleep(2.5)
        place.last(0).stuck = True
        await asyncio.sleep(1)
        await asyncio.gather(*map(pool.abort, pool.under_way()))
        assert (await asked)["r-a"].finish_reason == "abort"

    run(place, body, 1)


def test_all_tokens_but_the_last_word_are_enough(place: Place, tokenizer: Any):
    """The last tokens came, the replica died, and no other one has to sample anything."""

    class LosesTheLastWord(Fragile):
        async def _unless_stuck(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
            async for chunk in chunks:
                yield replace(chunk, finish_reason=None)
            await asyncio.Event().wait()

    whole = Turn(text=TEXT, chunks=1, delay=1.0)
    place.build = lambda name: LosesTheLastWord(lambda _: whole, tokenizer=tokenizer)

    async def body(pool: EnginePool) -> None:
        requests = [ask("a", max_tokens=5, ignore_eos=True), ask("b")]
        asked = asyncio.create_task(answers(pool, requests))
        await asyncio.sleep(2)
        place.last(0).die()
        found = await asked
        assert (found["r-a"].finish_reason, len(found["r-a"].ids)) == ("length", 5)
        assert (found["r-b"].finish_reason, found["r-b"].ids[-1]) == ("stop", 256)
        assert sum(len(life.dispatches) for life in place.all) == 1, "nobody was asked again"

    run(place, body, 1)


def test_weights_that_nobody_takes_change_nothing(place: Place, tokenizer: Any):
    async def body(pool: EnginePool) -> None:
        asked = asyncio.create_task(answers(pool, [ask(str(i)) for i in range(4)]))
        await asyncio.sleep(1.5)
        for index in range(2):
            place.last(index).refuses.add("update")
        with pytest.raises(
            EngineError, match=r"no replica took the weights, so nothing has changed: .*a shape does not"
        ):
            await EngineClient(pool).update_weights({})
        assert pool.weight_version == 0
        for answer in (await asked).values():
            right(answer, tokenizer)
            assert answer.versions == [(len(answer.ids), 0)]
        assert [stats.restarts for stats in pool.replicas] == [0, 0]

    run(place, body, 2)


def test_a_replica_that_alone_fails_an_update_comes_back_with_it(place: Place, tokenizer: Any):
    async def body(pool: EnginePool) -> None:
        asked = asyncio.create_task(answers(pool, [ask(str(i)) for i in range(4)]))
        await asyncio.sleep(1.5)
        place.last(0).refuses.add("update")
        assert await EngineClient(pool).update_weights({}) == 1
        for answer in (await asked).values():
            right(answer, tokenizer)
            assert [version for _, version in answer.versions] == [0, 1]
        await asyncio.sleep(5)
        assert [(stats.restarts, stats.state) for stats in pool.replicas] == [(1, "up"), (0, "up")]
        assert place.last(0).weight_version == 1

    run(place, body, 2)


def test_an_update_that_its_caller_gives_up_is_carried_out_everywhere(place: Place):
    async def body(pool: EnginePool) -> None:
        pool.here()
        updating = asyncio.create_task(EngineClient(pool).update_weights({}))
        await asyncio.sleep(0)
        updating.cancel()
        await asyncio.sleep(5)
        assert pool.weight_version == 1
        assert [life.weight_version for life in place.all] == [1, 1]
        await answers(pool, [ask("a")])

    run(place, body, 2)


def test_an_order_that_one_cannot_follow_costs_that_one(place: Place):
    async def body(pool: EnginePool) -> None:
        await answers(pool, [ask("a")])
        place.last(0).refuses.add("pause")
        await EngineClient(pool).pause()
        assert [stats.state for stats in pool.replicas] == ["starting", "up"]
        await EngineClient(pool).resume()
        place.last(1).refuses.add("sleep")
        await asyncio.sleep(5)
        place.last(0).refuses.add("sleep")
        await EngineClient(pool).sleep()  # those that come back will
        assert [stats.state for stats in pool.replicas] == ["starting", "starting"]

    run(place, body, 2)


def test_a_failing_start_leaves_nothing_behind(place: Place):
    place.failing_starts = 1
    with pytest.raises(EngineError, match="no memory left"):
        make(place)
    assert all(life.stopped for life in place.all)


def test_replicas_must_serve_one_model(tokenizer: Any):
    class Other(Fragile):
        def __init__(self, turns: Script, **options: Any) -> None:
            super().__init__(turns, **options)
            self.eos_ids = frozenset({1})

    place = Place(lambda name: (Other if name == "replica-1" else Fragile)(script, tokenizer=tokenizer))
    with pytest.raises(EngineError, match="do not serve the same model"):
        make(place)
    assert all(life.stopped for life in place.all)


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


def test_a_router_of_ones_own_decides_and_its_errors_stay_with_the_request(place: Place, tokenizer: Any):
    async def body(pool: EnginePool) -> None:
        begun = asyncio.get_running_loop().time()
        wrong = {
            "raises": "RouterFailed: router Broken failed: KeyError: 'bad'",
            "nothing": "RouterFailed: router Broken returned None; choose() must return one of the replicas",
            "name": "RouterFailed: router Broken returned 'replica-1'; choose() must return",
            "stranger": "RouterFailed: router Broken returned ReplicaView(name='replica-9'",
            "later": "RouterFailed: router Broken returned <coroutine object",
        }
        refused = await answers(pool, [ask(name) for name in wrong])
        assert asyncio.get_running_loop().time() == begun
        for name, message in wrong.items():
            error = refused[f"r-{name}"].error
            assert error is not None
            assert f"{error.kind}: {error}".startswith(message)
        assert "drop its 'async'" in str(refused["r-later"].error)
        found = await answers(pool, [ask("a"), ask("nothing"), ask("b")])
        right(found["r-a"], tokenizer)
        right(found["r-b"], tokenizer)
        assert [stats.requests for stats in pool.replicas] == [0, 2]
        assert pool.load().waiting == 0

    run(place, body, 2, router=Broken())


def test_a_pool_serves_one_loop_after_another(place: Place, tokenizer: Any):
    quick = Place(lambda name: Fragile([Turn(text="a")], tokenizer=tokenizer))
    pool = make(quick, 2)

    async def leave() -> None:
        quick.last(0)._script = lambda _: Turn(hang=True, text="a")  # type: ignore[attr-defined]
        EngineClient(pool).submit(ask("left behind"))
        await asyncio.sleep(0.01)

    async def go_on() -> str | None:
        quick.last(0)._script = [Turn(text="a")]  # type: ignore[attr-defined]
        return (await answers(pool, [ask("left behind")]))["r-left behind"].finish_reason

    asyncio.run(leave())
    assert asyncio.run(go_on()) == "stop"
    assert asyncio.run(go_on()) == "stop"
    asyncio.run(pool.aclose())
    assert all(life.stopped for life in quick.all)


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_answered_does_not_depend_on_the_number_of_replicas(model: Any, tokenizer: Any, count: int):
    requests = [
        Request(f"r{i}", as_ids([i, 70, 80]), SamplingParams(12, seed=i, ignore_eos=True), trajectory_id=f"t{i}")
        for i in range(8)
    ]

    async def main(pool: EnginePool) -> dict[str, list[int]]:
        found = await answers(pool, requests)
        await pool.aclose()
        return {name: list(answer.ids) for name, answer in found.items()}

    alone = asyncio.run(main(EnginePool(Placement(TransformersEngine(model, tokenizer)))))
    place = LocalPlacement(lambda name: TransformersEngine(model, tokenizer))
    assert asyncio.run(main(EnginePool(place, count, router=LeastLoadedRouter()))) == alone


def test_through_the_client_every_pending_ends_once_whatever_is_lost(tokenizer: Any):
    """The oracle is the engines' own logs: each pending's tokens are those its replicas gave, in order."""
    logs: list[tuple[str, Sequence[Logged]]] = []

    def build(name: str) -> Fragile:
        engine = Fragile(script, tokenizer=tokenizer, max_running=4, log=True)
        logs.append((name, engine.log))
        return engine

    place = Place(build)

    async def body(pool: EnginePool) -> None:
        client = EngineClient(pool)
        asked = [client.submit(ask(f"{i:02}")) for i in range(40)]
        for index in (0, 2, 1, 0):
            await asyncio.sleep(6)
            place.last(index).die()
            await EngineClient(pool).update_weights({})
        await asyncio.gather(*(pending.done.wait() for pending in asked))
        for pending in asked:
            assert pending.finish_reason == "stop"
            assert list(pending.ids) == [*tokenizer.encode(f"{pending.request.trajectory_id}: {TEXT}"), 256]
            given = said(logs, pending.request.request_id)
            spans = [version for count, version in pending.versions for _ in range(count)]
            start = len(pending.request.ids)
            for offset, (token, version) in enumerate(zip(pending.ids, spans, strict=True)):
                assert (start + offset, token, version) in given

    run(place, body, 3)


def said(logs: Iterable[tuple[str, Sequence[Logged]]], request_id: str) -> set[tuple[int, int, int]]:
    """Return ``(position, token, version)`` of everything that any engine sampled for a request."""
    found: set[tuple[int, int, int]] = set()
    for _, log in logs:
        positions: dict[str, int] = {}
        for line in log:
            if isinstance(line.what, Request):
                positions[line.what.request_id] = len(line.what.ids)
            elif isinstance(line.what, Chunk) and line.what.request_id.partition("#")[0] == request_id:
                for token in line.what.ids:
                    found.add((positions[line.what.request_id], token, line.what.weight_version))
                    positions[line.what.request_id] += 1
    return found


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
def test_an_order_that_its_caller_gives_up_holds_nobody_for_good(
    before: str, order: str, after: float, tokenizer: Any
) -> None:
    async def body() -> tuple[str | None, bool]:
        engine = Slow([Turn(text="yes")], tokenizer=tokenizer)
        client = EngineClient(EnginePool(Placement(engine), sleeps=True))
        await getattr(client, before)()
        given = asyncio.ensure_future(getattr(client, order)())
        await asyncio.wait([given], timeout=after)
        given.cancel()
        await client.resume()
        await client.begin()
        pending = client.submit(ask("a"))
        await pending.done.wait()
        await client.drain()
        return pending.finish_reason, engine._asleep

    assert run_virtual(body()) == ("stop", True)
