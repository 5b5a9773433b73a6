"""The benchmark of the rollout layer runs from a clone, and checks every token."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.kit import ROOT

pytestmark = pytest.mark.process


def test_the_overhead_is_measured_and_every_row_is_as_expected() -> None:
    command = [sys.executable, "benchmarks/overhead.py", "--n", "6", "--reps", "1", "--extra-tools", "2", "--json"]
    done = subprocess.run([*command, "--journal"], cwd=ROOT, capture_output=True, text=True, check=True)
    (result,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (result["n"], result["turns"], result["wrong_trajectories"]) == (6, 4, 0)
    assert result["us_cpu_per_gen"] > 0 < result["us_cpu_per_turn"]
