"""Virtual time: it passes only when nothing can run, timers keep their order, and nothing waits for ever."""

import asyncio
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.testing.simulation.virtual_time import Deadlock, LeakedTasks, VirtualTimeLoop, run_virtual


def gives(expected: object) -> Callable[[Any], Callable[[], None]]:
    """Make a test of a coroutine that comes to this in virtual time."""

    def make(main: Any) -> Callable[[], None]:
        def test() -> None:
            assert run_virtual(main()) == expected

        return test

    return make


left: list[asyncio.Task[None]] = []


def virtual_loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


@gives((0.0, 3_600_000.0))
async def test_a_thousand_hours_pass_by_jumping():
    start = asyncio.get_running_loop().time()
    for _ in range(1000):
        await asyncio.sleep(3600)
    return start, asyncio.get_running_loop().time()


@gives(1e12 + 0.1)
async def test_the_clock_moves_on_however_large_it_is():
    """At 1e12 s a nanosecond is less than the spacing of floats; a timer must still fire."""
    await asyncio.sleep(1e12)
    await asyncio.sleep(0.1)
    return asyncio.get_running_loop().time()


@gives(0.0)
async def test_time_stands_while_callbacks_are_ready():
    for _ in range(100):
        await asyncio.sleep(0)
    return asyncio.get_running_loop().time()


@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.1 + 0.2, 1.0, 7.0]), max_size=30))
def test_timers_fire_by_time_and_then_in_the_order_set(delays: list[float]):
    async def main() -> list[tuple[float, int]]:
        loop, fired = asyncio.get_running_loop(), []
        for index, delay in enumerate(delays):
            loop.call_at(delay, lambda index=index: fired.append((loop.time(), index)))
        await asyncio.sleep(10)
        return fired

    expected = sorted((delay, index) for index, delay in enumerate(delays))
    assert run_virtual(main()) == expected


@gives(1.0)
async def test_a_cancelled_timer_does_not_move_the_clock():
    loop = asyncio.get_running_loop()
    loop.call_later(500, lambda: None).cancel()
    await asyncio.sleep(1)
    await loop.run_in_executor(None, lambda: None)
    return loop.time()


@gives(30.0)
async def test_timeouts_work_in_virtual_time():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(30):
            await asyncio.Event().wait()
    return asyncio.get_running_loop().time()


def test_a_thread_takes_no_virtual_time_and_is_waited_for():
    """The timer is set, yet it may not fire before the thread has answered."""
    entered, let_go = threading.Event(), threading.Event()
    order: list[str] = []

    def work() -> str:
        entered.set()
        let_go.wait()
        return "thread"

    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(1, order.append, "timer")
        helper = threading.Thread(target=lambda: (entered.wait(), let_go.set()))
        helper.start()
        order.append(await asyncio.to_thread(work))
        at = loop.time()
        await asyncio.sleep(2)
        helper.join()
        return at

    assert run_virtual(main()) == 0.0
    assert order == ["thread", "timer"]


@gives((1, 0.0))
async def test_the_clock_stands_for_a_thread_whose_future_was_cancelled():
    let_go = threading.Event()
    loop = virtual_loop()
    started, done = asyncio.Event(), asyncio.Event()

    def work() -> None:
        loop.call_soon_threadsafe(started.set)
        let_go.wait()
        loop.call_soon_threadsafe(done.set)

    future = loop.run_in_executor(None, work)
    await started.wait()
    future.cancel()
    await asyncio.sleep(0)
    before = loop.outside
    loop.call_later(1, let_go.set)  # the clock may not get there
    threading.Timer(0, let_go.set).start()
    await done.wait()
    return before, loop.time()


@gives(0.0)
async def test_external_holds_the_clock_for_a_thread_of_ones_own():
    loop = virtual_loop()
    answered = asyncio.Event()
    loop.call_later(5, lambda: None)
    with loop.external():
        thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(answered.set))
        thread.start()
        await answered.wait()
        thread.join()
    return loop.time()


def test_a_wait_that_cannot_end_is_a_deadlock_that_names_the_task():
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(3)
        await asyncio.create_task(stuck(), name="the stuck one")

    with pytest.raises(Deadlock, match=r"at 3 s[\s\S]*the stuck one: .*stuck > Event\.wait \(.*:\d+\)"):
        run_virtual(main())


