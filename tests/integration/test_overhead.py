"""The benchmark of the rollout layer runs from a clone, and checks every token."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.kit import ROOT
from tests.programs import program

pytestmark = pytest.mark.process


def test_the_overhead_is_measured_and_every_row_is_as_expected() -> None:
    code = "import runpy; runpy.run_path('benchmarks/overhead.py', run_name='__main__')"
    done = program(code, "--n", "6", "--reps", "1", "--extra-tools", "2", "--json", "--journal")
    assert done.returncode == 0, done.stderr
    (result,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (result["n"], result["turns"], result["wrong_trajectories"]) == (6, 4, 0)
    assert result["us_cpu_per_gen"] > 0 < result["us_cpu_per_turn"]


def test_a_line_of_the_table_says_whether_its_goal_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = importlib.import_module("overhead_table")
    options = argparse.Namespace(n=8, reps=2, rounds=1, workload=None, peer=None)
    asked: list[list[str]] = []

    def in_turn(sides: dict[str, list[object]], rounds: int) -> dict[str, dict[str, float]]:
        asked.extend([str(word) for word in command] for command in sides.values())
        return {side: {"us_cpu_per_gen": 90.0 if side == "ours" else 60.0} for side in sides}

    monkeypatch.setattr(table, "in_turn", in_turn)
    line = table.Line("ten times as many", "us_cpu_per_gen", "--n 10N", "--n N", 1.5)
    assert (
        table.measured(line, options) == "| ten times as many | `us_cpu_per_gen` | 90 | 60 | 1.5 | \u2264 1.5 | yes |"
    )
    assert [command[command.index("--n") + 1] for command in asked] == ["80", "8"]
    assert table.measured(table.Line("as quick", "us_cpu_per_gen", "", "", 1.4), options).endswith("| no |")
    assert table.measured(table.Line("more", "us_cpu_per_gen", "", "", 1.4, more=True), options).endswith("| yes |")
    assert table.measured(table.Line("beside verl", "us_cpu_per_gen", "", None, 0.1), options) is None
    for every in table.LINES:
        table.options_of(every.ours, options)
        table.options_of(every.against or "", options)
    for command, _, values in table.SWEEPS.values():
        table.options_of(command.format(values[0]), options)


def test_a_line_of_the_table_that_fails_loses_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = importlib.import_module("overhead_table")

    def in_turn(sides: dict[str, list[object]], rounds: int) -> dict[str, dict[str, float]]:
        if any("--journal" in map(str, command) for command in sides.values()):
            raise RuntimeError("ours failed: no room for the journal")
        return {side: {line.key: 5.0 for line in table.LINES} for side in sides}

    monkeypatch.setattr(table, "in_turn", in_turn)
    out, drawn = tmp_path / "table.md", tmp_path / "plot.svg"
    monkeypatch.setattr(sys, "argv", ["overhead_table.py", "--n", "16", "--out", str(out), "--plot", str(drawn)])
    table.main()
    lines = out.read_text(encoding="utf-8").splitlines()[4:]
    assert [line.count("failed") for line in lines if "journal" in line] == [1]
    assert len(lines) == sum(line.against is not None or line.key == "kb_per_trajectory" for line in table.LINES)
    assert "no room for the journal" in capsys.readouterr().err
    assert "<svg" in drawn.read_text(encoding="utf-8")
