"""What ``fsm-rollout new`` refuses; what it writes is tried in ``tests/integration/test_new_project.py``."""

import typing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsm_rollout.cli import agents, app
from fsm_rollout.cli.new_project import KINDS, new_project
from fsm_rollout.errors import ConfigError
from tests.cases import cases


@cases("cli")
def test_a_name_that_cannot_be_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match=message):
        new_project(name, "tools", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_place_where_nothing_can_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        new_project("an_agent_of_mine", "tools", tmp_path / "nowhere")


def test_the_kinds_are_those_of_the_command() -> None:
    hint = typing.get_type_hints(agents.new)["kind"]
    assert typing.get_args(hint) == tuple(KINDS)
    help_text = CliRunner().invoke(app, ["new", "--help"]).output
    assert all(f"  {kind} " in help_text for kind in KINDS)


def test_the_version_is_said() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.output.startswith("fsm-rollout 0.")
