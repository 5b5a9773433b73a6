"""Files that are there whole or not at all."""

from pathlib import Path

import pytest

from fsm_rollout.errors import ConfigError
from fsm_rollout.files import written_whole


def test_what_fails_half_way_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    with written_whole(path) as partial:
        partial.write_text("whole")

    def fail() -> None:
        with written_whole(path) as partial:
            partial.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [file.name for file in path.parent.iterdir()] == ["rows.jsonl"]
    assert path.read_text() == "whole"


def test_what_cannot_be_written_is_named_with_what_to_try(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    wrong = r"taken/rows\.jsonl cannot be written: (Not a directory|File exists); give -o F$"
    with pytest.raises(ConfigError, match=wrong), written_whole(tmp_path / "taken" / "rows.jsonl", "; give -o F"):
        raise AssertionError("there is no file to write")
