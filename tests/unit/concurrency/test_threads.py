"""Threads are used again, except by those who wait for one that does not come back."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import Any

import pytest

from fsm_rollout.concurrency import threads
from fsm_rollout.concurrency.threads import DaemonThreads

SECONDS = 600


def results(*futures: Future[Any]) -> list[Any]:
    return [future.result(SECONDS) for future in futures]


def held(pool: DaemonThreads) -> tuple[Future[threading.Thread], threading.Event]:
    """Return a job that has begun and runs until the event."""
    begun, free = threading.Event(), threading.Event()

    def work() -> threading.Thread:
        begun.set()
        free.wait()
        return threading.current_thread()

    future = pool.submit(work)
    assert begun.wait(SECONDS)
    return future, free


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_SECONDS", SECONDS)


def test_one_job_after_the_other_runs_in_the_same_few_threads() -> None:
    """Not always in one: a result may be there before its thread waits for the next job."""
    pool = DaemonThreads("pooled")
    seen = {thread for _ in range(200) for thread in results(pool.submit(threading.current_thread))}
    assert len(seen) < 100
    assert not pool.end(SECONDS)


def test_a_job_that_does_not_return_holds_up_no_other() -> None:
    pool = DaemonThreads("pooled")
    stuck = [held(pool) for _ in range(3)]
    results(*(pool.submit(int) for _ in range(9)))
    assert not any(future.done() for future, _ in stuck)
    for _, free in stuck:
        free.set()
    assert len({*results(*(future for future, _ in stuck))}) == 3
    assert not pool.end(SECONDS)


@pytest.mark.parametrize("most", [1, 5])
def test_a_thread_whose_job_was_given_up_takes_no_other(most: int) -> None:
    pool = DaemonThreads("pooled", most)
    future, free = held(pool)
    assert not future.cancel(), "it runs"
    waiting = [pool.submit(threading.current_thread) for _ in range(9)]
    free.set()
    others = results(*waiting, *(pool.submit(threading.current_thread) for _ in range(9)))
    assert future.result(SECONDS) not in others
    assert not pool.end(SECONDS)


def test_idle_threads_end_and_the_next_job_has_one_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_SECONDS", 0.0)
    pool = DaemonThreads("pooled", 2)
    for _ in range(200):
        assert results(pool.submit(int, "7"), pool.submit(int, "8"), pool.submit(int, "9")) == [7, 8, 9]
    with pool._left:
        assert pool._left.wait_for(lambda: not pool._alive, SECONDS)


def test_a_pool_that_ends_drops_what_waits_and_says_what_still_runs() -> None:
    pool = DaemonThreads("pooled", 1)
    future, free = held(pool)
    dropped = pool.submit(int)
    assert pool.end(0.0) == 1
    free.set()
    results(future)
    assert pool.end(SECONDS) == 0
    assert not wait([dropped], timeout=0).done


def test_errors_are_the_callers_and_the_thread_goes_on() -> None:
    pool = DaemonThreads("pooled", 1)
    with pytest.raises(ValueError, match="invalid literal"):
        pool.submit(int, "x").result(SECONDS)
    with pytest.raises(SystemExit):
        pool.submit(exit).result(SECONDS)
    assert results(pool.submit(int, "7")) == [7]
    assert not pool.end(SECONDS)
