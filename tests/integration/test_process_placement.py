"""Tools in processes of their own and on Ray: the same results, killed when their time is up."""

import asyncio
import gc
import os
import pickle
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from PIL import Image

from fsm_rollout.agent import graph
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.concurrency.child_process import ChildProcess
from fsm_rollout.errors import BadArguments, ToolError
from fsm_rollout.tools import AgentAnswer, AgentCall, Hidden, Toolbox, ToolContext, ToolResult, ToolSession, placement
from fsm_rollout.trajectory.events import Called, ToolCall
from fsm_rollout.trajectory.picture_memory import PictureMemory
from tests.cases import FILES, PROGRAMS, table
from tests.kit import ROOT
from tests.programs import program
from tests.vision import gemma3_with_tools

pytestmark = pytest.mark.process

HERE = "tests.integration.test_process_placement"


def whoami(text: str, context: ToolContext) -> ToolResult:
    """Say who runs.

    Args:
        text: Said again.
    """
    return ToolResult(f"{text} {context.trajectory_id} {os.getpid()} {context.rng.random()}", reward=0.5)


def paints(width: int) -> ToolResult:
    """Paint.

    Args:
        width: How wide.
    """
    return ToolResult(["Painted:", Image.new("RGB", (width, 20), "red")], reward=0.5)


async def shout(text: str) -> dict[str, str]:
    """Shout.

    Args:
        text: What.
    """
    await asyncio.sleep(0)
    return {"text": text.upper()}


@dataclass(frozen=True)
class Trip:
    """A way from one place to another."""

    to: str
    day: date
    stops: tuple[str, ...] = ()


class Kind(Enum):
    """How."""

    FAST = "fast"


def typed(trip: Trip, kind: Kind, key: Annotated[str, Hidden], context: ToolContext, often: int = 2) -> str:
    """Travel.

    Args:
        trip: Where to.
        kind: How.
        often: How often.
    """
    extra = dict(context.extra)
    return repr((trip, kind, key, often, extra, context.call_id, context.number, context.group_id))


