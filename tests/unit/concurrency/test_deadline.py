"""Deadlines count only while nothing holds them."""

import asyncio
from contextlib import nullcontext
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.testing.simulation.virtual_time import run_virtual

AWAY = 9
LONGEST = 60
times = st.one_of(st.integers(1, LONGEST), st.integers(1, LONGEST), st.none())
steps = st.lists(st.tuples(st.sampled_from([0, 1, -1, AWAY]), st.integers(1, 20)), max_size=12)


@example([(0, 5), (1, 2), (1, 2), (-1, 2), (-1, 2)], 7, None)
@example([(1, 5), (AWAY, 2)], 7, 9)
@example([(1, 20)], 60, 5)
@given(steps, times, times)
def test_it_expires_when_it_has_run_for_its_seconds_or_its_wall_has_passed(
    steps: list[tuple[int, int]], seconds: int | None, wall: int | None
) -> None:
    """In each step there is a hold more, or less, or it is away; in the end it runs for longer than any deadline.

    Oracle: count each second by itself: away it counts for neither, held for the wall; of both at once, the wall.
    """
    changes = (0 if step == AWAY else step for step, _ in steps)
    holds = [*accumulate(changes, lambda held, more: max(0, held + more), initial=0), 0][1:]
    lengths = [*(length for _, length in steps), LONGEST + 1]
    away = [*(step == AWAY for step, _ in steps), False]
    ran = passed = now = 0
    expected = None
    for held, is_away, length in zip(holds, away, lengths, strict=True):
        for _ in range(length):
            now, ran, passed = now + 1, ran + (not held and not is_away), passed + (not is_away)
            if expected is None and (ran == seconds or passed == wall):
                expected = now, passed == wall

    async def main() -> tuple[float, bool] | None:
        before = 0
        with Deadline(seconds, wall) as deadline:
            for held, is_away, length in zip(holds, away, lengths, strict=True):
                for _ in range(held - before):
                    deadline.hold()
                for _ in range(before - held):
                    deadline.run()
                before = held
                with deadline.away() if is_away else nullcontext():
                    await asyncio.sleep(length)
        return (asyncio.get_running_loop().time(), deadline.walled) if deadline.expired else None

    assert run_virtual(main()) == expected


def test_who_is_away_after_it_has_expired_is_not_cancelled_once_more() -> None:
    """Else the second cancellation would count as somebody else's, and end the trajectory."""

    async def main() -> tuple[bool, int]:
        with Deadline(1.0, 60.0) as deadline:
            try:
                await asyncio.sleep(9)
            finally:  # a handler that asks its user once more
                with deadline.away():
                    await asyncio.sleep(1)
                await asyncio.sleep(1)
        task = asyncio.current_task()
        assert task is not None
        return deadline.expired, task.cancelling()

    assert run_virtual(main()) == (True, 0)


def test_a_deadline_expires_on_other_event_loops_too() -> None:
    """uvloop rounds the times of its timers, and one that is due already is none."""
    uvloop = pytest.importorskip("uvloop", reason="uvloop comes with SGLang")

    async def expires(seconds: float) -> bool:
        async with asyncio.timeout(30):
            with Deadline(seconds) as deadline:
                await asyncio.sleep(60)
        return deadline.expired

    for seconds in (0.01, 0.0):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(expires(seconds))
