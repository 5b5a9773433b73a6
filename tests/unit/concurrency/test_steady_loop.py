"""The time in which the process stood still is nobody's; the time in which it worked is."""

import asyncio
import re
import threading
from types import SimpleNamespace

import pytest

from fsm_rollout.concurrency import steady_loop
from fsm_rollout.concurrency.loop_end import run_to_end
from fsm_rollout.concurrency.steady_loop import STILL, SteadyLoop


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clocks of a process, which go on by so many seconds more when a test says so."""
    added = SimpleNamespace(passed=0.0, computed=0.0)
    monotonic, process_time = steady_loop.monotonic, steady_loop.process_time
    monkeypatch.setattr(steady_loop, "monotonic", lambda: monotonic() + added.passed)
    monkeypatch.setattr(steady_loop, "process_time", lambda: process_time() + added.computed)
    return added


async def within(seconds: float, clocks: SimpleNamespace, passed: float, computed: float) -> float:
    """Return the time that the loop counts while so many seconds pass; TimeoutError: more than ``seconds``."""
    loop = asyncio.get_running_loop()
    before = loop.time()
    async with asyncio.timeout(seconds):
        clocks.computed, clocks.passed = clocks.computed + computed, clocks.passed + passed
        await asyncio.sleep(0.01)
    return loop.time() - before


def test_time_in_which_the_process_stood_still_is_not_counted_and_said(
    clocks: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    async def twice() -> float:
        return await within(60, clocks, 3_630, 0) + await within(60, clocks, 3_630, 0)

    assert run_to_end(twice(), SteadyLoop()) < 60
    said = [re.search(r"the process stood still for 36\d\d s", message) for message in caplog.messages]
    assert len(said) == 2, "and a little longer, where the machine is busy"
    assert all(said)


@pytest.mark.parametrize(("passed", "computed"), [(3_600, 3_600), (STILL - 1, 0)])
def test_time_in_which_it_worked_or_was_only_slow_is_counted(
    passed: float, computed: float, clocks: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TimeoutError):
        run_to_end(within(3, clocks, passed, computed), SteadyLoop())
    assert not caplog.messages


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    loop = SteadyLoop()
    assert len(set(threading.enumerate()) - before) == 1
    loop.close()
    assert set(threading.enumerate()) <= before
