"""Tools of real MCP servers, over stdio and HTTP: found, shown, called, timed, started again."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

import fsm_rollout as fr
from fsm_rollout.agent.graph import MCP, ToolSpec
from fsm_rollout.agent.loader import dump, loads
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.errors import ConfigError, ToolError
from fsm_rollout.tools import Toolbox, ToolSession
from fsm_rollout.trajectory.events import AnyEvent, Called, Ended, Restored, ToolCall
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import FILES, cases
from tests.kit import closed_port
from tests.vision import gemma3_with_tools

pytestmark = pytest.mark.process
SERVER = Path(__file__).with_name("mcp_tools.py")
STDIO = MCP(command=("python", str(SERVER)), env={"TOKEN": "$FILES_TOKEN"})
"""One object, so that the server is asked for its tools once."""
SHARED = MCP(command=STDIO.command, session="shared")
PATIENCE = 600

AGENT = FILES["calls tools"].replace("TOOLS", "tools: {files: {mcp: MCP, allow: [add, count], timeout: 600}}", 1)


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.setenv("FILES_TOKEN", "for the server")


def toolbox(**tool: Any) -> Toolbox:
    agent = loads(AGENT.replace("MCP", "{command: [python]}"))
    return Toolbox(agent.model_copy(update={"tools": {"files": ToolSpec.model_validate(tool)}}))


@asynccontextmanager
async def session(box: Toolbox, name: str = "t") -> AsyncIterator[Callable[..., Any]]:
    """Give a trajectory's way to make calls."""
    opened = ToolSession(
        toolbox=box, trajectory_id=name, group_id="g", seed=0, tools_kwargs={}, extra={}, run_agent=no_agent
    )

    async def call(tool: str, /, **arguments: Any) -> Called:
        async with asyncio.timeout(PATIENCE):
            eyes = {"eye": eye(), "tokenizer": eye().tokenizer} if tool == "draw" else {}
            return await opened.call(ToolCall(id="c", name=tool, arguments=arguments), **eyes)

    try:
        yield call
    finally:
        assert await opened.release() == []


@cache
def eye() -> ChatTemplate:
    """Return what a model sees through."""
    processor = gemma3_with_tools()
    return ChatTemplate(processor.tokenizer, chat_template=processor.chat_template, processor=processor)


async def no_agent(*_: Any) -> Any:
    raise AssertionError


class HTTPServer:
    """The server as a process of its own, on a port that it gets again."""

    def __init__(self) -> None:
        self.port = closed_port()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), str(self.port)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        while True:
            assert self.process.poll() is None
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def http() -> Iterator[HTTPServer]:
    server = HTTPServer()
    yield server
    server.stop()


async def test_a_server_shows_pictures() -> None:
    box = toolbox(mcp=STDIO, timeout=PATIENCE)
    async with session(box) as call:
        called = await call("draw")
    await box.close()
    *_, drawn = called.shown
    assert (called.failure, called.result, len(called.shown)) == (None, "Red:\na square.", 3)
    assert drawn["image"].image().getpixel((0, 0)) == (255, 0, 0)
    assert (drawn["image"].width, drawn["image"].height) == (30, 20)


async def test_what_the_server_declares_is_shown_and_checked_and_it_sees_no_secret_but_what_it_is_given() -> None:
    box = toolbox(mcp=STDIO, allow=["add", "read", "environment"], timeout=PATIENCE)
    add, read, _ = (schema["function"] for schema in box.schemas("main"))
    assert (add["name"], add["description"], read["name"]) == ("add", "Add two numbers.", "read")
    assert add["parameters"] == {
        "type": "object",
        "properties": {"left": {"type": "integer"}, "right": {"type": "integer", "default": 1}},
        "required": ["left"],
    }

    async with session(box) as call:
        assert (await call("add", left=2)).result == "3"
        wrong = await call("add", left="x")
        assert wrong.bad
        assert wrong.result == (
            "error: add: argument 'left': 'x' is not of type 'integer'; correct the arguments and try again"
        )
        missing = await call("add", lefft=1)
        assert "argument 'lefft' is not a parameter; did you mean 'left'?" in missing.result
        failed = await call("read", path="/x")
        assert (failed.failure, failed.bad) == ("tool_error", False)
        assert "there is no file /x; try again, or go on without it" in failed.result
        assert (await call("count")).failure == "unknown_tool"
        names = (await call("environment")).result
        assert "TOKEN" in names
        assert "PATH" in names
        assert "API_KEY" not in names


@cases(
    "integration",
    ({"mcp": STDIO, "allow": ["ad"]}, "allow: the server has no tool 'ad'; did you mean 'add'?"),
    ({"mcp": STDIO, "retry": {"attempts": 2}}, "say `repeatable: true` if it may be"),
    ({"use": "os:getcwd", "mcp": STDIO}, "give either `use`"),
)
def test_a_server_that_cannot_be_used_says_why(tool: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolError, match=message):
        toolbox(**tool)


def test_check_asks_no_server_and_a_wrong_form_is_told_with_its_line() -> None:
    agent = loads(AGENT.replace("MCP", "{command: [no-such-server]}"))
    assert loads(dump(agent)) == agent
    with pytest.raises(ConfigError, match=r"<text>:2: .*give either `command` \(a list of words\) or `url`"):
        loads(AGENT.replace("MCP", "{}"))
    with pytest.raises(ConfigError, match="tool 'ad' is not defined; did you mean 'add'"):
        loads(AGENT.replace("MCP", "{command: [x]}").replace("has_tool_calls", "{tool_called: ad}"))


