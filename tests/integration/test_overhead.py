"""The benchmark of the rollout layer runs from a clone, and checks every token."""

from __future__ import annotations

import json

import pytest

from tests.programs import program

pytestmark = pytest.mark.process


def test_the_overhead_is_measured_and_every_row_is_as_expected() -> None:
    code = "import runpy; runpy.run_path('benchmarks/overhead.py', run_name='__main__')"
    done = program(code, "--n", "6", "--reps", "1", "--extra-tools", "2", "--json", "--journal")
    assert done.returncode == 0, done.stderr
    (result,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (result["n"], result["turns"], result["wrong_trajectories"]) == (6, 4, 0)
    assert result["us_cpu_per_gen"] > 0 < result["us_cpu_per_turn"]
