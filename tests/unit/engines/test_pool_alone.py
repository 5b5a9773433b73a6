"""When nobody else is there: a pool of one, or one whose replicas are all lost at once. In virtual time."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest
import torch

from fsm_rollout.engines import replicas as replicas_module
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Engine, Request
from fsm_rollout.engines.replica import LocalPlacement
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.errors import EngineError
from fsm_rollout.testing import run_virtual
from tests.unit.engines.test_pool import TEXT, TIMES, Fragile, Place, answers, ask, make, right, run, script


@pytest.fixture
def place(tokenizer: Any) -> Place:
    return Place(lambda name: Fragile(script, tokenizer=tokenizer))


@pytest.mark.parametrize("count", [1, 3])
def test_all_are_lost_at_the_same_moment_twice(place: Place, tokenizer: Any, count: int):
    async def body(pool: EnginePool) -> None:
        assert await EngineClient(pool).update_weights({"w": torch.ones(1)}, 4) == 4
        asked = asyncio.create_task(answers(pool, [ask(str(i)) for i in range(6)]))
        for _ in range(2):
            await asyncio.sleep(3.5)
            for index in range(count):
                place.last(index).die()
            await asyncio.sleep(0)
            late = asyncio.create_task(answers(pool, [ask(f"late{_}")]))
        for answer in (await asked | await late).values():
            right(answer, tokenizer)
            assert answer.versions == [(len(answer.ids), 4)]
        assert {(stats.restarts, stats.state) for stats in pool.replicas} == {(2, "up")}

    run(place, body, count)


def test_an_engine_that_dies_costs_its_requests_one_try(place: Place, tokenizer: Any):
    """Asked again it could only fail again, so it is not asked."""

    async def body(pool: EnginePool) -> None:
        asked = asyncio.create_task(answers(pool, [ask(str(i)) for i in range(3)]))
        await asyncio.sleep(2.5)
        place.last(0).die()
        await asyncio.sleep(0.1)
        fresh = asyncio.create_task(answers(pool, [ask("new")]))
        for answer in (await asked | await fresh).values():
            right(answer, tokenizer)
        stats = pool.replicas[0]
        assert (stats.restarts, stats.moved, stats.cause) == (1, 3, "its process is gone")
        assert [len(life.dispatches) for life in place.all] == [1, 1]

    run(place, body, 1, attempts=2)


def test_an_engine_that_dies_with_nothing_to_do_is_back_before_it_is_needed(place: Place):
    async def body(pool: EnginePool) -> None:
        await answers(pool, [ask("a")])
        place.last(0).die()
        await asyncio.sleep(TIMES.ping_every + TIMES.ping + 5)
        assert (pool.replicas[0].restarts, pool.replicas[0].state) == (1, "up")

    run(place, body, 1)


def test_weights_for_an_engine_that_died_unnoticed_reach_its_successor(place: Place):
    async def body(pool: EnginePool) -> None:
        await answers(pool, [ask("a")])
        place.last(0).die()
        assert await EngineClient(pool).update_weights({"w": torch.ones(1)}) == 1
        assert place.last(0).weight_version == 1
        assert pool.replicas[0].restarts == 1

    run(place, body, 1)


def test_weights_that_come_while_all_are_lost_are_looked_at_before_they_count(place: Place):
    """Else nobody would come back, as nobody could load them."""

    async def body(pool: EnginePool) -> None:
        await answers(pool, [ask("a")])
        place.last(0).die()
        while pool.replicas[0].state == "up":  # noqa: ASYNC110  # until a ping finds out
            await asyncio.sleep(0.1)

        def refusing(name: str) -> Fragile:
            life = Fragile(script, tokenizer=pool.facts.tokenizer)
            life.refuses.add("update")
            return life

        place.build = refusing
        with pytest.raises(EngineError, match=r"no replica took the weights, so nothing has changed: .*a shape"):
            await EngineClient(pool).update_weights({"w": torch.ones(1)})
        assert pool.weight_version == 0
        assert pool.replicas[0].state == "up"

    run(place, body, 1)


def test_weights_that_all_die_of_are_not_loaded_a_third_time(place: Place):
    tried = []

    class Deadly(Fragile):
        async def update_weights(self, weights: Any, version: int | None = None) -> int:
            tried.append(version)
            self.die()
            return await super().update_weights(weights, version)

    async def body(pool: EnginePool) -> None:
        await answers(pool, [ask("a")])
        place.build = lambda name: Deadly(script, tokenizer=pool.facts.tokenizer)
        place.last(0).die()
        with pytest.raises(EngineError, match=r"no replica took the weights, so nothing has changed: .*is gone"):
            await EngineClient(pool).update_weights({"w": torch.ones(1)})
        assert tried in ([1], [1, 1])  # the first of two tries may have been its predecessor's
        assert pool.weight_version == 0
        await asyncio.sleep(5)
        assert pool.replicas[0].state == "up"

    run(place, body, 1)


def test_weights_for_a_pool_that_is_lost_for_good_are_an_error(place: Place):
    async def body(pool: EnginePool) -> None:
        await answers(pool, [ask("a")])
        place.failing_starts = 100
        place.last(0).die()
        with pytest.raises(EngineError, match=r"all 1 replica\(s\) are lost for good: replica-0: no memory left"):
            await EngineClient(pool).update_weights({"w": torch.ones(1)})
        with pytest.raises(EngineError, match="lost for good"):
            await EngineClient(pool).update_weights({"w": torch.ones(1)})
        assert pool.weight_version == 0

    run(place, body, 1)


def test_nobody_starts_again_while_all_sleep(place: Place, tokenizer: Any):
    """The memory is somebody else's then; weights that come meanwhile are there afterwards."""

    async def body(pool: EnginePool) -> None:
        await answers(pool, [ask("a")])
        await EngineClient(pool).pause()
        await EngineClient(pool).sleep()
        place.last(0).die()
        await asyncio.sleep(100)
        assert pool.replicas[0].state == "starting"
        assert len(place.all) == 1
        assert await EngineClient(pool).update_weights({"w": torch.ones(1)}) == 1
        await EngineClient(pool).wake()
        await EngineClient(pool).resume()
        (answer,) = (await answers(pool, [ask("b")])).values()
        right(answer, tokenizer)
        assert answer.versions == [(len(answer.ids), 1)]
        assert len(place.all) == 2

    run(place, body, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused_before_anybody_is_asked(place: Place, tokenizer: Any, bad: float):
    async def body(pool: EnginePool) -> None:
        asked = asyncio.create_task(answers(pool, [ask(str(i)) for i in range(4)]))
        await asyncio.sleep(1.5)
        for life in place.all:
            life.refuses.add("pause")
        with pytest.raises(EngineError, match=r"new weight 'b' is not finite: . NaN and . infinite of 3 values"):
            await EngineClient(pool).update_weights({"a": torch.ones(2), "b": torch.tensor([1.0, bad, 2.0])})
        assert pool.weight_version == 0
        for answer in (await asked).values():
            right(answer, tokenizer)
        assert [stats.restarts for stats in pool.replicas] == [0, 0]

    run(place, body, 2)


# -- how often something that always fails is tried ------------------------------------------------------------------


def tried(place: Place, count: int, **tries: Any) -> tuple[str, int, float]:
    """Return the error of one request, how often a replica got it, and how long that took."""

    async def main() -> tuple[str, int, float]:
        pool = make(place, count, restarts=100, **tries)
        loop = asyncio.get_running_loop()
        began = loop.time()
        pending = EngineClient(pool).submit(ask("a"))
        await pending.done.wait()
        took = loop.time() - began
        times = sum(len(batch) for life in place.all for batch in life.dispatches)
        await pool.aclose()
        return str(pending.error), times, took

    return run_virtual(main())


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("attempts", [1, 3, 5])
@pytest.mark.parametrize("again", [True, False])
def test_what_kills_every_replica_is_tried_so_often_and_no_more(tokenizer: Any, count: int, attempts: int, again: bool):
    """Also where what an engine fails by itself is not tried again."""

    def poison(request: Request) -> Turn:
        return Turn(text=TEXT, crash="the kernel crashed", delay=0.5)

    class Crashing(Fragile):
        def _crash(self, answers: Any, message: str) -> None:
            self.failure = EngineError(message)
            super()._crash(answers, message)

    place = Place(lambda name: Crashing(poison, tokenizer=tokenizer))
    error, tries, took = tried(place, count, attempts=attempts, again=again)
    assert tries == attempts
    assert error == f"EngineError: {attempts} tries failed, the last one: the kernel crashed"
    assert took < 20 * attempts


@pytest.mark.parametrize("again", [True, False])
def test_what_fails_by_itself_is_tried_again_if_it_may(tokenizer: Any, again: bool):
    place = Place(lambda name: Fragile([Turn(text="a", error="ValueError: no")], tokenizer=tokenizer))
    assert tried(place, 2, attempts=4, again=again)[:2] == ("ValueError: no", 4 if again else 1)


def test_a_request_that_is_asked_anew_has_all_its_tries_again(tokenizer: Any):
    place = Place(lambda name: Fragile([Turn(text="a", error="ValueError: no", fails=2)], tokenizer=tokenizer))

    async def body(pool: EnginePool) -> None:
        for _ in range(2):
            assert str((await answers(pool, [ask("a")]))["r-a"].error) == "ValueError: no"
        assert (await answers(pool, [ask("a")]))["r-a"].finish_reason == "stop"

    run(place, body, 1, attempts=1)


def test_a_start_that_is_given_up_is_not_waited_for(tokenizer: Any):
    """A thread that builds an engine cannot be ended; what it builds is dropped."""
    may_go_on, built = threading.Event(), []

    def build(name: str) -> ScriptedEngine:
        may_go_on.wait(600)
        built.append(name)
        return ScriptedEngine(script, tokenizer=tokenizer)

    async def main() -> None:
        starting = asyncio.ensure_future(LocalPlacement(build).start("replica-0"))
        await asyncio.sleep(0.05)
        starting.cancel()
        await asyncio.wait([starting])

    asyncio.run(main())  # ends, although the thread is still there
    assert not built
    may_go_on.set()


def test_requests_that_are_aborted_one_by_one_are_one_message(place: Place):
    async def body(pool: EnginePool) -> None:
        client = EngineClient(pool)
        asked = [client.submit(ask(str(i))) for i in range(20)]
        await asyncio.sleep(2.5)
        told = []
        life = place.last(0)
        abort = life.abort
        life.abort = lambda ids: (told.append(len(ids)), abort(ids))[1]  # type: ignore[method-assign,func-returns-value]
        await asyncio.gather(*map(client.abort, asked))
        for pending in asked:
            assert pending.finish_reason == "abort"
            assert pending.ids
        assert told == [20]

    run(place, body, 1)


@pytest.mark.parametrize("hangs", [True, False])
def test_a_lost_engine_that_cannot_be_closed_is_replaced_all_the_same(place: Place, tokenizer: Any, hangs: bool):
    async def main() -> None:
        pool = make(place, 1)
        asked = asyncio.create_task(answers(pool, [ask("a")]))
        await asyncio.sleep(2.5)
        life = place.last(0)

        async def stop() -> None:
            await (asyncio.Event().wait() if hangs else asyncio.sleep(0))
            raise OSError("no such process")

        life.aclose = stop  # type: ignore[method-assign]
        life.die()
        right((await asked)["r-a"], tokenizer)
        await pool.aclose()

    run_virtual(main())


def test_a_start_that_takes_long_says_what_it_waits_for(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    async def main() -> None:
        await make(place, 2).aclose()

    run_virtual(main())
    assert not caplog.messages
    begin = place.start

    async def slow(name: str) -> Engine:
        while name == "replica-1" and not caplog.messages:  # noqa: ASYNC110  # a log has no event
            await asyncio.sleep(0)
        return await begin(name)

    monkeypatch.setattr(replicas_module, "TELL_START_AFTER", 0.0)
    monkeypatch.setattr(place, "start", slow)
    run_virtual(main())
    (message,) = caplog.messages
    assert re.fullmatch(r"still starting: waiting for (replica-0, )?replica-1, up to \d+ s \(start_timeout\)", message)


def test_a_close_that_takes_long_says_what_it_waits_for(place: Place, caplog: pytest.LogCaptureFixture):
    async def main(seconds: float) -> None:
        pool = make(place, 2)
        await EngineClient(pool).pause()
        stop = place.last(1).aclose

        async def slow() -> None:
            await asyncio.sleep(seconds)
            await stop()

        place.last(1).aclose = slow  # type: ignore[method-assign]
        await pool.aclose()

    run_virtual(main(1.5))
    assert not caplog.messages
    run_virtual(main(4.0))
    assert caplog.messages == ["still closing: waiting for replica-1"]


def test_an_interruption_while_replicas_start_is_not_put_off_until_they_have(tokenizer: Any):
    """A Ctrl-C under ``asyncio.run`` cancels the task, which has the thread and so hears nothing of it."""
    may_go_on, tasks = threading.Event(), []

    def build(name: str) -> ScriptedEngine:
        tasks[0].cancel()
        may_go_on.wait(600)
        return ScriptedEngine(script, tokenizer=tokenizer)

    place = LocalPlacement(build)

    async def main() -> None:
        tasks.append(asyncio.current_task())
        make(place, 1)

    try:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(main())
    finally:
        may_go_on.set()


def test_a_pool_may_be_closed_from_another_loop_while_its_own_still_runs(place: Place):
    """As ``with Rollout(…) as rollout: await rollout.arun(…)`` does."""

    async def main() -> None:
        pool = make(place, 2)
        asked = asyncio.create_task(EngineClient(pool).pause())
        await asked
        await asyncio.to_thread(asyncio.run, pool.aclose())
        assert all(life.stopped for life in place.all)

    asyncio.run(main())
