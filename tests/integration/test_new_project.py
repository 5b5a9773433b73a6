"""What ``fsm-rollout new`` writes works as it stands, also where the package is installed and no clone is near."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsm_rollout.cli.new_project import KINDS
from tests.kit import ROOT
from tests.programs import fsm_rollout, program

PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
TRAIN = "import runpy; runpy.run_path('train.py', run_name='__main__')"


FIRST, *OTHERS = KINDS


@pytest.mark.process
@pytest.mark.parametrize("kind", [FIRST, *(pytest.param(kind, marks=pytest.mark.real) for kind in OTHERS)])
def test_a_new_project_is_checked_tested_run_shown_and_trained(kind: str, tmp_path: Path) -> None:
    project = tmp_path / "my_agent"
    for place, *command in (
        (tmp_path, "new", "my_agent", "--from", kind),
        (project, "check", "agent.yaml"),
        (project, "draw", "agent.yaml", "-o", "a.mmd"),
        (project, "run", "run.yaml"),
        (project, "show", "runs/first"),
    ):
        done = fsm_rollout(*command, cwd=place)
        assert done.returncode == 0, done.stderr
    assert {"journal.sqlite", "batch", "summary.json", "report.html"} <= {
        path.name for path in (project / "runs/first").iterdir()
    }
    tested = program(PYTEST, "-q", "-p", "no:cacheprovider", cwd=project)
    assert tested.returncode == 0, tested.stdout
    trained = program(TRAIN, cwd=project)
    assert trained.returncode == 0, trained.stderr
    first, second = re.findall(r"^step \d: (score .*), weights", trained.stdout, re.MULTILINE)
    assert first != second, "a step that says what the one before said looks as if it had not been done"
    assert not [path.name for path in project.iterdir() if "NAME" in path.name]
    assert not [path for path in project.glob("*.*") if path.is_file() and "NAME" in path.read_text("utf-8")]


@pytest.mark.process
@pytest.mark.real
def test_the_help_s_first_session_works_with_the_installed_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "fsm_rollout", source / "fsm_rollout", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    installed = tmp_path / "installed"
    subprocess.run([*pip, "--target", str(installed), str(source)], check=True)

    help_text = fsm_rollout("--help").stdout
    session = help_text.split("A first session:")[1].split("Options:")[0]
    lines = [re.split(r"  +", line.strip())[0].split() for line in session.splitlines()]
    commands = [words[1:] for words in lines if words[:1] == ["fsm-rollout"]]
    assert [command[0] for command in commands] == ["new", "check", "draw", "run", "show"]
    folder = tmp_path
    for command in commands:
        done = subprocess.run(
            [installed / "bin/fsm-rollout", *command], cwd=folder, env={"PYTHONPATH": str(installed), "PATH": ""},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        folder = tmp_path / "my_agent"
    code = "import fsm_rollout; print(fsm_rollout.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={"PYTHONPATH": str(installed)}, capture_output=True, text=True
    )
    assert str(installed) in found.stdout
