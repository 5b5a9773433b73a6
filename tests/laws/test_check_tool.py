"""The tool check passes all tools there are, and names the fault of broken ones."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import strategies as st
from pydantic import Field

from fsm_rollout import load_agent
from fsm_rollout.agent.graph import ToolSpec
from fsm_rollout.testing import ConformanceError, check_tool
from fsm_rollout.testing.simulation import blocked_loop
from fsm_rollout.tools import BadArguments, Hidden, Tool, ToolContext, ToolResult
from fsm_rollout.trajectory.pictures import picture_of
from tests.cases import mistakes, written
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


@pytest.mark.parametrize(
    ("tool", "promise", "message"),
    [
        *mistakes("broken_tools"),
        ("no_such_module:tool", 1, "cannot import"),
        (AT_ONCE, 8, "made at once 'busy'.* what lasts between calls in `self` alone; .* or leave out `order: any`"),
    ],
)
def test_a_broken_tool_is_found(
    tool: Any, promise: int, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if isinstance(tool, str) and tool.isidentifier():
        tool = written("broken_tools", tool, tmp_path)
    monkeypatch.setattr(blocked_loop, "BLOCKING_SECONDS", 0.5)
    with pytest.raises(ConformanceError, match=message) as found:
        check_tool(tool, extra={"seen": []}, examples=20)
    assert found.value.invariant == promise


def test_a_tool_that_does_not_claim_to_be_deterministic_is_not_held_to_it(tmp_path: Path) -> None:
    assert (
        "same seed"
        not in check_tool(written("broken_tools", "dices", tmp_path), deterministic=False, examples=10).promises
    )


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
