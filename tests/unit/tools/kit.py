"""Tools by what they do, and boxes of them: they are loaded by name, as any user's tools are."""

import asyncio
import contextvars
import dataclasses
import threading
from collections.abc import Callable
from typing import Annotated, Any

from fsm_rollout.agent import graph
from fsm_rollout.errors import BadArguments
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.tools import AgentAnswer, AgentCall, Hidden, Tool, Toolbox, ToolContext, ToolResult, ToolSession
from fsm_rollout.trajectory.events import Called, MalformedCall, ToolCall

LOG: list[Any] = []


GATE = threading.Event()


ENTERED = threading.Event()


WHO: contextvars.ContextVar[str] = contextvars.ContextVar("WHO", default="nobody")


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


BROKEN = MalformedCall(id="c1", kind="unclosed", message="the call has no end")


class Heavy:
    """Its own code makes it plain data, and notes where it ran."""

    ran_in: threading.Thread

    def tolist(self) -> list[int]:
        Heavy.ran_in = threading.current_thread()
        return [1, 2]


class Plain:
    """Has only what is needed."""

    def execute(self) -> str:
        return "plain"


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


def _fields(attempt: ToolCall | MalformedCall) -> dict[str, Any]:
    return {name: getattr(attempt, name) for name in attempt.__struct_fields__}
