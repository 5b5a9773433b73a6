"""The embedded model that sees: `make demo-vision`, and that it sees."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.kit import ROOT


@pytest.mark.real
@pytest.mark.parametrize(("model", "least", "most"), [("vision", 0.9, 1.0), ("vision_early", 0.3, 0.65)])
def test_it_answers_from_what_it_sees_and_from_nothing_else(model: str, least: float, most: float) -> None:
    command = [sys.executable, str(ROOT / "examples/vision/demo.py"), "--model", f"embedded:{model}", "--number", "128"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.fullmatch(r"score ([\d.]+) \(blank ([\d.]+), swapped ([\d.]+)\)\n", said)
    assert found, said
    score, blank, swapped = map(float, found.groups())
    assert least <= score <= most
    assert max(blank, swapped) < 0.1, "chance: numbers from 10 to 99"
    card = json.loads((ROOT / "fsm_rollout/model/vision.json").read_text("utf-8"))[model]
    assert abs(card["score"] - score) < 0.15
