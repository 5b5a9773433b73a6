"""The dispatcher: one engine call per flush, every ticket ends once, nothing streamed is lost."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.engines.client import EngineClient, pool_of
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Chunk, Load, Request, SamplingParams
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.errors import EngineError, PromptTooLong
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.trajectory.tokens import TokenStream, as_ids, as_logprobs
from tests.embedded import tokenizer


def request(name: str, *, max_tokens: int = 50, ids: int = 3) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, stop_ids=frozenset({tokenizer().eos_token_id}))
    return Request(name, array("i", range(ids)), sampling, trajectory_id=name)


def scripted(*turns: Turn, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(list(turns), tokenizer=tokenizer(), log=True, **options)


def run(engine: Any, body: Callable[[EngineClient], Any], **options: Any) -> Any:
    async def main() -> Any:
        dispatcher = EngineClient(engine, **options)
        try:
            return await body(dispatcher)
        finally:
            await dispatcher.drain()

    return run_virtual(main())


async def done(*tickets: PendingRequest) -> list[tuple[str | None, int]]:
    for ticket in tickets:
        await ticket.done.wait()
    return [(ticket.finish_reason, len(ticket.ids)) for ticket in tickets]


def test_one_flush_is_one_dispatch_and_no_barrier() -> None:
    """Requests made in one pass of the loop share a call; the short one does not wait for the long one."""
    engine = ScriptedEngine(
        lambda r: Turn(text="yes", delay=10.0 if r.trajectory_id == "slow" else 1.0), tokenizer=tokenizer()
    )

    async def body(dispatcher: EngineClient) -> tuple[int, float, float]:
        loop = asyncio.get_running_loop()
        ends: dict[str, float] = {}

        async def one(name: str) -> None:
            await dispatcher.submit(request(name)).done.wait()
            ends[name] = loop.time()

        await asyncio.gather(*(one(name) for name in ("slow", "a", "b", "c")))
        return dispatcher.pool.dispatches, ends["a"], ends["slow"]

    assert run(engine, body) == (1, 1.0, 10.0)


def test_what_prepares_a_dispatch_is_called_for_dispatches_alone() -> None:
    """The journal is written then: not for each chunk that comes while requests wait for room."""
    engine = scripted(Turn(text="one two three four five", chunks=5, delay=1.0), max_running=1)
    called_before: list[int] = []

    async def body(dispatcher: EngineClient) -> int:
        dispatcher.call_before_dispatch(lambda: called_before.append(dispatcher.pool.dispatches))
        await done(*(dispatcher.submit(request(str(index))) for index in range(40)))
        return dispatcher.pool.dispatches

    dispatches = run(engine, body)
    assert called_before == list(range(dispatches))


def test_cached_tokens_are_those_of_the_prompt_however_often_an_engine_says_so() -> None:
    pending = PendingRequest(request("a"), submitted_at=0.0)
    for cached in (0, 5, 5, 0):
        pending.take(Chunk("a", as_ids([7]), as_logprobs([-1.0]), cached_tokens=cached), now=1.0)
    assert (pending.cached_tokens, len(pending.ids)) == (5, 4)


def test_a_failed_request_goes_on_from_what_was_streamed() -> None:
    turn = Turn(text="one two three four five", delay=1.0, chunks=3, crash="lost", fails=1)

    async def body(dispatcher: EngineClient) -> PendingRequest:
        ticket = dispatcher.submit(request("a"))
        await ticket.done.wait()
        return ticket

    engine = scripted(turn)
    ticket = run(engine, body)
    whole = [*tokenizer().encode("one two three four five"), tokenizer().eos_token_id]
    assert ticket.finish_reason == "stop"
    assert ticket.ids.tolist() == whole
    asked = [line.what for line in engine.log if isinstance(line.what, Request)]
    assert len(asked) == 2
    assert asked[1].ids.tolist() == [0, 1, 2, *whole[: asked[1].sampled]], "the rest is asked for, not the whole again"
    assert asked[1].sampled > 0


@pytest.mark.parametrize("attempts", [1, 3])
def test_gives_up_after_its_attempts(attempts: int) -> None:
    engine = scripted(Turn(text="", error="Overload: full"))

    async def body(dispatcher: EngineClient) -> PendingRequest:
        ticket = dispatcher.submit(request("a"))
        await ticket.done.wait()
        return ticket

    ticket = run(engine, body, attempts=attempts)
    assert isinstance(ticket.error, EngineError)
    assert ticket.error.kind == "Overload"
    assert sum(isinstance(line.what, Request) for line in engine.log) == attempts


def test_a_prompt_that_does_not_fit_is_not_tried_again() -> None:
    engine = scripted(Turn(text="hi"), max_context=4)

    async def body(dispatcher: EngineClient) -> list[Any]:
        long, short = dispatcher.submit(request("long", ids=9)), dispatcher.submit(request("short", ids=1))
        await done(long, short)
        return [type(long.error), short.finish_reason]

    assert run(engine, body) == [PromptTooLong, "stop"]


def test_abort_keeps_what_was_sampled_and_silence_is_given_up() -> None:
    turn = Turn(text="one two three four", delay=1.0, chunks=4, hang=True)

    async def body(dispatcher: EngineClient) -> tuple[Any, Any]:
        ticket = dispatcher.submit(request("a"))
        await asyncio.sleep(2.5)
        so_far = len(ticket.ids)
        await dispatcher.abort(ticket)
        return so_far, (ticket.finish_reason, len(ticket.ids), ticket.done.happened)

    so_far, end = run(scripted(turn), body)
    assert so_far > 0
    assert end == ("abort", so_far, True)

    async def silent(dispatcher: EngineClient) -> Any:
        ticket = dispatcher.submit(request("a"))
        await ticket.done.wait()
        return ticket.error

    error = run(Mute([], tokenizer=tokenizer()), silent, attempts=1, queue_timeout=60.0)
    assert "nothing for 60 s" in str(error)


class Selective(ScriptedEngine):
    """Answers the first request of a dispatch and says nothing of the others; or fails in odd ways."""

    def __init__(self, how: str) -> None:
        super().__init__([Turn(text="one")], tokenizer=tokenizer())
        self.how = how

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:  # type: ignore[override]
        if self.how == "cancelled":
            raise asyncio.CancelledError
        yield Chunk(requests[0].request_id, array("i", [1]), array("f", [-1.0]), finish_reason="length")
        await asyncio.Event().wait()

    async def abort(self, request_ids: Any) -> None:
        if self.how == "deaf":
            await asyncio.Event().wait()


@pytest.mark.parametrize("how", ["silent", "cancelled", "deaf"])
def test_no_request_waits_for_ever(how: str) -> None:
    """Silence is measured for each request; an abort that hangs is waited for a bounded time."""

    async def body(dispatcher: EngineClient) -> tuple[str | None, float]:
        tickets = [dispatcher.submit(request(name)) for name in "ab"]
        await tickets[1].done.wait()
        return str(tickets[1].error), asyncio.get_running_loop().time()

    error, seconds = run(Selective(how), body, attempts=1, queue_timeout=60.0)
    assert ("CancelledError" if how == "cancelled" else "nothing for 60 s") in str(error)
    assert seconds <= 60.0


class Mute(ScriptedEngine):
    """Says nothing at all."""

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:  # type: ignore[override]
        await asyncio.Event().wait()
        yield Chunk("")


def test_one_timer_gives_every_request_up_at_its_own_time() -> None:
    async def body(dispatcher: EngineClient) -> tuple[list[float], int]:
        loop, ends, most_timers = asyncio.get_running_loop(), [], 0

        async def wait_for(name: str) -> None:
            await dispatcher.submit(request(name)).done.wait()
            ends.append(loop.time())

        async with asyncio.TaskGroup() as tasks:
            for number in range(20):
                tasks.create_task(wait_for(str(number)))
                await asyncio.sleep(1.0)
                timers = [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
                most_timers = max(most_timers, len(timers))
        return ends, most_timers

    ends, most_timers = run(Mute([], tokenizer=tokenizer()), body, attempts=1, queue_timeout=60.0)
    assert ends == pytest.approx([60.0 + number for number in range(20)])
    assert most_timers == 1


def test_silence_is_not_measured_while_the_engine_is_paused() -> None:
    engine = scripted(Turn(text="yes", delay=1.0))

    async def body(dispatcher: EngineClient) -> str | None:
        await dispatcher.pause()
        ticket = dispatcher.submit(request("a"))
        await asyncio.sleep(10_000.0)
        await dispatcher.resume()
        await ticket.done.wait()
        return ticket.finish_reason

    assert run(engine, body, attempts=1, queue_timeout=60.0) == "stop"


class FailsToAbort(ScriptedEngine):
    """An abort brings down the whole dispatch."""

    async def abort(self, request_ids: Any) -> None:
        self._crash(next(iter(self._running.values())).answers, "fell over")


def test_what_is_aborted_is_not_tried_again() -> None:
    engine = FailsToAbort([Turn(text="one two", hang=True)], tokenizer=tokenizer(), log=True)

    async def body(dispatcher: EngineClient) -> tuple[Any, Any]:
        ticket = dispatcher.submit(request("a"))
        await asyncio.sleep(1.0)
        await dispatcher.abort(ticket)
        await asyncio.sleep(100.0)
        return ticket.finish_reason, ticket.error

    assert run(engine, body) == ("abort", None)
    assert sum(isinstance(line.what, Request) for line in engine.log) == 1


class Broken(ScriptedEngine):
    """Answers wrongly, in one way of several."""

    def __init__(self, how: str) -> None:
        super().__init__([Turn(text="one two three")], tokenizer=tokenizer())
        self.how = how

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:  # type: ignore[override]
        for submitted in requests:
            match self.how:
                case "logprobs":
                    yield Chunk(submitted.request_id, array("i", [1, 2]), array("f", [-1.0]), finish_reason="stop")
                case "too many":
                    ids = array("i", [1] * 99)
                    yield Chunk(submitted.request_id, ids, array("f", [-1.0] * 99), finish_reason="length")
                case "other id":
                    yield Chunk("who?", array("i", [1]), array("f", [-1.0]), finish_reason="stop")
                case "no end":
                    yield Chunk(submitted.request_id, array("i", [1]), array("f", [-1.0]))
                case "raises":
                    raise RuntimeError("out of memory")


@pytest.mark.parametrize("how", ["logprobs", "too many", "other id", "no end", "raises"])
def test_a_broken_engine_ends_tickets_with_an_error(how: str) -> None:
    async def body(dispatcher: EngineClient) -> list[Any]:
        tickets = [dispatcher.submit(request(name)) for name in "ab"]
        await done(*tickets)
        return [type(ticket.error) for ticket in tickets]

    assert run(Broken(how), body, attempts=2) == [EngineError, EngineError]


@given(
    st.lists(st.sampled_from(["stop", "mended", "crash", "error", "abort"]), min_size=1, max_size=8), st.integers(1, 3)
)
def test_every_ticket_ends_once_with_all_that_was_emitted(kinds: list[str], max_running: int) -> None:
    """Oracle: the engine's log, request by request."""
    more = {
        "stop": {},
        "abort": {"hang": True},
        "mended": {"error": "Overload: x", "fails": 1},
        "crash": {"crash": "y", "fails": 1},
        "error": {"error": "Overload: x"},
    }

    def script(asked: Request) -> Turn:
        kind = kinds[int(asked.trajectory_id)]
        return Turn(text=f"number {asked.trajectory_id} says {kind}", chunks=3, delay=0.5, **more[kind])  # type: ignore[arg-type]

    engine = ScriptedEngine(script, tokenizer=tokenizer(), log=True, max_running=max_running)

    async def body(dispatcher: EngineClient) -> list[PendingRequest]:
        tickets = [dispatcher.submit(request(str(index))) for index in range(len(kinds))]
        await asyncio.sleep(100)
        for ticket in tickets:
            await dispatcher.abort(ticket)
        return tickets

    tickets = run(engine, body)
    for index, ticket in enumerate(tickets):
        emitted = array("i")
        for line in engine.log:
            if isinstance(line.what, Chunk) and line.what.request_id.split("#")[0] == str(index):
                emitted.extend(line.what.ids)
        assert ticket.done.happened
        assert ticket.ids == emitted
        assert len(ticket.logprobs) == sum(count for count, _ in ticket.versions) == len(emitted)


