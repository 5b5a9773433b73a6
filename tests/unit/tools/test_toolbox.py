"""The toolbox: whatever a model writes and whatever a tool does, a call has a result, in time, exactly once."""

import asyncio
import contextvars
import dataclasses
import logging
import threading
from collections.abc import Awaitable, Callable
from itertools import count, pairwise
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.agent import graph
from fsm_rollout.concurrency import step_timing
from fsm_rollout.errors import BadArguments, ToolError
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.tools import AgentAnswer, AgentCall, Hidden, Tool, Toolbox, ToolContext, ToolResult, ToolSession
from fsm_rollout.tools.bound_tools import FunctionTool
from fsm_rollout.tools.bounded_call import Slots
from fsm_rollout.trajectory.events import Called, MalformedCall, ToolCall
from tests.cases import table

# The tools, by what they do. They are loaded by name, as any user's tools are.

LOG: list[Any] = []
GATE = threading.Event()
ENTERED = threading.Event()
WHO: contextvars.ContextVar[str] = contextvars.ContextVar("WHO", default="nobody")


@pytest.fixture(autouse=True)
def _fresh():
    LOG.clear()
    GATE.clear()
    ENTERED.clear()
    yield
    GATE.set()


def sync_add(left: int, right: int) -> int:
    """Add."""
    return left + right


async def async_add(left: int, right: int) -> int:
    """Add."""
    return left + right


def hang() -> str:
    """Never return."""
    GATE.wait()
    return "late"


async def sleep(seconds: float) -> str:
    """Sleep."""
    LOG.append(("start", asyncio.get_running_loop().time()))
    try:
        await asyncio.sleep(seconds)
    finally:
        LOG.append(("end", asyncio.get_running_loop().time()))
    return "slept"


async def stubborn() -> str:
    """Refuse to be cancelled."""
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            LOG.append("refused")
            if len(LOG) > 1:
                raise


async def linger(seconds: float) -> str:
    """Take 20 s to stop."""
    LOG.append(("start", asyncio.get_running_loop().time()))
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        await asyncio.sleep(20)
    LOG.append(("end", asyncio.get_running_loop().time()))
    return "done"


def gated() -> str:
    """Wait at the gate."""
    LOG.append("in")
    ENTERED.set()
    GATE.wait()
    LOG.append("out")
    return "through"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


class Odd(BaseException):
    pass


ERRORS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("bad value"),
    "arguments": lambda: BadArguments("there is no city 'Pariss'"),
    "connection": lambda: ConnectionResetError("gone"),
    "timeout": lambda: TimeoutError("the server's"),
    "path": lambda: FileNotFoundError("no notes.txt"),
    "memory": lambda: MemoryError(),
    "long": lambda: ValueError("x" * 10_000),
    "silent": lambda: KeyError(),
    "stop": lambda: StopIteration(1),
    "exit": lambda: SystemExit(3),
    "interrupt": lambda: KeyboardInterrupt(),
    "cancelled": lambda: asyncio.CancelledError(),
    "odd": lambda: Odd("strange"),
    "unprintable": lambda: Unprintable(),
    "surrogate": lambda: ValueError("\ud800"),
}


def fail(kind: str) -> str:
    """Raise."""
    LOG.append(kind)
    raise ERRORS[kind]()


async def async_fail(kind: str) -> str:
    """Raise."""
    raise ERRORS[kind]()


async def flaky(failures: int) -> str:
    """Fail some times, then succeed."""
    LOG.append(asyncio.get_running_loop().time())
    if len(LOG) <= failures:
        raise ConnectionResetError("again")
    return f"after {len(LOG)}"


async def spoil(items: list[int]) -> list[int]:
    """Change its arguments, then fail; the second time it succeeds."""
    items.append(0)
    LOG.append(list(items))
    if len(LOG) == 1:
        raise ValueError("once more")
    return items


@dataclasses.dataclass
class Point:
    x: int
    name: str = "ä"


class Array:
    def tolist(self) -> list[int]:
        return [1, 2]


