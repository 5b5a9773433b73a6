"""What is said of code that a configuration names and that is not there."""

import sys
from pathlib import Path

import pytest

from fsm_rollout.errors import ConfigError
from fsm_rollout.names import objects
from fsm_rollout.names.objects import load_object, look_in


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(objects, "_folders", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "shop_of_mine.py").write_text("import numpi\n", "utf-8")
    look_in(tmp_path)
    return tmp_path


def refused(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_object(path)
    return str(caught.value)


def test_a_misspelt_module_is_told_from_those_that_there_are_and_where_it_was_looked_for(folder: Path) -> None:
    assert refused("shop_of_mien:f") == (
        f"cannot import 'shop_of_mien' (from 'shop_of_mien:f'): there is no module 'shop_of_mien' in {folder} or the "
        "installed packages; did you mean 'shop_of_mine'?"
    )


def test_one_in_a_package_is_told_from_its_neighbours() -> None:
    said = refused("fsm_rollout.rewads:exact_answer")
    assert "there is no module 'rewads' in " in said
    assert said.endswith("fsm_rollout; did you mean 'rewards'?")


def test_one_in_a_module_that_is_no_package_says_so() -> None:
    assert refused("fsm_rollout.rewards.exact:f").endswith("in fsm_rollout.rewards, which is no package")


def test_what_a_module_cannot_import_itself_is_said_with_its_place(folder: Path) -> None:
    said = refused("shop_of_mine:f")
    assert said.endswith("ModuleNotFoundError: No module named 'numpi' (at shop_of_mine.py:1, in <module>)")
