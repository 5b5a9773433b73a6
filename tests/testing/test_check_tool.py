"""The tool check passes all tools there are, and names the fault of broken ones."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import strategies as st
from pydantic import AfterValidator, BeforeValidator, Field

from fsm_rollout import load_agent
from fsm_rollout.testing import ConformanceError, check_tool
from fsm_rollout.tools import Hidden, Tool, ToolContext, ToolResult

AGENTS = Path(__file__).parents[2] / "configs/agents"
SHIPPED = {
    f"{path.stem}.{name}": tool
    for path in sorted(AGENTS.glob("*.yaml"))
    for name, tool in load_agent(path).tools.items()
}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_tool_in_the_configs_conforms(name: str) -> None:
    checked = check_tool(SHIPPED[name], examples=20)
    assert "same seed" in checked.promises
    assert checked.examples > 40


def test_the_laws_tools_conform() -> None:
    check_tool("law_tools:echo", arguments=st.fixed_dictionaries({"text": st.text("ab", max_size=4)}), examples=20)


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


def in_a_thread(path: str, *, depth: int = 1, token: Annotated[str, Hidden] = "t") -> dict[str, Any]:
    """List a folder."""
    return {"path": path, "depth": depth, "token": token}


def test_tools_of_every_kind_conform() -> None:
    assert "cancellation" in check_tool(Search, tools_kwargs={"index": "wiki"}, examples=20).promises
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


async def hangs(a: int) -> int:
    """Wait for nothing."""
    await asyncio.Event().wait()
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


class Notes:
    """Keeps notes for the trajectory."""

    def __init__(self) -> None:
        self.busy = False

    async def execute(self, note: str) -> str:
        """Write down."""
        was, self.busy = self.busy, True
        await asyncio.sleep(0.1)
        self.busy = False
        return "busy" if was else "written"


async def marks(a: int, context: ToolContext) -> int:
    """Leave a mark."""
    context.extra["seen"].append(a)
    return a


class FailsToLetGo:
    """Is not there any more when it is released."""

    async def execute(self, a: int) -> int:
        """Go away."""
        return a

    async def release(self) -> None:
        raise ConnectionError("already gone")


@pytest.mark.parametrize(
    ("tool", "invariant", "message"),
    [
        (undocumented, 1, "no docstring"),
        (untyped, 1, "has no type"),
        ("no_such_module:tool", 1, "cannot import"),
        (picky, 2, "refused what its schema allows: error: tool: argument 'number' must be even"),
        (always_raises, 2, r"raised on all \d+ calls .*ConnectionError: no route"),
        (takes_anything, 3, "took {'a': 'no number'}, though 'a' is of another type"),
        (returns_an_object, 4, "cannot be told to a model"),
        (hangs, 4, "did not return within 60 s"),
        (swallows, 5, "cancelled at its await number 2 .*swallowed it"),
        (never_stops, 5, "did not stop within 5 s"),
        (sleeps, 6, r"blocks the event loop with time.sleep\(5\)"),
        (leaves_a_task, 7, "heartbeat"),
        (dices, 8, "take randomness from ToolContext.rng"),
        (counts, 8, "the second time"),
        (Notes, 8, "made at once 'busy'"),
        (marks, 9, r"changed the prompt's fields {'seen': \[\]}"),
        (FailsToLetGo, 10, "release raised ConnectionError"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_tool_is_found(tool: Any, invariant: int, message: str) -> None:
    with pytest.raises(ConformanceError, match=message) as found:
        check_tool(tool, extra={"seen": []}, examples=20)
    assert found.value.invariant == invariant


def test_a_tool_that_does_not_claim_to_be_deterministic_is_not_held_to_it() -> None:
    assert "same seed" not in check_tool(dices, deterministic=False, examples=10).promises