class Picky(Exception):
    """Cannot be pickled and unpickled: it takes two arguments and hands on one."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def fails(kind: str) -> str:
    """Fail.

    Args:
        kind: How.
    """
    if kind == "connection":
        raise ConnectionResetError("gone")
    if kind == "arguments":
        raise BadArguments("no such city")
    if kind == "picky":
        raise Picky("one", "two")
    if kind == "exit":
        raise SystemExit(3)
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def talks() -> str:
    """Print, and run a program that prints."""
    print("printed")
    subprocess.run(["echo", "said"], check=True)
    return "done"


def hangs(path: str) -> str:
    """Start a program, write it and the process down, and never return.

    Args:
        path: Where to.
    """
    child = subprocess.Popen(["sleep", "1000"])
    Path(path).write_text(f"{os.getpid()} {child.pid}", "utf-8")
    while True:
        time.sleep(1000)


class Counter:
    """Counts: one per trajectory."""

    def __init__(self) -> None:
        self.count = 0

    def create(self, start: int = 0) -> None:
        self.count = start

    def execute(self, by: int) -> str:
        """Count on.

        Args:
            by: How far.
        """
        self.count += by
        return f"{self.count} {os.getpid()}"


async def no_agent(agent: graph.AgentGraph, call: AgentCall) -> AgentAnswer:
    raise AssertionError("no agent is called here")


def call_all(
    tool: dict[str, Any],
    /,
    *arguments: dict[str, Any],
    extra: dict[str, Any] | None = None,
    eyes: ChatTemplate | None = None,
    **kwargs: Any,
) -> list[Called]:
    agent = graph.AgentGraph(agent="a", states={}, transitions=(), tools={"tool": {"timeout": 60.0, **tool}})

    async def main() -> list[Called]:
        session = ToolSession(
            toolbox=Toolbox(agent),
            trajectory_id="t",
            group_id="g",
            seed=1,
            tools_kwargs=kwargs,
            extra=extra or {},
            run_agent=no_agent,
        )
        reads = {"eye": eyes, "tokenizer": eyes.tokenizer} if eyes is not None else {}
        results = [
            await session.call(ToolCall(id=f"c{i}", name="tool", arguments=sent), **reads)
            for i, sent in enumerate(arguments)
        ]
        await session.release()
        return results

    return asyncio.run(main())


PLACES = [pytest.param("process", id="process"), pytest.param("ray", id="ray", marks=pytest.mark.ray("shared"))]


@pytest.mark.parametrize("placement", PLACES)
def test_a_function_elsewhere_gives_what_it_gives_here(placement: str) -> None:
    (here,) = call_all({"use": f"{HERE}:whoami"}, {"text": "hi"})
    elsewhere, again = call_all({"use": f"{HERE}:whoami", "placement": placement}, *[{"text": "hi"}] * 2)
    text, pid, number = here.result.rsplit(" ", 2)
    assert pid == str(os.getpid())
    for result in (elsewhere, again):
        assert result.reward == 0.5
        assert result.result.rsplit(" ", 2)[0] == text == "hi t"
        assert result.result.rsplit(" ", 2)[1] != pid
    assert elsewhere.result.rsplit(" ", 1)[1] == number, "its randomness is that of the call, wherever it runs"
    (shouted,) = call_all({"use": f"{HERE}:shout", "placement": placement}, {"text": "hé"})
    assert shouted.result == '{"text": "HÉ"}'


@pytest.mark.parametrize("placement", PLACES)
def test_pictures_come_back_from_elsewhere(placement: str) -> None:
    processor = gemma3_with_tools()
    eyes = ChatTemplate(processor.tokenizer, chat_template=processor.chat_template, processor=processor)
    (here,) = call_all({"use": f"{HERE}:paints"}, {"width": 30}, eyes=eyes)
    elsewhere, again = call_all({"use": f"{HERE}:paints", "placement": placement}, *[{"width": 30}] * 2, eyes=eyes)
    assert here.shown == elsewhere.shown == again.shown
    assert [part.get("text", "picture") for part in here.shown] == ["Painted:", "picture"]
    assert (here.reward, elsewhere.reward, here.result, elsewhere.result) == (0.5, 0.5, "Painted:", "Painted:")


def test_a_process_sends_the_bytes_of_a_picture_once() -> None:
    request = placement.packed(placement.ToolRequest(f"{HERE}:paints", {"width": 900}, {}))
    memory = PictureMemory()
    first, second = (placement._answer(request, memory=memory) for _ in range(2))
    (data,) = [part[0] for part in msgspec.msgpack.decode(first)["shown"] if not isinstance(part, str)]
    assert len(first) - len(second) > len(data) - 8


@pytest.mark.parametrize("placement", PLACES)
def test_arguments_arrive_elsewhere_as_the_functions_own_types(placement: str) -> None:
    tool = {"use": f"{HERE}:typed", "kwargs": {"key": "from the agent"}}
    sent = {"trip": {"to": "Rome", "day": "2024-02-29", "stops": ["a", "b"]}, "kind": "fast"}, {"trip": {}, "kind": "x"}
    given: dict[str, Any] = {"extra": {"answer": [1, {"x": b"y"}]}, "tool": {"key": "from the prompt"}}
    here, elsewhere = call_all(tool, *sent, **given), call_all({**tool, "placement": placement}, *sent, **given)
    assert "Trip(to='Rome', day=datetime.date(2024, 2, 29), stops=('a', 'b'))" in here[0].result
    assert "from the prompt" in here[0].result
    assert [(r.result, r.failure, r.bad, r.tries) for r in here] == [
        (r.result, r.failure, r.bad, r.tries) for r in elsewhere
    ]
    assert here[1].bad


@pytest.mark.parametrize("placement", PLACES)
@pytest.mark.parametrize(("kind", "failure", "says"), table("integration")["what goes wrong elsewhere is told"])
def test_what_goes_wrong_elsewhere_is_told(placement: str, kind: str, failure: str, says: str) -> None:
    tool = {"use": f"{HERE}:fails", "placement": placement}
    failed, good = call_all(tool, {"kind": kind}, {"kind": "connection"})
    assert failed.failure == failure
    assert says in failed.result
    assert failed.bad == (kind == "arguments"), "only BadArguments are the model's fault"
    assert good.failure == "ConnectionResetError", "the next call has a process"
    retried = call_all(tool | {"retry": {"attempts": 2, "errors": ["ConnectionError"]}}, {"kind": "connection"})
    assert retried[0].tries == 2


class Loaded(ToolResult):
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (self.text,))


def smuggle(path: str, raw: bool) -> str:
    """Hand a pickle to whoever reads the answer: as the answer, or straight down the pipe.

    Args:
        path: The folder that the pickle makes.
        raw: Write to the pipe itself.
    """
    if not raw:
        return Loaded(path)
    block = pickle.dumps(Loaded(path))
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, struct.pack("!i", len(block)) + block)
    return "sent"


@pytest.mark.parametrize("raw", [False, True])
def test_a_pickle_that_a_tool_hands_over_runs_nowhere(raw: bool, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (result,) = call_all({"use": f"{HERE}:smuggle", "placement": "process"}, {"path": str(made), "raw": raw})
    assert not made.exists()
    assert (result.failure, result.result) == (
        ("ToolDied", "error: tool: the tool broke down; try again, or go on without it") if raw else (None, str(made))
    )
    (fine,) = call_all({"use": f"{HERE}:shout", "placement": "process"}, {"text": "a"})
    assert fine.result == '{"text": "A"}', "a worker that answers out of turn is not used again"


@pytest.mark.parametrize("placement", PLACES)
def test_a_call_whose_time_is_up_is_killed(placement: str, tmp_path: Path) -> None:
    tool = {"use": f"{HERE}:hangs", "placement": placement}
    path = tmp_path / "pid"
    for seconds in (2.0, 8.0, 32.0, 128.0):  # until a worker has begun with it in that time, on a busy machine too
        (result,) = call_all(tool | {"timeout": seconds}, {"path": str(path)})
        assert result.failure == "timed_out"
        if path.exists() and len(path.read_text("utf-8").split()) == 2:
            break
    pid, child = map(int, path.read_text("utf-8").split())
    gone(pid)
    if placement == "process":
        gone(child)  # Ray ends its worker only


def gone(pid: int) -> None:
    for _ in range(12_000):
        try:
            if Path(f"/proc/{pid}/stat").read_text("utf-8").split()[2] == "Z":
                return
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return
        threading_wait(0.05)
    raise AssertionError(f"process {pid} goes on")


def threading_wait(seconds: float) -> None:
    """Another process is waited for: nothing but time can tell."""
    threading.Event().wait(seconds)


@pytest.mark.ray("shared")
def test_a_class_on_ray_has_an_actor_for_each_trajectory() -> None:
    tool = {"use": f"{HERE}:Counter", "placement": "ray"}
    first, second = call_all(tool, {"by": 2}, {"by": 3}, tool={"start": 10})
    assert [result.result.split()[0] for result in (first, second)] == ["12", "15"]
    assert first.result.split()[1] == second.result.split()[1] != str(os.getpid())


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ({"use": f"{HERE}:Counter", "placement": "process"}, "runs functions only.*use 'ray'"),
        ({"use": f"{HERE}:shout", "repeatable": False, "retry": {"attempts": 2}}, "cannot be retried"),
    ],
)
def test_what_cannot_be_placed_or_repeated_says_so(tool: dict[str, Any], says: str) -> None:
    with pytest.raises(ToolError, match=says):
        call_all(tool)


@pytest.mark.parametrize("placement", PLACES)
def test_what_a_tool_prints_does_not_matter(placement: str) -> None:
    assert [r.result for r in call_all({"use": f"{HERE}:talks", "placement": placement}, {}, {})] == ["done"] * 2


def test_what_cannot_be_sent_is_not_the_models_fault(caplog: pytest.LogCaptureFixture) -> None:
    tool = {"use": f"{HERE}:whoami", "placement": "process"}
    (result,) = call_all(tool, {"text": "x"}, extra={"lock": threading.Lock()})
    assert (result.failure, result.bad) == ("ToolError", False)
    assert "a lock is no plain data (text, numbers, lists, mappings)" in caplog.text


@pytest.mark.parametrize("value", [threading.Lock(), Trip("Rome", date(2024, 2, 29)), {1, 2}, Kind.FAST, 2**70])
@pytest.mark.parametrize("by", ["agent", "prompt"])
def test_hidden_values_that_cannot_be_sent_are_refused_before_anything_runs(value: object, by: str) -> None:
    """A pickle would have carried them, and run whatever code they name."""
    tool = {"use": f"{HERE}:typed", "placement": "process", "kwargs": {"key": value} if by == "agent" else {"key": "k"}}
    with pytest.raises(ToolError, match=r"cannot be sent|as something else"):
        call_all(tool, **({"tool": {"key": value}} if by == "prompt" else {}))


def test_the_callers_script_is_not_run_again(tmp_path: Path) -> None:
    """A script without a main guard, as people write them."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAMS["calls a tool without a main guard"], "utf-8")
    printed = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=600, cwd=ROOT
    ).stdout
    assert printed.split("\n")[:2] == ["training", '{"text": "A"}']
    assert printed.count("training") == 1