def test_a_thread_that_never_comes_back_is_a_deadlock_once_patience_is_over():
    async def main() -> None:
        with virtual_loop().external():
            await asyncio.sleep(1)

    with pytest.raises(Deadlock, match=r"1 operation\(s\) outside the loop did not call back within 0\.01 s"):
        run_virtual(main(), patience=0.01)


def test_leaked_tasks_are_named_and_cancelled():
    cancelled: list[bool] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def main() -> None:
        main.task = asyncio.create_task(forever(), name="leak")  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    with pytest.raises(LeakedTasks, match=r"1 task\(s\)[\s\S]*leak: .*forever"):
        run_virtual(main())
    run_virtual(main(), leaks="ignore")
    assert cancelled == [True, True]


@gives(list(range(20)))
async def test_a_task_that_can_end_without_time_is_no_leak():
    steps: list[int] = []

    async def brief() -> None:
        for step in range(20):
            await asyncio.sleep(0)
            steps.append(step)

    left.append(asyncio.create_task(brief()))
    return steps


@pytest.mark.parametrize("fail", [lambda: 1 / 0, lambda: {}["x"]])
def test_the_main_coroutines_error_comes_through(fail: Callable[[], object]):
    async def main() -> None:
        await asyncio.sleep(1)
        fail()

    with pytest.raises((ZeroDivisionError, KeyError)):
        run_virtual(main())


@gives((b"A", 0.0))
async def test_an_answer_from_a_connection_comes_before_the_timeout_that_waits_for_it():
    near_end, far_end = socket.socketpair()

    def answer() -> None:
        far_end.sendall(far_end.recv(1).upper())
        far_end.close()

    reader, writer = await asyncio.open_connection(sock=near_end)
    thread = threading.Thread(target=answer)
    async with asyncio.timeout(30):
        thread.start()
        writer.write(b"a")
        received = await reader.read()
    writer.close()
    await writer.wait_closed()
    thread.join()
    return received, asyncio.get_running_loop().time()


class Rests(VirtualTimeLoop):
    """Keeps how long it meant to wait in real time, and does not wait (``really``: it does)."""

    def __init__(self) -> None:
        self.rests: list[float] = []
        self.really = False
        super().__init__()

    def _rest(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        self.rests.append(seconds)
        return super()._rest(seconds if self.really else 0.0)


def test_a_server_stops_time_for_no_moment_while_it_only_listens_or_speaks_with_its_own_loop():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(30):
            writer.write((await reader.read(1)).upper())
        await reader.read()
        writer.close()

    async def main() -> bytes:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            await asyncio.sleep(3600)
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await asyncio.sleep(20)
            writer.write(b"a")
            async with asyncio.timeout(1):
                answered = await reader.read(1)
            await asyncio.sleep(3600)
            writer.close()
            await writer.wait_closed()
            return answered

    loop = Rests()
    assert run_virtual(main(), loop=loop) == b"A"
    assert loop.rests == []


def test_an_open_connection_is_waited_for_no_longer_than_the_next_timer_is_away():
    near_end, far_end = socket.socketpair()

    async def main() -> None:
        _, writer = await asyncio.open_connection(sock=near_end)
        await asyncio.sleep(2.5)
        await asyncio.sleep(3600)
        writer.close()
        await writer.wait_closed()

    loop = Rests()
    run_virtual(main(), loop=loop)
    far_end.close()
    assert loop.rests[0] == 2.5
    assert max(loop.rests) <= 5.0


def test_a_task_is_named_by_the_users_line():
    async def fetch() -> None:
        await asyncio.wait_for(asyncio.Event().wait(), 1e9)

    async def main() -> None:
        main.tasks = [  # type: ignore[attr-defined]
            asyncio.create_task(fetch(), name="mine"),
            asyncio.create_task(asyncio.sleep(1e9), name="pythons"),
        ]
        await asyncio.sleep(0)

    with pytest.raises(LeakedTasks) as found:
        run_virtual(main())
    first = main.__code__.co_firstlineno
    assert f"mine: test_a_task_is_named_by_the_users_line.<locals>.fetch > wait_for ({__file__}:{first - 2})" in str(
        found.value
    )
    assert f"pythons: sleep (started at {__file__}:{first + 3}, in {main.__qualname__})" in str(found.value)