VALUES: dict[str, Any] = {
    "text": "a\nä",
    "int": 3,
    "float": 0.5,
    "bool": True,
    "none": None,
    "dict": {"ä": [1, Point(2)]},
    "array": {"a": Array()},
    "result": ToolResult("good", reward=0.25),
    "pair": "\ud83d\ude00",
    "lone": "a\ud800b",
    "opaque": object(),
    "digits": 10**5000,
}


def give(kind: str) -> Any:
    """Return something."""
    return VALUES[kind]


def reward(value: float) -> Any:
    """Return a reward."""
    return ToolResult("r", reward=value)


async def about(context: ToolContext) -> dict[str, Any]:
    """Say who calls."""
    return {
        "ids": [context.trajectory_id, context.group_id],
        "roll": context.rng.random(),
        "extra": dict(context.extra),
        "who": WHO.get(),
    }


def threaded_about(context: ToolContext) -> str:
    """Say who calls, from a thread."""
    assert threading.current_thread() is not threading.main_thread()
    return WHO.get()


def search(query: str, table: Annotated[list[str], Hidden], limit: int = 1) -> str:
    """Search."""
    table.append(query)
    return f"{table} {limit}"


class Sandbox(Tool):
    """Counts.

    One for each trajectory.
    """

    def __init__(self, size: int = 1) -> None:
        LOG.append(f"init {size}")

    async def create(self, start: int = 0, *, slow: float = 0.0, fail: str = "", context: ToolContext) -> None:
        LOG.append(f"create {start}")
        await asyncio.sleep(slow)
        if fail and LOG.count(f"create {start}") == 1:
            raise ERRORS[fail]()
        self.count = start
        LOG.append("created")

    async def execute(self, by: int = 1) -> int:
        self.count += by
        count = self.count
        await asyncio.sleep(0)
        return count

    async def release(self) -> None:
        LOG.append("release")


def says() -> None:
    """Say it on the terminal."""
    print("said")


def quiet() -> None:
    """Do something of which there is nothing to say."""


class Teller:
    """Says it on the terminal."""

    def execute(self) -> None:
        print("said")


class BadRelease(Sandbox):
    """Counts."""

    async def release(self) -> None:
        LOG.append("release")
        raise ERRORS["odd"]()


class SlowRelease(Sandbox):
    """Counts."""

    async def release(self) -> None:
        await asyncio.sleep(1e6)


