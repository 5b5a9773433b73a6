"""A run's folder: claimed by one process, and never emptied unasked."""

import os
from pathlib import Path

import pytest

from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.run_folder import LOCK, check_free, claimed, clear
from fsm_rollout.trajectory.journal import Journal


def test_what_was_made_and_is_still_empty_goes_again(tmp_path: Path) -> None:
    with claimed(tmp_path / "runs" / "a"):
        assert (tmp_path / "runs" / "a" / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert list(tmp_path.iterdir()) == []
    with claimed(tmp_path / "runs" / "a"):
        (tmp_path / "runs" / "a" / "journal.sqlite").touch()
    assert [path.name for path in (tmp_path / "runs" / "a").iterdir()] == ["journal.sqlite"]


def test_the_lock_file_of_a_process_that_was_killed_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("process 1 on elsewhere\n")
    with claimed(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be the run's folder: Not a directory"), claimed(tmp_path / "file/a"):
        pass
    with pytest.raises(ConfigError, match="folder: File name too long; choose"), claimed(tmp_path / ("a" * 300)):
        pass


def test_a_journal_without_a_trajectory_holds_nothing_to_keep(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite"):
        pass
    check_free(tmp_path, replace=False)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "journal.damaged.sqlite-wal").touch()
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
