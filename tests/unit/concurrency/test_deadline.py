"""Deadlines count only while nothing holds them."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.testing.simulation.virtual_time import run_virtual


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=12), st.integers(1, 60))
def test_expires_after_running_for_its_seconds(phases: list[tuple[bool, int]], seconds: int) -> None:
    """Oracle: add up the phases in which nothing holds; the rest of the wait runs unheld."""
    ran, wall = 0, 0
    for held, length in phases:
        if not held and ran + length >= seconds:
            break
        ran += 0 if held else length
        wall += length
    expected = wall + seconds - ran

    async def main() -> float:
        loop = asyncio.get_running_loop()
        try:
            with Deadline(seconds) as deadline:
                for held, length in phases:
                    if held:
                        deadline.hold()
                    await asyncio.sleep(length)
                    if held:
                        deadline.run()
                await asyncio.Event().wait()
        except TimeoutError:
            assert deadline.expired
        return loop.time()

    assert run_virtual(main()) == pytest.approx(expected)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 40))
def test_a_wall_is_not_held_up(seconds: int, wall: int, held: int) -> None:
    """Oracle: whichever comes first, the seconds after the hold or the wall; of both at once, the wall."""
    expected = min(wall, held + seconds)

    async def main() -> float:
        try:
            with Deadline(seconds, wall) as deadline:
                deadline.hold()
                await asyncio.sleep(held)
                deadline.run()
                await asyncio.Event().wait()
        except TimeoutError:
            pass
        assert deadline.expired
        assert deadline.walled == (wall <= held + seconds)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == expected


@pytest.mark.virtual_time
async def test_holds_nest_and_none_never_expires() -> None:
    with Deadline(1.0) as deadline:
        deadline.hold()
        deadline.hold()
        deadline.run()
        await asyncio.sleep(10)
        deadline.run()
        await asyncio.sleep(0.5)
    assert not deadline.expired
    with Deadline(None) as forever:
        await asyncio.sleep(1e6)
    assert not forever.expired


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 20), st.integers(0, 40))
def test_away_nothing_counts(seconds: int, wall: int, before: int, away: int) -> None:
    """Oracle: what is left of the shorter one when it goes away is left when it is back."""
    short = min(seconds, wall)
    expected = short if before >= short else short + away

    async def main() -> float:
        try:
            with Deadline(seconds, wall) as deadline:
                await asyncio.sleep(before)
                with deadline.away():
                    await asyncio.sleep(away)
                await asyncio.Event().wait()
        except TimeoutError:
            assert deadline.walled == (wall <= seconds)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(expected)
