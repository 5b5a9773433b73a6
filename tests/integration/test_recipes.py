"""The recipes with programs of others: walls that let the model through alone, and whole runs as users start them."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fsm_rollout as fr
from fsm_rollout.batch.rows import rows
from fsm_rollout.cli import app
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.errors import ToolError
from fsm_rollout.jobs.run_config import ServeConfig
from fsm_rollout.serve.server import listening
from fsm_rollout.serve.service import Service
from fsm_rollout.states.bound_agent import CALLERS_TOOLS, SIDE_CALL
from fsm_rollout.states.external.handler import ForeignVisit
from fsm_rollout.tools.sandbox import enclosed
from fsm_rollout.tools.sandbox.enclosed import Command, run_enclosed, unpacked
from fsm_rollout.trajectory.journal import read
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.foreign import EngineLog
from tests.integration.test_serve import serving
from tests.kit import ROOT, script

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("foreign")]

LEAVES = "cat given; echo changed > test; ln -s given link; sleep 1000 & ls HOST; echo left > kept; "
LEAVES += "(setsid sh -c 'sleep 1000 & setsid sleep 1000 &' &)"


def test_commands_share_files_and_no_process_and_reach_one_port_alone(tmp_path: Path) -> None:
    (tmp_path / "word").write_text("of the program")
    tmp_path.chmod(0o755)

    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readline())
            writer.close()

        open_server = await asyncio.start_server(answer, "127.0.0.1")
        closed_server = await asyncio.start_server(answer, "127.0.0.1")
        (port,), (closed,) = ([one.getsockname()[1] for one in s.sockets] for s in (open_server, closed_server))
        ask = (
            "import socket, sys\n"
            f"s = socket.create_connection(('127.0.0.1', {port})); s.sendall(b'hello\\n'); print(s.recv(9))\n"
            f"try: socket.create_connection(('127.0.0.1', {closed})); print('reached')\n"
            "except OSError: print('refused')\n"
        )
        first = Command(["sh", "-c", LEAVES.replace("HOST", str(ROOT))], files={"given": "seen\n", "test": "true"})
        second = Command(
            ["sh", "-c", "cat kept test /program/word; ls /proc | grep -c '^[0-9]'; echo no > /program/word; exit 3"],
            files={"test": "anew\n", "link": "a file\n"},
        )
        third = Command([getattr(sys, "_base_executable", sys.executable), "-c", ask])
        ended = await run_enclosed([first, second, third], port=port, program=tmp_path, shown=[sys.base_prefix])
        assert ended[0].output.startswith("seen\n")
        assert f"cannot access '{ROOT}'" in ended[0].output
        assert ended[1].code == 3
        assert ended[1].output.startswith("left\nanew\nof the program4\n")
        assert "cannot create /program/word" in ended[1].output
        assert ended[2].output == "b'hello\\n'\nrefused\n", ended[2].output
        for server in (open_server, closed_server):
            server.close()

    asyncio.run(main())


def test_what_cannot_start_says_so_and_what_is_written_is_bounded() -> None:
    (ended,) = asyncio.run(run_enclosed([Command(["no-such-program"])], port=1))
    assert ended.code == 127
    assert "no-such-program could not be started" in ended.output
    (flood,) = asyncio.run(run_enclosed([Command(["sh", "-c", "yes; exit 3"])], port=1, disk_mb=1))
    assert (flood.code, flood.output) == (3, "y\n" * 10_000), "the end of it, once there is no more room"
    with pytest.raises(ToolError, match="/etc/x: is not below"):
        asyncio.run(run_enclosed([Command(["true"], files={"/etc/x": ""})], port=1))


@pytest.mark.real
async def test_an_installation_that_nobody_waits_for_any_more_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C cancels who waits: pip, whose index never answers, lets go of the connection."""
    asked, gone = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        assert not await reader.read()
        gone.set()
        writer.close()

    harness = script("examples/recipes/harness.py")
    monkeypatch.setattr(harness, "HARNESSES", tmp_path)
    async with await asyncio.start_server(silent, "127.0.0.1") as index:
        port = index.sockets[0].getsockname()[1]
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        waits = asyncio.create_task(harness.installed("nobodys", ("nobodys-package",)))
        await asked.wait()
        waits.cancel()
        await gone.wait()
    assert waits.cancelled()
    assert not (tmp_path / "nobodys/installed").exists()


IN_IMAGE = ["sh", "cat", "ls"]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with little in it, whose folder for devices is a link to one of the host."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    root = tmp_path_factory.mktemp("image")
    programs = [f"/bin/{name}" for name in IN_IMAGE]
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    for path in {*programs, *re.findall(r"\s(/\S+)(?= \()", listed)}:
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path[1:])
    (root / "app").mkdir()
    (root / "app/old").write_text("of the image\n")
    (root / "dev").symlink_to("/var/tmp")
    name = "localhost/fsm-rollout-test:1"
    with subprocess.Popen(["tar", "-cC", str(root), "."], stdout=subprocess.PIPE) as packed:
        subprocess.run(["podman", "import", "-q", "-", name], stdin=packed.stdout, check=True, capture_output=True)
    yield name
    subprocess.run(["podman", "rmi", "-f", name], check=False, capture_output=True)


