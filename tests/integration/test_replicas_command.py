"""`fsm-rollout replicas`: the replicas of a run of shards come and go while it runs, by orders of another program."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.jobs.control import LONGEST, SOCKET, Order, ask
from tests.integration.shard_work import prompts, spec
from tests.kit import ROOT
from tests.programs import PATIENCE, fsm_rollout, started

pytestmark = [pytest.mark.process, pytest.mark.real]  # a run of shards, twice


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with two shards of two replicas each, which goes on for as long as anybody looks."""
    folder = tmp_path_factory.mktemp("a" * LONGEST)
    out, data = folder / "run", folder / "prompts.jsonl"
    data.write_text("\n".join(prompt.model_dump_json() for prompt in prompts(5000)), "utf-8")
    keys = {
        "agent": str(ROOT / "benchmarks/agent.yaml"), "prompts": str(data), "n": 1, "seed": 0,
        "concurrency": 8, "workers": 2, "engine": {**spec(delay=0.5), "replicas": 4}, "out": str(out),
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(keys), "utf-8")
    with going("run", folder / "run.yaml", out):
        yield out
    with pytest.raises(ConfigError, match="no run takes orders here"):
        ask(out, Order("list"))
    with going("resume", out, out) as said:
        assert sorted(names(out)) == sorted([*(f"1/replica-{n}" for n in range(3)), "2/replica-0", "2/replica-1"])
    assert "engine.replicas" not in said[0], "orders have changed them"


@contextmanager
def going(command: str, what: Path, out: Path) -> Iterator[list[str]]:
    """Have a command run for the block, from when it takes orders on; it is interrupted then."""
    tools = {"where": {"use": "tests.integration.shard_work:where", "timeout": 600}}
    arguments = (command, what, f"agent.tools={json.dumps(tools)}")
    with started("from fsm_rollout.cli import main; main()", *arguments, cwd=ROOT) as (process, stdout, stderr):
        until = time.monotonic() + PATIENCE
        while not (out / SOCKET).exists():
            assert process.poll() is None, stderr.read()
            assert time.monotonic() < until
            time.sleep(0.1)
        yield (said := [])
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == 128 + signal.SIGINT, stdout.read() + stderr.read()
        said.append(stderr.read())
    assert not (out / SOCKET).exists()


def names(folder: Path) -> dict[str, str]:
    return {row["name"]: row["state"] for row in ask(folder, Order("list")).rows}


def test_replicas_of_shards_come_and_go_by_the_command_line(run: Path) -> None:
    listed = fsm_rollout("replicas", run)
    assert listed.returncode == 0, listed.stderr
    first = [line.split()[:2] for line in listed.stdout.splitlines()]
    assert first == [[f"{shard}/replica-{number}", "up"] for shard in (1, 2) for number in (0, 1)]
    removed = fsm_rollout("replicas", run, "remove", "1/replica-0", "--within", "5")
    assert removed.returncode == 0, removed.stderr
    assert names(run)["1/replica-0"] == "left"
    assert ask(run, Order("add")).name == "1/replica-2", "that shard has the fewest"
    assert names(run)["1/replica-2"] == "up"
    assert ask(run, Order("add")).name == "1/replica-3", "of those with two, the first"


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (Order("remove", "3/replica-0"), "no replica '3/replica-0'; did you mean './replica-0'"),
        (Order("remove", "1/replica-9"), "no replica 'replica-9'"),
        (Order("add", "http://there"), "are started by shards, and have no url"),
        (Order("list", engine="police"), "engine 'police' is in each shard"),
    ],
)
def test_what_cannot_be_done_is_said(run: Path, order: Order, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        ask(run, order)


def test_the_command_says_what_it_lacks(run: Path, tmp_path: Path) -> None:
    for arguments, says in (((run, "remove"), "say which one is to leave"), ((tmp_path,), "no run takes orders here")):
        said = fsm_rollout("replicas", *arguments)
        assert (said.returncode, says in said.stderr) == (2, True), said.stderr
