"""The toolbox: whatever a model writes and whatever a tool does, a call has a result, in time, exactly once."""

import asyncio
import logging
import threading
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.concurrency import step_timing
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.tools.bounded_call import Slots
from fsm_rollout.trajectory.events import Called
from tests.cases import table
from tests.unit.tools.kit import BROKEN, ENTERED, GATE, LOG, VALUES, Heavy, a_call, box, facts, made, opened

# What the model is told.


@pytest.mark.parametrize("use", ["sync_add", "async_add"])
def test_a_good_call(use: str):
    result = made(box(add=use), a_call("add", left="20", right=22))
    assert facts(result) == {"result": "42", "tries": 1}


@pytest.mark.parametrize("case", table("tool_results")["reaches no tool"], ids=str)
def test_a_call_that_reaches_no_tool_is_the_models_fault_and_it_is_told_why(case: dict[str, Any]):
    attempt = BROKEN if case["call"] is None else next(a_call(name, **sent) for name, sent in case["call"].items())
    result = made(box(add="sync_add", fail="fail", give="give"), attempt)
    assert facts(result) == {"result": case["text"], "failure": case["failure"], "bad": True}


@pytest.mark.parametrize("case", table("tool_results")["raises"], ids=str)
@pytest.mark.parametrize("use", ["fail", "async_fail"])
def test_whatever_a_tool_raises_becomes_a_result(use: str, case: dict[str, str], caplog: pytest.LogCaptureFixture):
    result = made(box(fail=use), a_call("fail", kind=case["kind"]))
    assert not result.bad, "a tool's own error is no model's fault"
    assert (result.failure, result.tries) == (case["failure"], 1)
    assert result.result.startswith("error: fail failed: ")
    assert case["says"] in result.result
    assert caplog.text.encode(), "the log can be written"
    assert result.result.endswith("; try again, or go on without it")
    assert len(result.result) < 700
    result.result.encode()


@pytest.mark.parametrize("use", ["fail", "async_fail"])
def test_a_tool_blames_the_model_by_raising_bad_arguments(use: str):
    """No retry helps: the same arguments stay wrong."""
    result = made(box(fail={"use": use, "retry": {"attempts": 3}}), a_call("fail", kind="arguments"))
    text = "error: fail: there is no city 'Pariss'; correct the arguments and try again"
    assert facts(result) == {"result": text, "failure": "bad_arguments", "bad": True, "tries": 1}


def test_a_tool_that_prints_and_returns_nothing_is_named_once(caplog: pytest.LogCaptureFixture):
    tools = box(says="says", quiet="quiet", teller="Teller")
    with caplog.at_level(logging.WARNING):
        for name in ("says", "says", "quiet", "teller"):
            assert made(tools, a_call(name)).result == "null"
    assert [message.partition(") ")[2] for message in caplog.messages] == [
        "returned None; did you mean to return what it prints?"
    ] * 2


def test_what_a_tool_raises_is_logged_with_its_place_and_once(caplog: pytest.LogCaptureFixture):
    tools = box(fail="fail")
    with caplog.at_level(logging.WARNING):
        for kind in ("value", "value", "odd", "arguments"):
            made(tools, a_call("fail", kind=kind))
    (first, second) = caplog.messages
    assert "tool 'fail'" in first
    assert "ValueError: bad value (at kit.py:" in first
    assert "Odd: strange" in second


@pytest.mark.parametrize(("use", "kind"), [("fail", "exit"), ("fail", "interrupt"), ("async_fail", "exit")])
def test_what_ends_a_process_ends_only_the_call(use: str, kind: str):
    result = made(box(fail=use), a_call("fail", kind=kind))
    assert (result.failure, result.bad) == ("RuntimeError", False)


@pytest.mark.parametrize("case", table("tool_results")["returns"], ids=str)
def test_results_become_text(case: dict[str, str]):
    assert facts(made(box(give="give"), a_call("give", kind=case["kind"]))) == {"result": case["text"], "tries": 1}


@pytest.mark.parametrize("many", [0, 30_000])
def test_a_result_that_takes_long_to_be_made_text_is_not_on_the_loop(many: int) -> None:
    """Ten million numbers take seconds, and everybody else would wait."""
    VALUES["heavy"] = [*range(many), Heavy()]
    try:
        result = made(box(give="give"), a_call("give", kind="heavy"))
    finally:
        del VALUES["heavy"]
    assert result.result.startswith("[")
    assert Heavy.ran_in is not threading.main_thread()


@pytest.mark.parametrize(("kind", "says"), [("opaque", "object has no JSON form; return text"), ("digits", "4300")])
def test_a_result_that_no_model_can_be_told_is_a_failure(kind: str, says: str, caplog: pytest.LogCaptureFixture):
    """What to return instead is its author's business, so the log says it, and not the model's message."""
    result = made(box(give="give"), a_call("give", kind=kind))
    assert result.failure == "Unshowable"
    assert result.result == "error: give gave no result that can be shown; try again, or go on without it"
    assert f"was returned, which cannot be shown to a model: {'Exceeds' if kind == 'digits' else ''}" in caplog.text
    assert says in caplog.text
    assert not result.bad