def test_deadlines_stand_still_while_queued_and_while_paused() -> None:
    """Two requests of 4 s, one at a time, the engine paused for 100 s: neither has used more than 4 of its 5 s."""
    engine = scripted(Turn(text="yes", delay=4.0), max_running=1)

    async def body(dispatcher: EngineClient) -> list[bool]:
        async def one(name: str) -> bool:
            with Deadline(5.0) as deadline:
                await dispatcher.submit(request(name), deadline).done.wait()
            return deadline.expired

        ones = asyncio.gather(one("a"), one("b"))
        await asyncio.sleep(1.0)
        await dispatcher.pause()
        await asyncio.sleep(100.0)
        await dispatcher.resume()
        return await ones

    assert run(engine, body) == [False, False]


NAMES = [f"r{number}" for number in range(50)]


def test_what_is_tried_again_keeps_its_order() -> None:
    """One crash befalls many requests; a set of their ids would have another order in each process."""
    engine = scripted(Turn(text="yes", delay=1.0, crash="lost", fails=1))

    async def body(dispatcher: EngineClient) -> None:
        await done(*(dispatcher.submit(request(name)) for name in NAMES))

    run(engine, body)
    asked = [line.what.trajectory_id for line in engine.log if isinstance(line.what, Request)]
    assert asked == NAMES + NAMES


