"""Silence is measured for each request, and no time counts in which nobody works on it. In virtual time."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.tokens import as_ids
from tests.embedded import tokenizer
from tests.unit.engines.kit import answers, ask, now, right, run, scripted, soon  # fmt: skip

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
    with Deadline(seconds) as deadline:
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


@pytest.mark.parametrize("sleeps", [False, True])
def test_what_waits_for_a_sleeping_engine_is_told_of_unless_it_sleeps_between_runs(
    sleeps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(client: EngineClient) -> list[PendingRequest]:
        await client.sleep()
        waiting = soon(client, "a", "b")
        await asyncio.sleep(100.0)
        await client.wake()
        return await waiting

    for answer in run(scripted(Turn(text="yes")), body, sleeps=sleeps):
        right(answer, "yes")
    told = [record.getMessage() for record in caplog.records]
    assert told == ["the engine is asleep: generations wait until it is woken"] * (not sleeps)
