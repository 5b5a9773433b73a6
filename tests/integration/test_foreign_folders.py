"""A run's folder from elsewhere: looking at it, exporting it and going on with it runs no code that lies in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsm_rollout.agent.loader import load_agent
from fsm_rollout.trajectory.journal import Journal
from tests.cases import FILES, PROGRAMS
from tests.kit import CONFIGS
from tests.programs import program
from tests.unit.report.recorded_runs import history

pytestmark = pytest.mark.process

AGENT = FILES["names code everywhere"]
EVIL = "import os, pathlib\n(pathlib.Path(__file__).parent / 'RAN').write_text(__name__)\n"
MODULES = ("evil", "rich", "pygraphviz", "graphviz", "msgspec", "jinja2", "json", "renderers", "ray", "tokenization_x")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder whose journal names code beside it in every place in which a journal can name any."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    for module in MODULES:
        (folder / f"{module}.py").write_text(EVIL)
    (folder / "config.json").write_text('{"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "x"}')
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]}}'
    )
    (folder / "agent.yaml").write_text(AGENT)
    (folder / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}]}\n')
    run = {
        "agent": str(folder / "agent.yaml"), "prompts": str(folder / "prompts.jsonl"), "reward": "evil:reward",
        "engine": {"kind": "evil:Engine", "router": "evil:Router"}, "out": str(folder),
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(run))
    engine = {"kind": "transformers", "model": str(folder), "tokenizer": str(folder), "max_context": 99, "eos_ids": []}
    metadata = {
        "agents": {"tool_user": AGENT}, "engines": {"policy": engine}, "base": str(folder), "run": json.dumps(run),
        "modules": [str(folder)], "file": str(folder / "run.yaml"),
    }  # fmt: skip
    with Journal(folder / "journal.sqlite", metadata=metadata) as journal:
        for event in history():
            journal.append("0/0", event)
    return folder


def command(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fsm_rollout", *arguments], cwd=cwd, capture_output=True, text=True, timeout=600,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


FORGETFUL = PROGRAMS["imports our modules and those of a folder anew"].replace("*MODULES", f"*{MODULES!r}")


def forked(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As `command`; only torch and its like, which cost seconds, have been imported before."""
    return program(FORGETFUL, *arguments, cwd=cwd)


@pytest.mark.parametrize(
    ("start", "arguments"),
    [(forked, ["show"]), (forked, ["show", "--trajectory", "0/0"]), (forked, ["show", "-o", "{}.html"]),
     (forked, ["show", "-o", "{}.trace.json"]), (command, ["show", "--trajectory", "0/0", "-o", "{}.html"])],
)  # fmt: skip
def test_looking_at_a_folder_runs_nothing_that_is_in_it(foreign: Path, start: Any, arguments: list[str]) -> None:
    out = foreign.parent / "page"
    name, *options = (argument.format(out) for argument in arguments)
    done = start(foreign.parent, name, str(foreign), *options)
    assert done.returncode == 0, done.stderr
    assert "has a fault" not in done.stdout, "the agent is drawn from its YAML"
    assert not (foreign / "RAN").exists()


def test_nor_does_looking_at_the_folder_in_which_one_is(foreign: Path) -> None:
    """Only where Python has put the folder first before this package runs; the console script has not."""
    code = "import sys; del sys.path[0]; sys.argv = ['fsm-rollout', 'show', '.', '-o', 'a.html']\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}from fsm_rollout.cli import main; main()"], cwd=foreign, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (foreign / "RAN").exists()


def test_going_on_imports_only_what_the_users_own_file_names(foreign: Path) -> None:
    # 1. The file that the journal names lies in the folder itself.
    done = forked(foreign.parent, "resume", str(foreign))
    assert (done.returncode, "may have come with it" in done.stderr) == (2, True), done.stderr
    # 2. The user's own file is another.
    own = foreign.parent / "own.yaml"
    agent = CONFIGS / "agents/tool_user.yaml"
    assert load_agent(agent)
    run = json.loads((foreign / "run.yaml").read_text())
    own.write_text(json.dumps(run | {"agent": str(agent), "reward": None, "engine": {"kind": "scripted"}}))
    done = forked(foreign.parent, "resume", str(foreign), "--file", str(own))
    assert done.returncode == 2
    for key in ("agent", "reward", "engine.kind", "engine.router"):
        assert f"{own}: {key}: the run in" in done.stderr, done.stderr
    assert "give reward=evil:reward" in done.stderr
    assert not (foreign / "RAN").exists()