def test_what_was_paused_keeps_its_order() -> None:
    """One pause befalls many requests, which are out of time in the order in which they were asked for."""
    engine = scripted(Turn(text="yes", hang=True))
    late: list[str] = []

    async def body(dispatcher: EngineClient) -> None:
        async def one(name: str) -> None:
            with suppress(TimeoutError), Deadline(1.0) as deadline:
                await dispatcher.submit(request(name), deadline).done.wait()
            late.append(name)

        ones = asyncio.gather(*map(one, NAMES))
        await asyncio.sleep(0.5)
        await dispatcher.pause()
        await dispatcher.resume()
        await ones

    run(engine, body)
    assert late == NAMES


def test_a_hold_taken_while_paused_is_released_between_two_tries_too() -> None:
    """The request fails during the pause, and the engine goes on during the backoff: its deadline must run again."""
    engine = scripted(Turn(text="yes", hang=True, delay=1.0))

    async def body(dispatcher: EngineClient) -> bool:
        with Deadline(50.0) as deadline:
            ticket = dispatcher.submit(request("a"), deadline)
            await asyncio.sleep(0.5)
            await dispatcher.pause()
            dispatcher.pool._retries.failed(ticket, EngineError("lost during the pause"))
            await dispatcher.resume()
            await asyncio.sleep(1.0)
            await asyncio.Event().wait()
        return deadline.expired

    async def guarded(dispatcher: EngineClient) -> bool:
        try:
            return bool(await asyncio.wait_for(body(dispatcher), 1000.0))
        except TimeoutError:
            return asyncio.get_running_loop().time() < 900.0

    assert run(engine, guarded)


