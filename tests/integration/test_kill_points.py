"""A run that is killed anywhere, and whose resumption is killed too, comes to the rows of one that was not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit import ROOT

pytestmark = pytest.mark.process


def test_ten_points_of_a_run_with_sub_agents() -> None:
    """`make nightly` tries two hundred, of the whole run."""
    command = [sys.executable, "-m", "tests.integration.kill_points", "--points", "10", "limit=2", "n=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 of 10 points came to the same rows, ids and order" in done.stdout
    assert done.stderr == ""
