"""Real foreign agents, as programs: exact rows on a real model, no secret of ours, and nothing left behind."""

import asyncio
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

import fsm_rollout as fr
from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.tools.commands import MARK
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import PROGRAMS
from tests.foreign import CALCULATOR, agent, check_exact

# One worker runs them: each looks for what any of them may have left.
pytestmark = [pytest.mark.process, pytest.mark.real, pytest.mark.xdist_group("foreign")]
TASK = "Please work out (40 + 67) - 76."


def run(graph: AgentGraph, engine: Any, prompt: Any = TASK, n: int = 1) -> list[Trajectory]:
    trajectories: list[Trajectory] = []

    async def main() -> None:
        async with fr.Rollout(graph, engine, seed=1) as rollout:
            async with asyncio.timeout(900):
                async for group in rollout.stream([prompt], n):
                    trajectories.extend(group.trajectories)

    asyncio.run(main())
    return trajectories


@pytest.fixture(autouse=True)
def own_homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of these tests have their homes here, which tells them from those of another run of tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def left_over() -> list[psutil.Process]:
    """Processes of this test's that bear the mark of a foreign agent's program."""
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            ours = MARK in environ and environ["HOME"].startswith(tempfile.gettempdir())
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def scripted(turns: Any) -> ScriptedEngine:
    return ScriptedEngine(turns, tokenizer=embedded_tokenizer(), log=True)


def program(text: str, tmp_path: Path, keys: str = "") -> AgentGraph:
    path = tmp_path / "program.py"
    path.write_text(text)
    return agent(f"command: [python, '{path}'] {keys}")


CODEX = "@openai/codex@0.169.0"
RUN_CODEX = PROGRAMS["codex, told where our server is"]


@pytest.fixture(scope="session")
def codex() -> Path:
    """The command-line agent, as npm gives it; its folder is kept for the next time."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder = Path(tempfile.gettempdir()) / f"fsm-rollout-{CODEX.replace('/', '-')}"
    program = folder / "node_modules/.bin/codex"
    if not program.exists():
        install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), CODEX]
        done = subprocess.run(install, capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"npm cannot install {CODEX}: {done.stderr[-300:]}")
    return program


@pytest.mark.parametrize("sockets", ["false", "true"])
def test_codex_carries_out_a_call_and_its_row_is_exact(sockets: str, codex: Path, tmp_path: Path) -> None:
    """Also where it may try a WebSocket first."""
    script = tmp_path / "codex.sh"
    script.write_text(RUN_CODEX.replace("PROGRAM", str(codex)).replace("SOCKETS", sockets))
    call = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo 4$((1 + 1))"}}\n</tool_call>'
    engine = scripted([f"I count. {call}", "It is 42."])
    (trajectory,) = run(agent(f"command: [sh, '{script}'], dialect: responses"), engine)
    assert trajectory.stop_reason == "answered", trajectory.detail
    check_exact([trajectory], engine)
    (stream,) = trajectory.streams
    assert [message["role"] for message in stream.messages[-3:]] == ["assistant", "tool", "assistant"]
    assert "Output:\n42\n" in str(stream.messages[-2]["content"])
    assert not left_over()


def test_a_program_sees_no_secret_and_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "secret")
    monkeypatch.setenv("FOR_IT", "given")
    text = PROGRAMS["looks at what it is given"]
    engine = scripted(["yes"])
    prompt = {"messages": [{"role": "user", "content": TASK}], "answer": "31"}
    (trajectory,) = run(program(text, tmp_path, ", env: {GIVEN: $FOR_IT}"), engine, prompt)
    assert trajectory.stop_reason == "answered", trajectory.detail
    check_exact([trajectory], engine)


@pytest.mark.parametrize("task", ["long " * 40_000, "a NUL\0 in it"])
def test_a_task_that_no_environment_holds_is_read_from_standard_input(task: str, tmp_path: Path) -> None:
    text = PROGRAMS["reads its task from standard input"].replace("LENGTH", str(len(task)))
    (trajectory,) = run(program(text, tmp_path), scripted([]), {"messages": [{"role": "user", "content": task}]})
    assert str(trajectory.detail).endswith("the end"), trajectory.detail
    assert "exit code 3" in str(trajectory.detail)
    assert len(str(trajectory.detail)) < 3000


def test_a_program_that_fails_says_what_it_wrote(tmp_path: Path) -> None:
    (trajectory,) = run(program("raise SystemExit('no such file')", tmp_path), scripted([]))
    assert trajectory.stop_reason == "failed:ProgramFailed"
    assert trajectory.detail is not None
    assert "python ended with exit code 1; it wrote: no such file" in trajectory.detail
    (missing,) = run(agent("command: [no-such-program]"), scripted([]))
    assert missing.stop_reason == "failed:ProgramFailed"
    assert "could not be started" in str(missing.detail)


FAMILY = PROGRAMS["leaves children that hide"]


@pytest.mark.parametrize("stays", [False, True])
def test_its_children_end_with_the_visit_however_they_hide(stays: bool, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(FAMILY)
    graph = agent(f"command: [python, '{path}'{', stay' if stays else ''}]")
    if stays:
        graph = graph.model_copy(
            update={"states": {"EXTERNAL": graph.states["EXTERNAL"].model_copy(update={"timeout": 3.0})}}
        )
    (trajectory,) = run(graph, scripted([]))
    assert trajectory.stop_reason == ("timed_out" if stays else "answered")
    assert not left_over()


@pytest.mark.parametrize("tools", [[], [CALCULATOR]], ids=["without tools", "with tools"])
def test_a_killed_run_goes_on_with_the_answers_that_it_had(tmp_path: Path, tools: list[Any]) -> None:
    """The visit begins again; calls that were answered before get the same answers, and nothing is sampled twice."""
    text = f"tools = {tools!r}\n" + PROGRAMS["asks three times, at another time each"]
    graph, engine = program(text, tmp_path), scripted(["first", "second", "third"])
    seen: list[Any] = []

    async def main() -> list[Trajectory]:
        def listen(trajectory: Trajectory, event: Any) -> None:
            seen.append(event)
            if type(event).__name__ == "Generated" and event.message["content"] == "second":
                asyncio.get_running_loop().call_soon(rollout.scheduler.stop, "for now")

        async with fr.Rollout(graph, engine, on_event=[listen]) as rollout:
            (group,) = [group async for group in rollout.stream(["x"])]
            (suspended,) = group.trajectories
            assert suspended.suspended == "for now"
            assert suspended.generations >= 2  # the next call may have been answered before the program was ended
            (group,) = [group async for group in rollout.stream([], resume=[suspended])]
            return group.trajectories

    (trajectory,) = asyncio.run(main())
    assert trajectory.stop_reason == "answered", trajectory.detail
    check_exact([trajectory], engine)
    assert [stream.context for stream in trajectory.streams] == ["main"]
    assert (trajectory.generations, trajectory.spent["assistant_turns"]) == (3, 3)
    assert not left_over()