def test_a_request_aborted_in_the_turn_of_its_flush_never_reaches_the_engine() -> None:
    """The abort comes between the flush and the call to the engine, which does not know the request then."""
    engine = scripted(Turn(text="one two three", delay=60.0))

    async def body(dispatcher: EngineClient) -> tuple[Any, ...]:
        loop = asyncio.get_running_loop()
        stays, goes = dispatcher.submit(request("stays")), dispatcher.submit(request("goes"))
        await loop.create_task(dispatcher.abort(goes))  # begins right behind the flush
        ended_at = loop.time()
        return ended_at, goes.finish_reason, await done(stays), dispatcher.pool.dispatches

    ended_at, reason, stays, dispatches = run(engine, body)
    assert (ended_at, reason, stays[0][0], dispatches) == (0.0, "abort", "stop", 1)
    assert [line.what.request_id for line in engine.log if isinstance(line.what, Request)] == ["stays"]


def test_an_id_that_the_engine_still_has_is_not_used_again() -> None:
    """An abort slower than the grace leaves the request there; the next under its name is answered, with its own."""

    class Late(ScriptedEngine):
        async def abort(self, request_ids: Iterable[str]) -> None:
            """Take it an hour later."""

    engine = Late(
        lambda r: Turn(
            text="old" if "#" not in r.request_id else "new", delay=900.0 if r.trajectory_id == "slow" else 100.0
        ),
        tokenizer=tokenizer(),
        log=True,
    )

    async def body(dispatcher: EngineClient) -> list[str]:
        left, slow = dispatcher.submit(request("a")), dispatcher.submit(request("slow"))
        await asyncio.sleep(1.0)
        await dispatcher.abort(left)
        again, beside = dispatcher.submit(request("a")), dispatcher.submit(request("b"))
        await done(again, beside)
        first = [again.ids.tolist(), left.ids.tolist()]
        after = dispatcher.submit(request("a"))  # the engine is done with the first, if not with all of its call
        await done(after, slow)
        assert [again.attempt, beside.attempt, after.attempt] == [1, 1, 1]
        assert first == [[*tokenizer().encode("new"), tokenizer().eos_token_id], []]
        return [line.what.request_id for line in engine.log if isinstance(line.what, Request)]

    assert run(engine, body) == ["a", "slow", "a#2", "b", "a"]


