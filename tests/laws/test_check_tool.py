"""The tool check passes all tools there are, and names the fault of broken ones."""

from __future__ import annotations

import asyncio
import itertools
import queue
import random
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import strategies as st
from pydantic import AfterValidator, BeforeValidator, Field

from fsm_rollout import load_agent
from fsm_rollout.agent.graph import ToolSpec
from fsm_rollout.testing import ConformanceError, check_tool
from fsm_rollout.testing.simulation import blocked_loop
from fsm_rollout.tools import BadArguments, Hidden, Tool, ToolContext, ToolResult
from fsm_rollout.trajectory.pictures import picture_of
from tests.kit import ROOT

AGENTS = ROOT / "configs/agents"
SHIPPED = {
    f"{path.stem}.{name}": tool
    for path in sorted(AGENTS.glob("*.yaml"))
    for name, tool in load_agent(path).tools.items()
}
PICTURE = picture_of(np.random.default_rng(0).integers(0, 255, (128, 128), np.uint8)).data_uri()
CELL = st.integers(1, 4)
# What a tool needs beside its schema: `zoom` crops a prompt's picture, and refuses other numbers by itself.
KNOWN = {
    "look.zoom": {
        "tools_kwargs": {"picture": PICTURE},
        "arguments": st.fixed_dictionaries({"row": CELL, "column": CELL}),
    }
}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_tool_in_the_configs_conforms(name: str) -> None:
    checked = check_tool(SHIPPED[name], examples=10, **KNOWN.get(name, {}))
    assert "same seed" in checked.promises
    assert checked.examples > 20


def test_the_laws_tools_conform() -> None:
    check_tool(
        "tests.law_tools:echo", arguments=st.fixed_dictionaries({"text": st.text("ab", max_size=4)}), examples=20
    )


@dataclass
class Place:
    city: str
    zip: int | None = None


class Search(Tool):
    """Searches an index, which it opens for each trajectory."""

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit

    async def create(self, index: str) -> None:
        await asyncio.sleep(1.0)
        self.index = index

    async def execute(
        self,
        query: Annotated[str, Field(min_length=1)],
        near: Place | None = None,
        kind: Literal["web", "news"] = "web",
        weights: Annotated[list[float], Field(max_length=2)] | None = None,
        *,
        context: ToolContext,
    ) -> ToolResult:
        """Search.

        Args:
            query: What for.
            near: Where.
            kind: In what.
            weights: How much.
        """
        await asyncio.sleep(0.5)
        await asyncio.sleep(0.5)
        return ToolResult(f"{self.index}: {query}/{near}/{kind}/{weights}/{context.rng.random()}", reward=0.5)

    async def release(self) -> None:
        await asyncio.sleep(2.0)


async def computes(expression: Literal["2 + 2", "37 + 58"]) -> str:
    """Compute it in another process, whose time is real."""
    process = await asyncio.create_subprocess_exec("expr", *expression.split(), stdout=subprocess.PIPE)
    try:
        async with asyncio.timeout(20.0):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode()


