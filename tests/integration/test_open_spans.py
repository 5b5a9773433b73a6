"""Wherever a tool runs, it is in the span of its try: in processes, workers, sandboxes and servers, and on Ray."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases
from tests.foreign import agent
from tests.integration.test_mcp import SERVER, HTTPServer
from tests.open_spans import TracedRuns, calling

pytestmark = pytest.mark.process
HERE = "tests.open_spans"
SANDBOX = "fsm_rollout.tools.sandbox"


@pytest.mark.parametrize(
    ("tool", "workers"),
    [
        pytest.param({"use": f"{HERE}:plain", "placement": "process"}, 1, id="process"),
        pytest.param({"use": f"{HERE}:waiting", "placement": "process"}, 1, id="process, async"),
        pytest.param({"use": f"{HERE}:told", "placement": "process"}, 1, id="process, told"),
        pytest.param({"use": f"{HERE}:plain", "placement": "ray"}, 1, id="ray", marks=pytest.mark.ray("shared")),
        pytest.param({"use": f"{HERE}:Kept", "placement": "ray"}, 1, id="ray actor", marks=pytest.mark.ray("shared")),
    ],
)
def test_what_a_tool_begins_elsewhere_is_below_its_try(tool: dict[str, Any], workers: int) -> None:
    runs = TracedRuns({"here": tool | {"timeout": 600}}, calling(), calling(), "done")
    spans = runs.spans("execute_tool here", workers=workers)
    assert len(set(spans)) == 2
    assert runs.results == spans


@cases("integration")
def test_sandboxed_code_finds_it_in_its_environment(language: str, code: str) -> None:
    tools = {"here": {"use": f"{SANDBOX}:{language}", "timeout": 600, "kwargs": {"seconds": 60, "processes": 8}}}
    call = calling(code=code)
    runs = TracedRuns(tools, call, call, "done")
    spans = runs.spans("execute_tool here")
    assert len(set(spans)) == 2
    assert runs.results == spans


@pytest.mark.parametrize("how", ["own", "shared", "http"])
def test_a_server_is_told_with_each_call(how: str) -> None:
    server = HTTPServer() if how == "http" else None
    try:
        mcp: dict[str, Any] = {"command": [sys.executable, str(SERVER)]} if server is None else {"url": server.url}
        mcp |= {"session": "shared"} if how == "shared" else {}
        call = calling("trace")
        runs = TracedRuns({"files": {"mcp": mcp, "timeout": 600}}, call, call, "done")
        spans = runs.spans("execute_tool trace")
        assert len(set(spans)) == 2
        assert runs.results == spans
    finally:
        if server is not None:
            server.stop()


def test_a_foreign_program_finds_it_in_its_environment(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(
        "import os, openai\n"
        "messages = [{'role': 'user', 'content': os.environ['TRACEPARENT']}]\n"
        "openai.OpenAI().chat.completions.create(model='any', messages=messages)\n"
    )
    _in_a_visit(f"command: [python, '{program}']")


def test_a_foreign_agent_in_python_runs_in_its_visit() -> None:
    _in_a_visit(f"use: '{HERE}:foreign'")


def _in_a_visit(keys: str) -> None:
    runs = TracedRuns(agent(keys), "fine")
    (visit,) = runs.spans("EXTERNAL")
    (trajectory,) = runs.trajectories
    assert visit in [message["content"] for stream in trajectory.streams for message in stream.messages]