def test_an_image_s_files_stand_in_the_place_of_the_system_s(image: str, tmp_path: Path) -> None:
    async def main() -> tuple[Path, list[str]]:
        folder = await unpacked(image, tmp_path)
        assert await unpacked(image, tmp_path) == folder
        first = Command(
            ["/bin/sh", "-c", "cat /app/old; echo new > /app/old; echo no > /bin/ls; cat given"], files={"given": "x\n"}
        )
        second = Command(["/bin/sh", "-c", "cat /app/old /bin/ls; echo /*; echo /dev/*; cat /etc/passwd"])
        ended = await run_enclosed([first, second], port=1, image=folder)
        again = await run_enclosed([Command(["/bin/ls", "/app"])], port=1, image=folder)
        return folder, [end.output for end in (*ended, *again)]

    folder, said = asyncio.run(main())
    first, second, again = said
    assert first == "of the image\nx\n"
    assert second.startswith("new\nno\n/app /bin /dev /lib /lib64 /proc /tmp\n/dev/null /dev/random /dev/shm")
    assert second.endswith("/etc/passwd: No such file or directory\n")
    assert again == "old\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name]
    assert not Path("/var/tmp/null").exists()


def test_an_image_that_another_process_unpacks_meanwhile_is_taken_from_there(
    image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(**options: Any) -> str:
        monkeypatch.undo()
        enclosed._unpacked(image, tmp_path)
        return enclosed.mkdtemp(**options)

    monkeypatch.setattr(enclosed, "mkdtemp", overtaken)
    folder = asyncio.run(unpacked(image, tmp_path))
    assert list(tmp_path.iterdir()) == [folder], "nothing is left beside it"


def test_an_image_is_unpacked_once_for_all_event_loops_that_ask(image: str, tmp_path: Path) -> None:
    async def twice() -> list[Path]:
        return await asyncio.gather(unpacked(image, tmp_path), unpacked(image, tmp_path))

    with ThreadPoolExecutor(2) as loops:
        found = [*loops.map(asyncio.run, (twice(), twice()))]
    assert {*found[0], *found[1]} == {*tmp_path.iterdir()}
    assert len({*found[0]}) == 1


def test_an_image_that_is_not_there_says_so(tmp_path: Path) -> None:
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    with pytest.raises(ToolError, match="podman create localhost/none"):
        asyncio.run(unpacked("localhost/none", tmp_path))


RECIPES = {  # each with its rollouts' further streams, of two
    "codex": {}, "opencode": {"side_call": 2}, "mini_swe_agent": {}, "openai_agents": {}, "langgraph": {}, "shell": {},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def harnesses() -> Iterator[None]:
    """What the recipes install is kept for the next time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSM_HARNESSES", str(Path(tempfile.gettempdir(), "fsm-rollout-harnesses")))
        yield


@pytest.mark.real
@pytest.mark.parametrize(("name", "forks"), RECIPES.items())
def test_a_recipe_runs_as_it_is_and_each_agent_is_one_row(name: str, forks: dict[str, int], tmp_path: Path) -> None:
    if name in ("codex", "opencode") and shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    words = [sys.executable, "-m", "fsm_rollout", "run", str(ROOT / f"examples/{name}/run.yaml")]
    done = subprocess.run(
        [*words, f"out={tmp_path}/run", "n=1"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    if "could not be installed" in done.stdout + done.stderr:
        pytest.skip(f"npm cannot install {name}: {(done.stdout + done.stderr)[-300:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["stop_reasons"] == {"answered": 2}
    assert summary["score_mean"] == 1.0, summary
    assert summary.get("forks", {}) == forks
    first, second = fr.TrajectoryBatch.load(tmp_path / "run/batch").rows()
    assert first.context == second.context == "main"
    assert first.metrics["trained_tokens"] == second.metrics["trained_tokens"]


@pytest.mark.real
@pytest.mark.parametrize(("name", "forks"), RECIPES.items())
def test_a_served_agent_hands_a_program_its_calls_and_is_one_row(
    name: str, forks: dict[str, int], tmp_path: Path
) -> None:
    """Each of the programs as its recipe starts it, but that the model is where `fsm-rollout serve` is."""
    if name in ("codex", "opencode") and shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    run, options = ROOT / f"examples/{name}/serve.yaml", ["serve.keep=false"]
    if not run.exists():
        said = (ROOT / f"examples/{name}/script.yaml").read_text()
        (tmp_path / "script.yaml").write_text(said.replace(f"{name}/main:", "coder/main:"))
        run, options = ROOT / "examples/codex/serve.yaml", [*options, f"engine.script={tmp_path / 'script.yaml'}"]
    task = json.loads((ROOT / "examples/recipes/tasks.jsonl").read_text().splitlines()[0])
    says, program = task["messages"][0]["content"], getattr(script("examples/recipes/harness.py"), name)
    with serving(tmp_path, *options, run=run) as url:
        visit = ForeignVisit(f"{url}/v1", "none", "coder", says, task["messages"], task)
        try:
            assert asyncio.run(program(visit)) == 1.0
        except ToolError as error:
            if "could not be installed" in str(error):
                pytest.skip(str(error)[-300:])
            raise
    trajectories = list(read(tmp_path / "chat-serve/journal.sqlite"))
    work = [trajectory for trajectory in trajectories if CALLERS_TOOLS in trajectory.extra]
    assert len(trajectories) == 1 + bool(forks)
    (trajectory,) = work or trajectories
    assert (len(trajectory.streams), trajectory.generations) == (1, 3)
    assert [t.trained_tokens for t in trajectories if t is not trajectory] == [0] * len(forks)
    answers = "tool" if work else "user"
    assert [message["role"] for message in trajectory.messages][-5:] == ["assistant", answers] * 2 + ["assistant"]
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "chat-serve")])
    assert f"{len(trajectories)} trajectories replayed, 0 of them differ" in done.output


@pytest.mark.real
@pytest.mark.sglang
def test_on_the_real_sglang_each_row_is_what_it_sampled(tmp_path: Path) -> None:
    """Whatever the model says: it is too small for such prompts, so mini-swe-agent has it try three times, and leaves
    out of its history what called no tool."""
    script("examples/recipes/long_model.py").write(long := tmp_path / "long")
    names, task = ["mini_swe_agent", "openai_agents", "langgraph", "shell"], ROOT / "examples/recipes/tasks.jsonl"
    prompt = json.loads(task.read_text().splitlines()[0]) | {"sampling": {"max_tokens": 16}}
    agents = {name: fr.load_agent(ROOT / f"examples/recipes/{name}.yaml") for name in names}
    engine = SGLangEngine(str(long), threads=1, args={"max_total_tokens": 65_536})
    log, trajectories = EngineLog(engine), dict[str, Trajectory]()

    async def main() -> None:
        async with fr.Rollout(agents, engine) as rollout:
            async for group in rollout.stream([prompt | {"agent": name} for name in names]):
                (trajectory,) = group.trajectories
                trajectories[trajectory.agent] = trajectory
        await engine.aclose()

    asyncio.run(main())
    assert [stream.why for stream in trajectories["mini_swe_agent"].streams] == ["", "rewritten", "rewritten"]
    for name in names[1:]:
        log.check_one_row(trajectories[name], 1)
    assert script("examples/recipes/table.py").kl(rows(trajectories.values()), long) < 1e-9


@pytest.mark.real
@pytest.mark.sglang
def test_what_is_served_to_programs_is_what_the_real_sglang_sampled(tmp_path: Path) -> None:
    """Whatever the model says to such long prompts: opencode takes it for the answer, and so does Codex if the model
    ends it itself; of the others, which are most, it says that they are cut."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    script("examples/recipes/long_model.py").write(long := tmp_path / "long")
    agent, tasks = ROOT / "examples/recipes/coder.yaml", (ROOT / "examples/recipes/tasks.jsonl").read_text()
    prompt, harness = json.loads(tasks.splitlines()[0]), script("examples/recipes/harness.py")
    engine = SGLangEngine(str(long), threads=1, args={"max_total_tokens": 65_536})
    log, said = EngineLog(engine), ""

    async def main() -> None:
        nonlocal said
        async with fr.Rollout(agent, engine, sampling={"max_tokens": 16}) as rollout:
            with fr.Journal(tmp_path / "journal.sqlite", rollout.description) as rollout.journal:
                async with listening(Service(rollout, ServeConfig(port=0, keep=False), 4)) as (url, _):
                    text = prompt["messages"][0]["content"]
                    visit = ForeignVisit(f"{url}/v1", "none", "coder", text, prompt["messages"], prompt)
                    assert await harness.opencode(visit) == 0.0
                    try:
                        assert await harness.codex(visit) == 0.0
                    except ToolError as error:
                        said = str(error)
        await engine.aclose()

    try:
        asyncio.run(main())
    except ToolError as error:
        said = str(error)
    if "could not be installed" in said:
        pytest.skip(said[-300:])
    trajectories = list(read(tmp_path / "journal.sqlite"))
    assert sum(SIDE_CALL in trajectory.extra for trajectory in trajectories) == 1, "opencode's title"
    works = [trajectory for trajectory in trajectories if CALLERS_TOOLS in trajectory.extra]
    assert len(works) == len(trajectories) - 1 >= 2
    cut = works[-1].assistant_turns[-1].finish_reason == "length"
    assert ("Incomplete response returned, reason: max_output_tokens" in said) == cut, said
    for trajectory in works:
        log.check_one_row(trajectory, 1)
    assert script("examples/recipes/table.py").kl(rows(works[:1]), long) < 1e-9
