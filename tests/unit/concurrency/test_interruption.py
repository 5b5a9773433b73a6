"""Signals that end a command: the first lets it clean up, a second Ctrl-C does not wait, what is ignored stays so."""

import asyncio
import signal

import pytest

from fsm_rollout.concurrency.interruption import SIGNALS, Interrupted, interruptible


@pytest.fixture(autouse=True)
def _handlers() -> object:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_lets_the_coroutine_clean_up(number: int) -> None:
    assert number in SIGNALS, "this process would end here"
    cleaned: list[str] = []

    async def work() -> None:
        try:
            signal.raise_signal(number)
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            cleaned.append("up")

    with interruptible() as main, pytest.raises(Interrupted) as caught:
        main.run(work())
    assert (caught.value.signal, cleaned) == (number, ["up"])


async def _twice(second: int, cleaned: list[str]) -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(3600)
    finally:
        signal.raise_signal(second)
        cleaned.append("up")


def test_a_second_ctrl_c_does_not_wait() -> None:
    cleaned: list[str] = []
    with interruptible() as main, pytest.raises(Interrupted) as caught:
        main.run(_twice(signal.SIGINT, cleaned))
    assert (caught.value.signal, cleaned) == (signal.SIGINT, [])


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_what_comes_in_pairs_when_a_machine_goes_down_still_cleans_up(second: int) -> None:
    cleaned: list[str] = []
    with interruptible() as main, pytest.raises(Interrupted) as caught:
        main.run(_twice(second, cleaned))
    assert (caught.value.signal, cleaned) == (signal.SIGTERM, ["up"])


def test_outside_of_the_coroutine_a_signal_raises_at_once() -> None:
    with interruptible(), pytest.raises(Interrupted, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptible() as main:
        signal.raise_signal(signal.SIGHUP)

        async def work() -> int:
            signal.raise_signal(signal.SIGHUP)
            return 7

        assert main.run(work()) == 7
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_coroutine_that_cancels_itself_is_not_interrupted() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with interruptible() as main, pytest.raises(asyncio.CancelledError):
        main.run(work())
