"""Journals of programs that end in the middle of a run."""

import subprocess
import sys
from pathlib import Path

import pytest

from fsm_rollout.trajectory.journal import read
from tests.cases import PROGRAMS
from tests.kit import ROOT

pytestmark = pytest.mark.process


def test_a_killed_run_leaves_what_was_flushed(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    code = PROGRAMS["is killed after it has flushed its journal"]
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False, cwd=ROOT).returncode == 9
    (trajectory,) = read(path)
    assert 10 <= trajectory.spent["tool_calls"] <= 20


LATE = PROGRAMS["closes its journal at the interpreter's end"]


@pytest.mark.parametrize("writer", ["idle", "busy"])
def test_a_journal_that_is_closed_at_the_interpreters_end_is_whole_or_says_that_it_is_not(
    tmp_path: Path, writer: str
) -> None:
    """The interpreter stops daemon threads at its end, and they answer nobody then."""
    path = tmp_path / "j.sqlite"
    done = subprocess.run(
        [sys.executable, "-c", LATE, str(path), writer], check=False, capture_output=True, text=True, timeout=600,
        cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0
    if writer == "idle":
        assert done.stderr == ""
        assert [trajectory.trajectory_id for trajectory in read(path)] == ["t"]
    else:
        assert done.stderr == f"journal {path} cannot be written: the interpreter has stopped the thread that writes it"