@pytest.mark.parametrize("shared", [False, True])
async def test_sessions_are_a_trajectorys_own_or_shared_and_no_process_stays(
    shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(psutil.Process().children(recursive=True))
    box = toolbox(mcp=SHARED if shared else STDIO, timeout=PATIENCE)
    async with session(box, "a") as first, session(box, "b") as second:
        answers = [(await call("count")).result.split() for call in (first, second, first)]
        assert [number for _, number in answers] == (["1", "2", "3"] if shared else ["1", "1", "2"])
        assert len({process for process, _ in answers}) == (1 if shared else 2)
        # A session of a trajectory's own has its state: what it is asked in one turn, it does in that order.
        holders = {tool.holder for tool in box.tools_of("main").values()}
        assert len(holders) == 1
        assert (holders == {None}) is shared
    await box.close()
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not caplog.records


async def test_a_call_has_its_time_and_the_session_goes_on() -> None:
    box = toolbox(mcp=STDIO, timeout=PATIENCE, order="any")
    soon = toolbox(mcp=STDIO, timeout=0.2)

    async with session(box) as call:
        before = (await call("count")).result.split()[0]
        async with asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(call("hang", seconds=1e6))
            assert (await call("count")).result == f"{before} 2"  # the other call holds up nobody
            slow.cancel()
        assert (await call("count")).result == f"{before} 3"
    async with session(soon) as call:
        while (late := await call("hang", seconds=1e6)).failure != "timed_out":
            pass
        assert late.result.startswith("error: hang did not answer and was stopped after 0.2 s")


@pytest.mark.real
async def test_a_server_that_dies_fails_the_call_and_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    box = toolbox(mcp=STDIO, timeout=PATIENCE)
    async with session(box) as call:
        first = (await call("count")).result.split()[0]
        died = await call("die")
        assert (died.failure, died.bad, died.tries) == ("ToolDied", False, 1)
        second = (await call("count")).result.split()
        assert second[0] != first
        assert second[1] == "1"
        # One that dies while nothing is asked costs no call.
        psutil.Process(int(second[0])).kill()
        third = await call("count")
        while third.failure == "ToolDied":  # its death was not known yet
            third = await call("count")
        assert third.failure is None
        assert third.result.split()[0] != second[0]
    assert "the server has ended; it is started or connected to again" in caplog.text


@pytest.mark.real
async def test_a_server_over_http_that_is_restarted_is_connected_to_again(http: HTTPServer) -> None:
    box = toolbox(mcp={"url": http.url}, timeout=PATIENCE)

    async with session(box) as call, session(box, "b") as other:
        assert (await call("add", left=2, right=5)).result == "7"
        assert (await other("add", left=2)).result == "3"
        http.stop()
        lost = await call("add", left=1)
        assert lost.failure in ("ToolDied", "ConnectionError")
        assert not lost.bad
        away = await call("add", left=1)
        assert away.failure == "Unreachable"
        assert "add is not available (Unreachable); try again later" in away.result
        http.start()
        assert (await call("add", left=1)).result == "2"


def test_a_run_calls_them_and_records_what_they_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command may name a file beside the agent's YAML."""
    (tmp_path / "beside_the_agent.py").write_text(SERVER.read_text())
    (tmp_path / "agent.yaml").write_text(AGENT.replace("MCP", "{command: [python, beside_the_agent.py]}"))
    agent = fr.load_agent(tmp_path / "agent.yaml")
    call = '<tool_call>\n{"name": "add", "arguments": {"left": 20, "right": 22}}\n</tool_call>'
    events: list[Any] = []
    engine = {"kind": "scripted", "turns": [call, "42"]}
    with fr.Rollout(agent, engine, on_event=[lambda trajectory, event: events.append(event)]) as rollout:
        batch = rollout.run(["20 + 22?"])
        assert len(batch.tensordict) == 1
        assert not rollout.agents["caller"].tools["files"].may_repeat
    assert [event.result for event in events if isinstance(event, Called)] == ["42"]
    assert os.getcwd() != str(tmp_path)


@pytest.mark.parametrize(
    ("name", "repeatable", "begun_anew"), [("add", True, False), ("add", None, True), ("count", True, True)]
)
def test_a_resumed_trajectory_never_goes_on_with_a_session_that_knows_nothing_of_it(
    name: str, repeatable: bool | None, begun_anew: bool
) -> None:
    """Its calls are made again, or it begins anew; `count` names its process, so it is not as repeatable as is said."""
    agent = loads(AGENT.replace("MCP", "{command: [python]}"))
    tool = ToolSpec(mcp=STDIO, allow=(name,), timeout=PATIENCE, repeatable=repeatable)
    agent = agent.model_copy(update={"tools": {"files": tool}})
    call = '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'
    call = call.replace("NAME", name).replace("{}", '{"left": 1}' if name == "add" else "{}")
    engine = {"kind": "scripted", "turns": [call, call, "2"]}
    log: list[AnyEvent] = []

    def ran(resume: list[list[AnyEvent]]) -> tuple[list[str], list[str]]:
        log.clear()
        seen: list[Trajectory] = []
        listeners = [lambda trajectory, event: log.append(event), lambda trajectory, event: seen.append(trajectory)]
        with fr.Rollout(agent, engine, on_event=listeners) as rollout:
            rollout.run(["How often?"], resume=resume)
        told = [str(m["content"]).split()[-1] for m in seen[-1].messages if m["role"] == "tool"]
        return told, [event.ways[name] for event in log if isinstance(event, Restored)]

    expected = ["2", "2"] if name == "add" else ["1", "2"]
    assert ran([]) == (expected, [])
    cut = next(place for place, event in enumerate(log, 1) if isinstance(event, Called))
    told, ways = ran([log[:cut]])
    assert told == expected
    assert ways == ([] if begun_anew else ["1 call made again"])
    assert any((event.detail or "").startswith("begun anew") for event in log if isinstance(event, Ended)) is begun_anew
