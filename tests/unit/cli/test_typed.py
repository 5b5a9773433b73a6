"""What a newcomer types in a new project, and what is said: a table of cases (``tests/cases/typed.yaml``)."""

import shlex
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from typer.testing import CliRunner

from fsm_rollout.cli import app
from fsm_rollout.cli.new_project import new_project
from tests.cases import says, table


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = new_project("typist", "tools", tmp_path_factory.mktemp("new"))
    (project / "script.yaml").write_text("typist:\n- One\n- Two\n", "utf-8")
    (project / "runs" / "first").mkdir(parents=True)
    return project


@pytest.mark.parametrize("case", table("typed")["cases"], ids=lambda case: case["typed"])
def test_what_is_typed_is_answered(
    case: dict[str, Any], new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = copytree(new, tmp_path / "typist")
    for name, changes in case.get("change", {}).items():
        text = (project / name).read_text("utf-8")
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        (project / name).write_text(text, "utf-8")
    monkeypatch.chdir(project)
    done = CliRunner().invoke(app, shlex.split(case["typed"]))
    lines = done.output.splitlines()
    expected = case["says"] if isinstance(case["says"], list) else ["…", case["says"]]
    assert says(expected, lines), done.output
    assert done.exit_code == case.get("code", 2)