def test_rewards():
    given = made(box(give="give"), a_call("give", kind="result"))
    assert facts(given) == {"result": "good", "reward": 0.25, "tries": 1}
    result = made(box(reward="reward"), a_call("reward", value="nan"))
    assert result.failure == "ValueError"
    assert result.reward is None


# Time.


async def test_a_tool_that_never_returns_holds_up_nobody():
    """Real time: a thread has no virtual duration. The gate opens only after the test."""
    session = opened(box(hang={"use": "hang", "timeout": 0.01}, add="sync_add"))
    hanging, adding = await asyncio.gather(
        session.call(a_call("hang", "c1")), session.call(a_call("add", "c2", left=1, right=2))
    )
    assert (hanging.failure, hanging.bad, hanging.tries) == ("timed_out", False, 1)
    assert hanging.result == ("error: hang did not answer and was stopped after 0.01 s; try again or go on without it")
    assert adding.result == "3"
    assert await session.release() == []
    assert not GATE.is_set()


async def test_a_blocking_tool_does_not_stall_the_loop():
    session = opened(box(hang="hang", add="async_add"))
    blocked = asyncio.create_task(session.call(a_call("hang", "c1")))
    results = [await session.call(a_call("add", f"c{i}", left=i, right=1)) for i in range(10)]
    assert [result.result for result in results] == [str(i + 1) for i in range(10)]
    assert not blocked.done()
    GATE.set()
    assert (await blocked).result == "late"