def test_a_deadline_stands_still_while_a_second_try_queues() -> None:
    """The first try fails after 2 s; the second waits 20 s for a place, and takes 2 s: four seconds of its time."""
    turns = {"a": Turn(text="one two", delay=1.0, chunks=2, crash="lost", fails=1), "long": Turn(text="x", delay=20.0)}
    engine = ScriptedEngine(lambda r: turns[r.trajectory_id], tokenizer=tokenizer(), max_running=1)

    async def body(dispatcher: EngineClient) -> tuple[list[tuple[str | None, int]], bool, float]:
        loop = asyncio.get_running_loop()
        with Deadline(4.5) as deadline:
            ticket = dispatcher.submit(request("a"), deadline)
            await asyncio.sleep(0.5)
            other = dispatcher.submit(request("long"))
            ended = await done(ticket, other)
        return ended, deadline.expired, loop.time()

    (one, _), expired, at = run(engine, body)
    assert (one[0], expired) == ("stop", False)
    assert at > 20


def test_what_waits_for_a_sleeping_engine_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async def body(dispatcher: EngineClient) -> list[tuple[str | None, int]]:
        await dispatcher.pause("asleep")
        tickets = [dispatcher.submit(request("a")), dispatcher.submit(request("b"))]
        await asyncio.sleep(100.0)
        await dispatcher.resume("asleep")
        return await done(*tickets)

    assert [reason for reason, _ in run(scripted(Turn(text="yes")), body)] == ["stop", "stop"]
    assert [record.getMessage() for record in caplog.records] == [
        "the engine is asleep: generations wait until it is woken"
    ]


@pytest.mark.parametrize(
    ("weights", "version", "says"),
    [
        (None, None, "a model's folder, or tensors by name; got a NoneType"),
        ([("w", 1)], None, "got a list"),
        ({}, 1, "weights of version 1 cannot follow version 2"),
        ({}, 2**31, "whole numbers up to 2,147,483,647, got 2147483648"),
        ({}, 2.5, "whole numbers up to 2,147,483,647, got 2.5"),
    ],
)
def test_what_are_no_new_weights_is_refused(weights: Any, version: int | None, says: str) -> None:
    async def body(dispatcher: EngineClient) -> int:
        assert type(await dispatcher.update_weights({}, np.int64(2))) is int
        with pytest.raises(EngineError, match=says):
            await dispatcher.update_weights(weights, version)
        return dispatcher.weight_version

    assert run(scripted(Turn(text="yes")), body) == 2


def test_the_last_weight_version_is_the_last_that_a_batch_can_tell() -> None:
    async def body(dispatcher: EngineClient) -> int:
        last = await dispatcher.update_weights({}, 2**31 - 1)
        tokens = TokenStream([1], state="GENERATING")
        tokens.sample([2], [-1.0], state="GENERATING", turn=0, version=last)
        assert tokens.response_versions().tolist() == [last]
        with pytest.raises(EngineError, match="got 2147483648"):
            await dispatcher.update_weights({})
        return dispatcher.weight_version

    assert run(scripted(Turn(text="yes")), body) == 2**31 - 1


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