def test_a_hanging_tool_does_not_keep_the_interpreter_from_exiting():
    done = program(PROGRAMS["has a tool that hangs"], searched=(str(ROOT),), finalized=True)
    assert (done.returncode, done.stdout) == (0, "timed_out\n"), done.stderr


def test_a_process_that_is_thrown_away_ends_and_nobody_is_warned(recwarn: pytest.WarningsRecorder) -> None:
    """A rollout that is not closed throws its workers away, and a session the processes of its tools."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = ChildProcess("fsm_rollout.tools.placement:serve", theirs.fileno())
        pid = child._process.pid
        del child
        gc.collect()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not [str(warning.message) for warning in recwarn if warning.category is ResourceWarning]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_a_caller_that_is_killed_during_a_call(how: signal.Signals, tmp_path: Path) -> None:
    """And with them what the tool has started."""
    script, pids = tmp_path / "train.py", tmp_path / "pids"
    script.write_text(PROGRAMS["is killed while its tool hangs"], "utf-8")
    words = [sys.executable, str(script), str(pids), str(int(how))]
    assert subprocess.run(words, timeout=600, cwd=ROOT).returncode == -how
    for pid in map(int, pids.read_text("utf-8").split()):
        gone(pid)


@pytest.mark.ray
@pytest.mark.real
def test_ray_starts_before_the_time_of_the_first_call(tmp_path: Path) -> None:
    """In a program of its own, where no Ray is there yet: nothing is told of its start, and no call waits for it."""
    agent = tmp_path / "agent.yaml"
    tools = f"tools: {{shout: {{use: '{HERE}:shout', placement: ray, timeout: 600}}}}"
    agent.write_text(FILES["calls tools"].replace("TOOLS", tools, 1), "utf-8")
    done = program(PROGRAMS["calls a tool on Ray"], agent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "ready"
    assert "generated" in done.stdout or "answered" in done.stdout