async def asks_a_shell(number: Annotated[int, Field(ge=0, le=99)]) -> str:
    """Compute it in a shell, a line at a time."""
    process = await asyncio.create_subprocess_shell(
        "while read line; do expr $line + 1; done", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{number}\n".encode())
        line = await process.stdout.readline()
    finally:
        process.stdin.close()
        await process.wait()
    return line.decode()


async def draws_by_its_schema(
    price: Annotated[int, Field(ge=0, multiple_of=5)],
    ratio: Annotated[float, Field(gt=0, lt=1, multiple_of=0.25)],
    code: Annotated[str, Field(pattern="^[a-z]+$")],
    word: Annotated[str, Field(pattern="^[a-z]*$", max_length=3)] = "",
) -> str:
    """Take what follows the schema."""
    return f"{price} {ratio} {code} {word}"


def blames_some_calls(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather."""
    if city == "Rome":
        raise BadArguments("nothing is known of Rome")
    return "rain"


async def takes_its_time(a: int) -> int:
    """Take longer than a cancelled call may: nobody cancels this one."""
    await asyncio.sleep(50.0)
    return a


@pytest.mark.parametrize("tool", [computes, asks_a_shell, draws_by_its_schema, blames_some_calls, takes_its_time])
def test_what_has_raised_false_alarms_conforms(tool: Any) -> None:
    assert ("cancellation" in check_tool(tool, examples=30).promises) == asyncio.iscoroutinefunction(tool)


def in_a_thread(path: str, *, depth: int = 1, token: Annotated[str, Hidden] = "t") -> dict[str, Any]:
    """List a folder."""
    return {"path": path, "depth": depth, "token": token}


def test_tools_of_every_kind_conform() -> None:
    assert "cancellation" in check_tool(Search, tools_kwargs={"index": "wiki"}, examples=20).promises
    assert "same seed" in check_tool(Notes, examples=10).promises
    assert "cancellation" not in check_tool(in_a_thread, kwargs={"token": "secret"}, examples=20).promises


async def undocumented(a: int) -> int:
    return a


async def untyped(a) -> int:  # type: ignore[no-untyped-def]
    """Take anything."""
    return 1


def _even(value: int) -> int:
    if value % 2:
        raise ValueError("must be even")
    return value


async def picky(number: Annotated[int, AfterValidator(_even)]) -> int:
    """Take even numbers, and do not say so."""
    return number


async def always_raises(a: int) -> int:
    """Fail."""
    raise ConnectionError("no route")


async def takes_anything(a: Annotated[int, BeforeValidator(lambda value: 0)]) -> int:
    """Read whatever comes as 0."""
    return a


async def returns_an_object(a: int) -> object:
    """Return what no model can read."""
    return object()


def prints(city: str) -> None:
    """Print the weather.

    Args:
        city: Where.
    """
    print(f"It rains in {city}.")


async def hangs(a: int) -> int:
    """Wait for nothing."""
    await asyncio.Event().wait()
    return a


async def spins(a: int) -> int:
    """Look again and again, without ever waiting."""
    while a is not None:  # noqa: ASYNC110  # that is the fault
        await asyncio.sleep(0)
    return a


async def swallows(a: int) -> int:
    """Go on whatever happens."""
    await asyncio.sleep(0.1)
    try:
        await asyncio.sleep(1.0)
    except asyncio.CancelledError:
        return 0
    return a


async def never_stops(a: int) -> int:
    """Wait a minute, come what may."""
    for _ in range(30):
        try:
            await asyncio.sleep(1.0)
        except asyncio.CancelledError:
            await asyncio.sleep(7.0)
    return a


async def sleeps(a: int) -> int:
    """Stop the loop."""
    time.sleep(5)  # noqa: ASYNC251
    return a


async def leaves_a_task(a: int) -> int:
    """Start what nobody awaits."""
    kept.append(asyncio.create_task(asyncio.sleep(1e6), name="heartbeat"))
    return a


kept: list[Any] = []
numbers = itertools.count()


async def dices(a: int) -> float:
    """Roll."""
    return random.random()


async def counts(a: int) -> int:
    """Count."""
    return next(numbers)


SEEN: set[str] = set()


async def memoises(query: Literal["a", "b"]) -> str:
    """Remember what was asked, for all time."""
    hit = query in SEEN
    SEEN.add(query)
    return "hit" if hit else "miss"


CALLED: list[int] = []


async def tires() -> str:
    """Work once, without any argument."""
    CALLED.append(1)
    return "done" if len(CALLED) == 1 else "tired"


SPENT: set[str] = set()


async def works_once(query: str) -> object:
    """Return what no model can read, and never again."""
    if SPENT:
        return "fine"
    SPENT.add(query)
    return object()


async def runs_a_command(a: int) -> int:
    """Wait for a process, in the loop's own thread."""
    return subprocess.run(["true"], check=False).returncode + a  # noqa: ASYNC221


async def waits_for_a_process(a: int) -> int:
    """Wait for a process by hand."""
    with subprocess.Popen(["true"]) as process:  # noqa: ASYNC220
        return process.wait() + a


async def asks_the_terminal(a: int) -> str:
    """Ask whoever sits there."""
    return input("Well? ")  # noqa: ASYNC250


class Notes:
    """Keeps notes for the trajectory, and not two of them at once."""

    def __init__(self) -> None:
        self.busy = False

    async def execute(self, note: str) -> str:
        """Write down."""
        was, self.busy = self.busy, True
        await asyncio.sleep(0.1)
        self.busy = False
        return "busy" if was else "written"


AT_ONCE = ToolSpec(use="tests.laws.test_check_tool:Notes", order="any")


async def marks(a: int, context: ToolContext) -> int:
    """Leave a mark."""
    context.extra["seen"].append(a)
    return a


async def reads_the_clock(a: int) -> str:
    """Say what time it is."""
    return f"{asyncio.get_running_loop().time():g}"


async def fails_unheard(a: int) -> int:
    """Start what fails later."""

    async def fail() -> None:
        raise ConnectionError("no route")

    kept.append(asyncio.create_task(fail()).get_name())
    return a


class LosesItsFile:
    """Is released before it has opened anything, when its call is cancelled."""

    async def execute(self, a: int) -> int:
        """Open a file, in a while."""
        await asyncio.sleep(1.0)
        self.file = "open"
        return a

    async def release(self) -> None:
        del self.file


class FailsToLetGo:
    """Is not there any more when it is released."""

    async def execute(self, a: int) -> int:
        """Go away."""
        return a

    async def release(self) -> None:
        raise ConnectionError("already gone")


async def locks(a: int) -> int:
    """Wait for itself."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
    return a


async def waits_for_a_queue(a: int) -> int:
    """Wait a moment for what nobody puts there, within Python's own code."""
    with suppress(queue.Empty):
        queue.Queue[int]().get(timeout=0.6)
    return a


async def enters_a_lock(a: int) -> int:
    """Wait until a thread is done with it."""
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(0.6, lock.release).start()
    with lock:
        return a


async def hears_nothing(a: int) -> int:
    """Wait a moment for the other side."""
    here, there = socket.socketpair()
    with here, there, suppress(TimeoutError):
        here.settimeout(0.6)
        here.recv(1)
    return a


async def computes_for_ever(a: int) -> int:
    """Count, without end."""
    while True:
        a += 1


@pytest.mark.parametrize(
    ("tool", "promise", "message"),
    [
        (undocumented, 1, "no docstring"),
        (untyped, 1, "has no type"),
        ("no_such_module:tool", 1, "cannot import"),
        (picky, 2, "refused what its schema allows: error: tool: argument 'number' must be even"),
        (always_raises, 2, r"raised on all \d+ calls .*ConnectionError: no route"),
        (takes_anything, 3, "took {'a': 'no number'}, though 'a' is of another type"),
        (returns_an_object, 4, "cannot be shown to a model"),
        (prints, 4, r"prints returned None; did you mean to return what it prints\?"),
        (hangs, 4, r"did not return within 60 s; .*time is virtual.*external\(\)"),
        (spins, 4, "a call of spins never ends: .*time never passes"),
        (swallows, 5, "cancelled at its await number 2 .*swallowed it"),
        (never_stops, 5, "did not stop within 5 s"),
        (sleeps, 6, r"blocks the event loop with time.sleep\(5\)"),
        (runs_a_command, 6, r"blocks the event loop with a subprocess \(\['true'\], communicate\)"),
        (waits_for_a_process, 6, r"blocks the event loop with a subprocess \(\['true'\], wait\)"),
        (asks_the_terminal, 6, r"blocks the event loop with input\(\)"),
        (locks, 6, r"blocks the event loop in 'lock\.acquire\(\)', at .*test_check_tool\.py:\d+, in locks"),
        (waits_for_a_queue, 6, r"in 'queue\.Queue\[int\]\(\)\.get\(timeout=0\.6\)', at .*, in waits_for_a_queue"),
        (enters_a_lock, 6, r"blocks the event loop in 'with lock:', at .*test_check_tool\.py:\d+, in enters_a_lock"),
        (hears_nothing, 6, r"in 'here\.recv\(1\)', at .*test_check_tool\.py:\d+, in hears_nothing"),
        (computes_for_ever, 6, r"keeps the event loop for more than 0\.5 s, at .*, in computes_for_ever"),
        (leaves_a_task, 7, r"heartbeat: sleep \(started at .*test_check_tool\.py:\d+, in leaves_a_task\)"),
        (dices, 8, "take randomness from ToolContext.rng"),
        (counts, 8, "and later"),
        (memoises, 8, r"memoises\({'query': 'a'}\) gave 'miss', and later 'hit'"),
        (tires, 8, r"tires\({}\) gave 'done', and later 'tired'"),
        (
            works_once,
            4,
            "cannot be shown to a model(?s:.*) not when the same case ran again: something is kept between runs",
        ),
        (AT_ONCE, 8, "made at once 'busy'.* what lasts between calls in `self` alone; .* or leave out `order: any`"),
        (reads_the_clock, 8, r"gave '0', and the second time '1024'"),
        (fails_unheard, 7, "what fails_unheard started failed, and nobody heard: .*ConnectionError: no route"),
        (LosesItsFile, 10, "release raised AttributeError: .*, after a call that was cancelled at its await number 1"),
        (marks, 9, r"changed the prompt's fields {'seen': \[\]}"),
        (FailsToLetGo, 10, "release raised ConnectionError"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_tool_is_found(tool: Any, promise: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kept_by_tools in (SEEN, CALLED, SPENT):
        kept_by_tools.clear()
    monkeypatch.setattr(blocked_loop, "BLOCKING_SECONDS", 0.5)
    with pytest.raises(ConformanceError, match=message) as found:
        check_tool(tool, extra={"seen": []}, examples=20)
    assert found.value.invariant == promise


def test_a_tool_that_does_not_claim_to_be_deterministic_is_not_held_to_it() -> None:
    assert "same seed" not in check_tool(dices, deterministic=False, examples=10).promises


async def leaves_it_to_threads(a: int) -> int:
    """Wait in threads, one of them its own, for longer than the loop may."""
    lock = threading.Lock()
    lock.acquire()
    await asyncio.to_thread(lock.acquire, timeout=0.4)
    with lock_of_all:
        return a


lock_of_all = threading.Lock()


def test_waiting_in_a_thread_is_no_fault() -> None:
    check_tool(leaves_it_to_threads, deterministic=False, examples=1)


def test_what_is_patched_for_a_check_is_as_before_afterwards() -> None:
    before = time.sleep, subprocess.Popen.wait, subprocess.Popen.communicate
    check_tool(draws_by_its_schema, examples=2)
    assert (time.sleep, subprocess.Popen.wait, subprocess.Popen.communicate) == before