def test_an_async_tool_that_blocks_the_loop_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Each look at the clock is three seconds after the one before."""
    monkeypatch.setattr(step_timing, "monotonic", count(step=3.0).__next__)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert made(box(add="async_add"), a_call("add", left=1, right=2)).result == "3"
    (message,) = caplog.messages
    assert message == (
        "'tests.unit.tools.kit:async_add' kept the event loop for 3.0 s, and all else waited; "
        "write it as a plain `def`, which runs in a thread, or use asyncio.to_thread"
    )


def test_an_async_tool_is_cancelled_when_its_time_is_up():
    result = made(box(sleep={"use": "sleep", "timeout": 3}), a_call("sleep", seconds=10))
    assert (result.failure, result.bad, result.seconds) == ("timed_out", False, 3.0)
    assert LOG == [("start", 0.0), ("end", 3.0)]


def test_seconds_are_those_of_the_loops_clock():
    assert made(box(sleep="sleep"), a_call("sleep", seconds=2.5)).seconds == 2.5


def test_a_tool_that_refuses_to_stop_is_left_behind(caplog: pytest.LogCaptureFixture):
    async def main() -> Called:
        session = opened(box(stubborn={"use": "stubborn", "timeout": 3}))
        with caplog.at_level(logging.WARNING):
            return await session.call(a_call("stubborn"))

    result = run_virtual(main(), leaks="ignore")
    assert (result.failure, result.seconds) == ("timed_out", 8.0)
    assert "tool 'stubborn' did not stop" in caplog.text


@pytest.mark.virtual_time
async def test_cancelling_a_call_stops_the_tool():
    session = opened(box(sleep="sleep"))
    call = asyncio.create_task(session.call(a_call("sleep", seconds=10)))
    await asyncio.sleep(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert LOG == [("start", 0.0), ("end", 1.0)]


async def test_cancelling_a_call_leaves_its_thread_behind():
    session = opened(box(hang="hang"))
    call = asyncio.create_task(session.call(a_call("hang")))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not GATE.is_set()


# Retries.


@pytest.mark.parametrize("case", table("tool_results")["retries"], ids=str)
def test_retries(case: dict[str, Any]):
    result = made(box(flaky={"use": "flaky", "retry": case["retry"]}), a_call("flaky", failures=case["failures"]))
    assert (result.tries, result.failure, len(LOG)) == (case["tries"], case["failure"], case["tries"])
    assert not result.bad
    pauses = [later - earlier for earlier, later in pairwise(LOG)]
    assert all(0.25 * 2**n <= pause <= 0.5 * 2**n for n, pause in enumerate(pauses))


def test_pauses_depend_on_the_trajectory_and_the_call_only():
    def pauses(seed: int, call_id: str) -> list[float]:
        LOG.clear()
        tools = box(flaky={"use": "flaky", "retry": {"attempts": 3}})
        made(tools, a_call("flaky", call_id, failures=2), seed=seed)
        return list(LOG)

    assert pauses(1, "c1") == pauses(1, "c1")
    assert pauses(1, "c1") != pauses(2, "c1")
    assert pauses(1, "c1") != pauses(1, "c2")


def test_a_timeout_can_be_retried():
    retry = {"attempts": 2, "errors": ["TimeoutError"]}
    result = made(box(sleep={"use": "sleep", "timeout": 1, "retry": retry}), a_call("sleep", seconds=9))
    assert (result.failure, result.tries) == ("timed_out", 2)
    assert [what for what, _ in LOG] == ["start", "end"] * 2


def test_each_try_gets_its_own_arguments():
    call = a_call("spoil", items=[1])
    assert made(box(spoil={"use": "spoil", "retry": {"attempts": 2}}), call).result == "[1, 0]"
    assert LOG == [[1, 0], [1, 0]]
    assert call.arguments == {"items": [1]}


# Places.


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=1, max_size=12), st.integers(1, 4))
def test_no_more_calls_run_at_once_than_there_are_places(durations: list[float], places: int):
    LOG.clear()
    toolbox = box(sleep={"use": "sleep", "concurrency": places, "timeout": 3})

    async def main() -> list[Called]:
        sessions = [opened(toolbox, trajectory_id=str(i)) for i in range(len(durations))]
        calls = (s.call(a_call("sleep", seconds=d)) for s, d in zip(sessions, durations, strict=True))
        return await asyncio.gather(*calls)

    results = run_virtual(main())
    running = most = 0
    for what, _ in LOG:
        running += 1 if what == "start" else -1
        most = max(most, running)
    assert most == min(places, len(durations)), "all places are used, and no more"
    assert all(result.failure is None for result in results), "waiting for a place is not charged to the tool"
    assert all(result.seconds >= d for result, d in zip(results, durations, strict=True))


async def test_a_thread_left_behind_keeps_its_place_until_it_ends():
    session = opened(box(gated={"use": "gated", "concurrency": 1, "timeout": 1000}, add="sync_add"))
    given_up = asyncio.create_task(session.call(a_call("gated", "c1")))
    await asyncio.to_thread(ENTERED.wait)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    waiting = asyncio.create_task(session.call(a_call("gated", "c2")))
    assert (await session.call(a_call("add", "c3", left=1, right=2))).result == "3"
    GATE.set()
    assert (await waiting).result == "through"
    assert LOG == ["in", "out", "in", "out"]


def test_who_waits_for_places_that_do_not_come_back_is_told_so(caplog: pytest.LogCaptureFixture):
    """Both calls are left running at 8 s; the third has the timeout of 3 s from then on, not from when it came."""

    async def main() -> list[Called]:
        session = opened(box(linger={"use": "linger", "concurrency": 2, "timeout": 3}))
        return await asyncio.gather(*(session.call(a_call("linger", f"c{i}", seconds=99)) for i in range(3)))

    results = run_virtual(main(), leaks="ignore")
    assert [(result.failure, result.bad, result.seconds) for result in results] == [
        ("timed_out", False, 8.0),
        ("timed_out", False, 8.0),
        ("timed_out", False, 11.0),
    ]
    assert results[2].result == (
        "error: linger is still busy with calls that did not end; try again later or go on without it"
    )
    assert caplog.text.count("all 2 slots of tool 'linger' are held by calls that were given up") == 1


@pytest.mark.virtual_time
async def test_a_place_that_comes_back_ends_the_wait():
    """The first call is left running from 35 s on and ends at 50 s; the second may begin then."""
    session = opened(box(linger={"use": "linger", "concurrency": 1, "timeout": 30}))
    slow, quick = await asyncio.gather(
        *(session.call(a_call("linger", f"c{i}", seconds=s)) for i, s in enumerate((99, 1)))
    )
    assert (slow.failure, quick.result) == ("timed_out", "done")
    assert LOG == [("start", 0.0), ("end", 50.0), ("start", 50.0), ("end", 51.0)]


@pytest.mark.virtual_time
async def test_who_waits_for_a_place_looks_at_nobody_else(monkeypatch: pytest.MonkeyPatch):
    """Thousands of calls may wait at once; had each looked at all others, that would be most of what a run costs."""
    looks: list[asyncio.Timeout] = []
    monkeypatch.setattr(asyncio.Timeout, "expired", looks.append)
    slots = Slots("busy", 1)

    async def call() -> None:
        async with slots.hold(5.0):
            await asyncio.sleep(0)

    await asyncio.gather(*(call() for _ in range(100)))
    assert len(looks) <= 100


@pytest.mark.virtual_time
async def test_a_toolbox_serves_one_loop_after_another():
    toolbox = box(sleep={"use": "sleep", "concurrency": 1})
    session = opened(toolbox)
    assert [
        len(await asyncio.gather(*(session.call(a_call("sleep", f"c{i}", seconds=1)) for i in range(3))))
        for _ in range(2)
    ] == [3, 3]


@pytest.mark.virtual_time
async def test_a_pause_before_a_retry_takes_no_place():
    tools = box(flaky={"use": "flaky", "concurrency": 1, "retry": {"attempts": 2}})
    session = opened(tools)
    await asyncio.gather(*(session.call(a_call("flaky", f"c{i}", failures=2)) for i in range(2)))
    assert LOG[:2] == [0.0, 0.0]
