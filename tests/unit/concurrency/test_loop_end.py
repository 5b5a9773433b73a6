"""An event loop ends although a task on it refuses to."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fsm_rollout.concurrency import loop_end
from fsm_rollout.concurrency.interruption import Interruptible
from fsm_rollout.concurrency.loop_thread import LoopThread
from fsm_rollout.testing import run_virtual


def in_a_thread(work: Coroutine[Any, Any, str]) -> str:
    loop = LoopThread()
    try:
        return loop.call(lambda: work)
    finally:
        loop.close()


def here(work: Coroutine[Any, Any, str]) -> str:
    return loop_end.run_to_end(work, asyncio.new_event_loop())


@pytest.mark.parametrize("run", [here, lambda work: Interruptible().run(work), in_a_thread])
def test_a_task_that_swallows_its_cancellation_is_named_and_left(
    run: Callable[[Coroutine[Any, Any, str]], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_end, "LEFT_AFTER", 0.01)
    swallowed: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def refuse() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed.append("once")

    async def main() -> str:
        tasks.append(asyncio.get_running_loop().create_task(refuse(), name="tool 'deaf'"))
        await asyncio.sleep(0)
        return "done"

    with caplog.at_level(logging.WARNING):
        assert run(main()) == "done"
    assert swallowed == ["once"]
    assert caplog.messages == ["tool 'deaf' ignores its cancellation (0.01 s so far) and is left behind"]


@pytest.mark.parametrize("run", [here, lambda work: Interruptible().run(work), in_a_thread])
def test_a_thread_that_never_ends_is_named_and_left(
    run: Callable[[Coroutine[Any, Any, str]], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_end, "LEFT_AFTER", 0.01)
    never = threading.Event()

    async def main() -> str:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def stuck() -> None:
            loop.call_soon_threadsafe(begun.set)
            never.wait()

        main.task = loop.create_task(asyncio.to_thread(stuck))  # type: ignore[attr-defined]
        await begun.wait()  # in no thread: that would have to end in time as well
        return "done"

    results: list[str] = []
    ends = threading.Thread(target=lambda: results.append(run(main())), daemon=True)
    with caplog.at_level(logging.WARNING):
        ends.start()
        ends.join(60)
    never.set()
    assert results == ["done"]
    assert caplog.messages == ["1 job(s) of asyncio.to_thread do not end (0.01 s so far) and are left behind"]


def test_jobs_of_a_loop_wait_for_a_few_threads_and_those_that_are_cancelled_meanwhile_are_not_done() -> None:
    done: list[int] = []

    async def main() -> int:
        free, before = threading.Event(), set(threading.enumerate())  # of those one may just end
        held = [asyncio.create_task(asyncio.to_thread(free.wait)) for _ in range(200)]
        given_up = asyncio.create_task(asyncio.to_thread(done.append, -1))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        threads = [thread.name for thread in set(threading.enumerate()) - before].count("asyncio")
        free.set()
        await asyncio.gather(*held, *(asyncio.to_thread(done.append, number) for number in range(500)))
        return threads

    assert loop_end.run_to_end(main(), asyncio.new_event_loop()) == loop_end.MOST_THREADS
    assert sorted(done) == list(range(500))


@pytest.mark.parametrize("run", [here, run_virtual])
def test_an_interruption_that_a_task_group_hands_on_leaves_no_task_behind(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    """It comes out of the loop twice: of the task that raises it, and of the group's own while that is ended."""
    tasks: set[asyncio.Task[Any]] = set()

    async def interrupted() -> None:
        raise KeyboardInterrupt

    async def group() -> None:
        async with asyncio.TaskGroup() as started:
            started.create_task(interrupted())

    async def main() -> None:
        try:
            await asyncio.gather(group(), asyncio.Event().wait())
        finally:
            tasks.update(asyncio.all_tasks())
            await asyncio.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        run(main())
    assert tasks
    assert all(task.done() for task in tasks)


def test_what_ends_when_it_is_cancelled_is_waited_for() -> None:
    ended: list[str] = []

    async def tidy() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("tidied up")

    async def main() -> None:
        main.task = asyncio.get_running_loop().create_task(tidy())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        loop_end.run_to_end(main(), asyncio.new_event_loop())
    assert ended == ["tidied up"]
