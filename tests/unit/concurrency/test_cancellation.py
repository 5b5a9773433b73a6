"""Who waits for another thread hears what asyncio makes of a Ctrl-C, and mistakes nobody's timeout for its own."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from fsm_rollout.concurrency import cancellation
from fsm_rollout.concurrency.cancellation import pause, wait_for


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Hear it, also where the shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_what_the_other_thread_does_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "LOOK_UP", 0.001)
    done: Future[str] = Future()
    timer = threading.Timer(0.05, done.set_result, ["it"])  # many looks later
    timer.start()
    assert wait_for(done) == "it"
    timer.join()


def test_a_timeout_is_told_from_that_of_the_other_thread() -> None:
    with pytest.raises(TimeoutError, match=r"^$"):
        wait_for(Future(), 0.01)
    failed: Future[None] = Future()
    failed.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        wait_for(failed, 0)
    pause(0.001)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("wait", [lambda: wait_for(Future(), 60), lambda: pause(60)])
def test_a_ctrl_c_that_only_cancels_the_task_ends_the_wait(wait: object) -> None:
    async def main() -> None:
        signal.raise_signal(signal.SIGINT)  # asyncio cancels this task, which does not await anything
        assert callable(wait)
        wait()
        raise AssertionError("it was not heard")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