class SyncTool:
    """A tool that knows nothing of asyncio."""

    def create(self, start: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.count = start

    def execute(self) -> int:
        return self.count

    def release(self) -> None:
        LOG.append("released")


class HangingCreate:
    """Hangs."""

    def create(self) -> None:
        GATE.wait()

    def execute(self) -> str:
        return "?"


async def no_agent(agent: graph.AgentGraph, call: AgentCall) -> AgentAnswer:
    raise AssertionError("no agent is called here")


HELPER = graph.AgentGraph(agent="helper", description="Helps.", states={"PENDING": {}}, transitions=())


def box(**tools: Any) -> Toolbox:
    """Build a toolbox of tools given as ``name="function"`` or as a dict of YAML keys."""
    specs = {}
    for name, spec in tools.items():
        spec = {"use": spec} if isinstance(spec, str) else spec
        specs[name] = spec | ({"use": f"{__name__}:{spec['use']}"} if "use" in spec else {})
    return Toolbox(graph.AgentGraph(agent="a", tools=specs, states={"PENDING": {}}, transitions=()))


def opened(toolbox: Toolbox, **options: Any) -> ToolSession:
    defaults: dict[str, Any] = {
        "trajectory_id": "t",
        "group_id": "g",
        "seed": 7,
        "tools_kwargs": None,
        "extra": {"answer": "42"},
        "run_agent": no_agent,
    }
    return ToolSession(toolbox=toolbox, **(defaults | options))


def a_call(name: str, call_id: str = "c1", /, **arguments: Any) -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def made(toolbox: Toolbox, attempt: ToolCall | MalformedCall, **options: Any) -> Called:
    """Make one call in virtual time and release."""

    async def main() -> Called:
        session = opened(toolbox, **options)
        result = await session.call(attempt)
        assert await session.release() == []
        return result

    return run_virtual(main())


def facts(called: Called) -> dict[str, Any]:
    """What a call came to, as far as there is something to say."""
    names = ("result", "failure", "bad", "reward", "tries", "truncated_tokens", "child_id")
    return {name: fact for name in names if (fact := getattr(called, name))}


# What the model is told.


@pytest.mark.parametrize("use", ["sync_add", "async_add"])
def test_a_good_call(use: str):
    result = made(box(add=use), a_call("add", left="20", right=22))
    assert facts(result) == {"result": "42", "tries": 1}


BROKEN = MalformedCall(id="c1", kind="unclosed", message="the call has no end")


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
    assert "ValueError: bad value (at test_toolbox.py:" in first
    assert "Odd: strange" in second


@pytest.mark.parametrize(("use", "kind"), [("fail", "exit"), ("fail", "interrupt"), ("async_fail", "exit")])
def test_what_ends_a_process_ends_only_the_call(use: str, kind: str):
    result = made(box(fail=use), a_call("fail", kind=kind))
    assert (result.failure, result.bad) == ("RuntimeError", False)


@pytest.mark.parametrize("case", table("tool_results")["returns"], ids=str)
def test_results_become_text(case: dict[str, str]):
    assert facts(made(box(give="give"), a_call("give", kind=case["kind"]))) == {"result": case["text"], "tries": 1}


class Heavy:
    """Its own code makes it plain data, and notes where it ran."""

    ran_in: threading.Thread

    def tolist(self) -> list[int]:
        Heavy.ran_in = threading.current_thread()
        return [1, 2]


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
        f"'{__name__}:async_add' kept the event loop for 3.0 s, and all else waited; "
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


# What tools are given.


@pytest.mark.virtual_time
async def test_a_tool_may_ask_who_calls():
    tools = box(about="about", threaded="threaded_about")
    WHO.set("me")
    session = opened(tools, trajectory_id="g/3", group_id="g", extra={"k": 1})
    other = opened(tools, trajectory_id="g/3", group_id="g", extra={"k": 1}, seed=8)
    first, second, again, elsewhere, threaded = (
        await session.call(a_call("about", "c1")),
        await session.call(a_call("about", "c2")),
        await opened(tools, trajectory_id="g/3", group_id="g", extra={"k": 1}).call(a_call("about", "c1")),
        await other.call(a_call("about", "c1")),
        await session.call(a_call("threaded", "c3")),
    )
    assert '"ids": ["g/3", "g"]' in first.result
    assert '"extra": {"k": 1}, "who": "me"' in first.result
    assert first == again, "the same call of the same trajectory has the same random numbers"
    assert len({first.result, second.result, elsewhere.result}) == 3
    assert threaded.result == "me"


def test_hidden_values_come_from_the_agent_and_the_prompt_and_are_nobody_elses():
    tools = box(search={"use": "search", "kwargs": {"limit": 5, "table": ["agent"]}})
    assert list(tools.schemas("main")[0]["function"]["parameters"]["properties"]) == ["query"]
    tools_kwargs = {"search": {"table": ["prompt"]}}
    assert made(tools, a_call("search", query="q")).result == "['agent', 'q'] 5"
    assert made(tools, a_call("search", query="q"), tools_kwargs=tools_kwargs).result == "['prompt', 'q'] 5"
    assert made(tools, a_call("search", query="q"), tools_kwargs=tools_kwargs).result == "['prompt', 'q'] 5"
    assert tools_kwargs == {"search": {"table": ["prompt"]}}
    assert made(tools, a_call("search", query="q", limit=1)).failure == "bad_arguments"


@pytest.mark.parametrize("case", table("tool_results")["kwargs"], ids=str)
def test_a_prompts_tools_kwargs_are_checked_before_anything_runs(case: dict[str, Any]):
    tools = box(search="search", sandbox="Sandbox", agent={"agent": HELPER}, plain="Plain")
    with pytest.raises(ToolError, match=case["says"]):
        opened(tools, tools_kwargs=case["given"])


class Plain:
    """Has only what is needed."""

    def execute(self) -> str:
        return "plain"


async def test_schemas_are_one_object_for_each_context():
    tools = {name: {"use": f"{__name__}:{name}"} for name in ("sync_add", "give")}
    contexts = {"critic": {}, "helper": {"tools": ["give"]}}
    agent = graph.AgentGraph(agent="a", tools=tools, contexts=contexts, states={"PENDING": {}}, transitions=())
    toolbox = Toolbox(agent)
    names = {c: [s["function"]["name"] for s in toolbox.schemas(c)] for c in ("main", "critic", "helper")}
    assert names == {"main": ["sync_add", "give"], "critic": [], "helper": ["give"]}
    assert toolbox.schemas("main") is toolbox.schemas("main")
    assert (
        await opened(toolbox).call(a_call("sync_add", left=1, right=1), context="helper")
    ).result == "error: there is no tool 'sync_add'; the tools are: give"


# Classes.


@pytest.mark.virtual_time
async def test_an_instance_lives_as_long_as_its_trajectory():
    tools = box(sandbox={"use": "Sandbox", "kwargs": {"size": 9}}, unused="Sandbox")
    session = opened(tools, tools_kwargs={"sandbox": {"start": 5}})
    other = opened(tools)
    assert LOG == [], "nothing is made before the first call"
    results = await asyncio.gather(*(session.call(a_call("sandbox", f"c{i}", by=1)) for i in range(3)))
    assert [r.result for r in results] == ["6", "7", "8"], "calls of one turn share the instance"
    assert (await other.call(a_call("sandbox", by=10))).result == "10", "trajectories do not"
    assert LOG == ["init 9", "create 5", "created", "init 9", "create 0", "created"]
    LOG.clear()
    assert await session.release() == await session.release() == []
    assert LOG == ["release"]
    await other.release()
    with pytest.raises(ToolError, match="have been released"):
        await session.call(a_call("sandbox"))


def test_sync_classes_run_in_threads():
    result = made(box(tool="SyncTool"), a_call("tool"), tools_kwargs={"tool": {"start": 3}})
    assert (result.result, LOG) == ("3", ["released"])
    assert made(box(plain="Plain"), a_call("plain")).result == "plain"


@pytest.mark.virtual_time
async def test_a_failing_create_is_not_the_models_fault_and_is_tried_anew():
    session = opened(box(sandbox="Sandbox"), tools_kwargs={"sandbox": {"fail": "connection"}})
    first = await session.call(a_call("sandbox", "c1"))
    assert (first.failure, first.bad) == ("ConnectionResetError", False)
    assert first.result == (
        "error: sandbox is not available (ConnectionResetError); try again later or go on without it"
    )
    assert (await session.call(a_call("sandbox", "c2"))).result == "1"
    assert await session.release() == []
    assert LOG.count("release") == 1


@pytest.mark.virtual_time
async def test_a_slow_create_goes_on_for_the_next_call():
    tools = box(sandbox={"use": "Sandbox", "timeout": 3})
    session = opened(tools, tools_kwargs={"sandbox": {"slow": 5}})
    assert (await session.call(a_call("sandbox", "c1"))).failure == "timed_out"
    assert (await session.call(a_call("sandbox", "c2"))).result == "1"
    assert asyncio.get_running_loop().time() == 5.0
    assert LOG == ["init 1", "create 0", "created"]
    await session.release()


@pytest.mark.virtual_time
async def test_a_create_under_way_is_stopped_by_the_release():
    tools = box(sandbox={"use": "Sandbox", "timeout": 3})
    session = opened(tools, tools_kwargs={"sandbox": {"slow": 500}})
    await session.call(a_call("sandbox", "c1"))
    assert await session.release() == []
    assert asyncio.get_running_loop().time() == 3.0
    assert LOG == ["init 1", "create 0"]


async def test_a_hanging_sync_create_is_reported():
    session = opened(box(tool={"use": "HangingCreate", "timeout": 0.01}))
    assert (await session.call(a_call("tool"))).failure == "timed_out"
    assert (await session.release()) == ["tool 'tool': release did not end within 0.01 s and was stopped"]


@pytest.mark.virtual_time
async def test_a_release_that_fails_is_reported_and_hurts_no_other():
    session = opened(box(bad="BadRelease", slow={"use": "SlowRelease", "timeout": 2}, good="Sandbox"))
    for name in ("bad", "slow", "good"):
        await session.call(a_call(name, name))
    assert await session.release() == [
        "tool 'bad': release raised Odd: strange",
        "tool 'slow': release did not end within 2 s and was stopped",
    ]
    assert LOG.count("release") == 2


@pytest.mark.virtual_time
async def test_a_release_ends_what_it_began_when_it_is_cancelled():
    session = opened(box(slow={"use": "SlowRelease", "timeout": 5}, good="Sandbox"))
    for name in ("slow", "good"):
        await session.call(a_call(name, name))
    releasing = asyncio.create_task(session.release())
    await asyncio.sleep(0)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert LOG.count("release") == 1
    assert asyncio.get_running_loop().time() == 5.0


@pytest.mark.virtual_time
async def test_an_instance_is_released_when_its_calls_were_cancelled():
    session = opened(box(sandbox="Sandbox"), tools_kwargs={"sandbox": {"slow": 1}})
    call = asyncio.create_task(session.call(a_call("sandbox")))
    await asyncio.sleep(0.5)
    call.cancel()
    await asyncio.wait({call})
    await asyncio.sleep(1)
    assert await session.release() == []
    assert LOG == ["init 1", "create 0", "created", "release"]


class Account(Tool):
    """Adds up, and takes a while over each sum."""

    def __init__(self) -> None:
        self.total = self.tries = 0

    async def execute(self, by: int) -> int:
        """Add."""
        self.tries += 1
        before = self.total
        await asyncio.sleep(10.0 / by)  # the later ones are quicker
        if self.tries == 1:
            raise ConnectionResetError("again")
        self.total = before + by
        return self.total


@pytest.mark.parametrize(
    ("order", "results", "in_order"), [("called", ["1", "3", "6"], True), ("any", ["1", "2", "3"], False)]
)
def test_calls_of_one_turn_to_one_instance_run_in_their_order(order: str, results: list[str], in_order: bool) -> None:
    """Also where the first of them is tried again; at once they would lose each other's updates."""

    async def main() -> tuple[list[Called], list[Called], float]:
        tools = box(account={"use": "Account", "order": order, "retry": {"attempts": 2}})
        one, other = opened(tools), opened(tools, trajectory_id="u")
        calls = [asyncio.create_task(one.call(a_call("account", f"c{i}", by=i))) for i in (1, 2, 3)]
        beside = await other.call(a_call("account", by=5))
        seconds = asyncio.get_running_loop().time()
        return [await call for call in calls], [beside], seconds

    made_calls, (beside,), seconds = run_virtual(main())
    assert [call.result for call in made_calls] == results
    assert beside.result == "5"
    assert seconds < 10.0, "another trajectory has an instance of its own, and waits for nobody"
    ends = [call.seconds for call in made_calls]
    assert (ends == sorted(ends)) is in_order


@pytest.mark.virtual_time
async def test_a_call_that_is_given_up_leaves_its_turn_to_the_next() -> None:
    session = opened(box(sandbox={"use": "Account", "timeout": 6}))
    calls = [asyncio.create_task(session.call(a_call("sandbox", f"c{i}", by=i))) for i in (1, 2, 3)]
    await asyncio.sleep(7.0)
    calls[1].cancel()
    await asyncio.wait(calls)
    assert [call.cancelled() or call.result().result for call in calls] == [
        "error: sandbox did not answer and was stopped after 6 s; try again or go on without it", True, "3",
    ]  # fmt: skip


# Agents.


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (AgentAnswer("done"), {"result": "done"}),
        (
            AgentAnswer("half", failure="limit:assistant_turns"),
            {
                "result": "error: ask ended without an answer (limit:assistant_turns); try again or go on without it",
                "failure": "limit:assistant_turns",
            },
        ),
    ],
)
def test_an_agent_is_run_with_its_task(answer: AgentAnswer, told: dict[str, Any]):
    async def run_agent(agent: graph.AgentGraph, call: AgentCall) -> AgentAnswer:
        assert (call.tool, agent, call.task, call.call_id, call.number) == ("ask", HELPER, "do it", "c1", 1)
        return dataclasses.replace(answer, child_id="t/x.1")

    result = made(box(ask={"agent": HELPER}), a_call("ask", task="do it"), run_agent=run_agent)
    assert facts(result) == told | {"child_id": "t/x.1", "tries": 1}