def fails_first() -> EnginePool:
    turns = {"short": Turn(text="yes", delay=1.0), "a": Turn(text="no", delay=9.0)}
    return pool_of(FailsFirst(lambda r: turns[r.trajectory_id], tokenizer=tokenizer()))


def test_requests_of_one_name_that_fail_together_are_tried_again_under_names_of_their_own() -> None:
    async def body() -> list[tuple[str | None, int]]:
        clients = [EngineClient(pool) for pool in [fails_first()] * 3]
        names = ["a", "a", "short"]
        return await done(*(client.submit(request(name)) for client, name in zip(clients, names, strict=True)))

    assert run_virtual(body()) == [("stop", 3)] * 3


def test_a_name_that_is_asked_for_again_is_not_of_the_earlier_dispatch_any_more() -> None:
    async def body() -> tuple[list[tuple[str | None, int]], int]:
        client = EngineClient(fails_first())
        other, first = client.submit(request("a")), client.submit(request("short"))
        await done(first)
        again = client.submit(request("short"))
        return await done(again, other), again.attempt

    assert run_virtual(body()) == ([("stop", 3)] * 2, 1)


def test_clients_of_one_engine_know_their_own_requests_alone() -> None:
    async def body() -> None:
        pool = pool_of(scripted(Turn(text="yes", delay=1.0, chunks=2)))
        mine, other = EngineClient(pool), EngineClient(pool)
        ticket = mine.submit(request("a"))
        ticket.on_tokens = (come := asyncio.Event()).set
        await come.wait()
        assert mine.waits_of("a") == [ticket]
        assert mine.sampling_since() == {("a", ""): 0}
        assert (other.waits_of("a"), other.sampling_since()) == ([], {})
        await mine.drain()

    run_virtual(body())


def test_what_is_asked_of_a_closed_engine_ends_at_once() -> None:
    async def body() -> tuple[str | None, str]:
        client = EngineClient(pool := pool_of(scripted(Turn(text="yes"))))
        await done(client.submit(request("a")))
        await pool.aclose()
        await client.sleep()  # harmless: nobody is there
        with pytest.raises(EngineError, match="the pool is closed"):
            await client.update_weights({})
        ticket, told = client.submit(request("b")), []
        ticket.on_end = told.append  # as for a worker's request: who asks is told, too
        await done(ticket)
        assert told == [ticket]
        return ticket.finish_reason, str(ticket.error)

    assert run_virtual(body()) == ("abort", "the pool is closed; build another")


@pytest.mark.parametrize("busy", [None, KeyError("running")])
def test_an_engine_that_does_not_say_how_busy_it_is_is_asked_all_the_same(
    busy: object, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent(ScriptedEngine):
        def load(self) -> Any:
            if isinstance(busy, Exception):
                raise busy
            return busy

    async def body(dispatcher: EngineClient) -> list[tuple[str | None, int]]:
        tickets = [dispatcher.submit(request(str(number))) for number in range(100)]
        return await done(*tickets)

    assert run(Silent(lambda r: Turn(text="yes"), tokenizer=tokenizer()), body) == [("stop", 3)] * 100
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "does not say how busy it is" in warning


def test_an_engine_that_says_nothing_of_its_load_gets_all_there_is() -> None:
    """One alone has nobody to leave requests to, and nothing is known of its room."""
    came: list[str] = []

    class Silent(ScriptedEngine):
        def load(self) -> Load:
            return Load()

        async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
            came.extend(each.request_id for each in requests)
            while len(came) < 300:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
            async for chunk in super().generate(requests):
                yield chunk

    async def body(dispatcher: EngineClient) -> list[tuple[str | None, int]]:
        async with asyncio.timeout(50.0):
            return await done(*(dispatcher.submit(request(f"r{i}")) for i in range(300)))

    ends = run(Silent(lambda r: Turn(text="yes"), tokenizer=tokenizer()), body)
    assert {finish for finish, _ in ends} == {"stop"}