def test_a_failed_agent_may_be_tried_again():
    async def run_agent(agent: graph.AgentGraph, call: AgentCall) -> AgentAnswer:
        LOG.append(call.task)
        return AgentAnswer("ok") if len(LOG) == 2 else AgentAnswer("", failure="failed:EngineError")

    def ask(errors: list[str]) -> Called:
        LOG.clear()
        tools = box(ask={"agent": HELPER, "retry": {"attempts": 2, "errors": errors}})
        return made(tools, a_call("ask", task="x"), run_agent=run_agent)

    assert (ask(["EngineError"]).result, ask(["ValueError"]).failure) == ("ok", "failed:EngineError")


def test_an_agents_end_is_awaited_however_long_it_takes():
    """Its trajectory must be recorded: it is not left behind as a tool would be."""

    async def run_agent(agent: graph.AgentGraph, call: AgentCall) -> AgentAnswer:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(60)
            LOG.append("recorded")
        return AgentAnswer("")

    result = made(box(ask={"agent": HELPER, "timeout": 1}), a_call("ask", task="x"), run_agent=run_agent)
    assert (result.failure, result.seconds, LOG) == ("timed_out", 61.0, ["recorded"])


# All of it together.


@given(
    st.lists(
        st.sampled_from(
            [
                a_call("add", left=1, right=2),
                a_call("add", left="x"),
                a_call("nothing"),
                BROKEN,
                a_call("fail", kind="odd"),
                a_call("fail", kind="cancelled"),
                a_call("sleep", seconds=1),
                a_call("sleep", seconds=9),
                a_call("sandbox"),
                a_call("bad", by=2),
            ]
        ),
        max_size=8,
    ),
    st.none() | st.floats(0, 4),
)
def test_every_call_has_a_result_and_every_instance_its_release(
    attempts: list[ToolCall | MalformedCall], stop_at: float | None
):
    LOG.clear()
    slot = {"timeout": 2, "concurrency": 2}
    tools = box(
        add={"use": "async_add", **slot},
        fail={"use": "async_fail", **slot},
        sleep={"use": "sleep", **slot},
        sandbox={"use": "Sandbox", **slot},
        bad={"use": "BadRelease", **slot},
    )

    async def settled(calls: list[Awaitable[Called]]) -> list[Called | BaseException]:
        return await asyncio.gather(*calls, return_exceptions=True)

    async def main() -> None:
        session = opened(tools, tools_kwargs={"sandbox": {"slow": 1}})
        calls = [
            asyncio.create_task(session.call(type(a)(**{**_fields(a), "id": f"c{i}"}))) for i, a in enumerate(attempts)
        ]
        if stop_at is not None:
            await asyncio.sleep(stop_at)
            for call in calls:
                call.cancel()
        allowed = Called if stop_at is None else (Called, asyncio.CancelledError)
        assert all(isinstance(result, allowed) for result in await settled(calls))
        await session.release()

    run_virtual(main())
    assert LOG.count("created") == LOG.count("release")


def _fields(attempt: ToolCall | MalformedCall) -> dict[str, Any]:
    return {name: getattr(attempt, name) for name in attempt.__struct_fields__}


def test_a_call_looks_no_further_than_its_own_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {f"tool_{number}": graph.ToolSpec(use="fsm_rollout.tools.calculator:calculate") for number in range(30)}
    box = Toolbox(graph.AgentGraph(agent="a", tools=specs, states={"PENDING": {}}, transitions=()))
    assert box.tools_of("main") is box.tools_of("main")
    assert box.check(None) == {}
    monkeypatch.setattr(FunctionTool, "check", lambda *_: pytest.fail("every tool was checked again"))
    assert (box.check(None), box.check({})) == ({}, {})
