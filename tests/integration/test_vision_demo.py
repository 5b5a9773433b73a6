"""The embedded model that sees: `make demo-vision`, and that it sees."""

import json
import re
import subprocess
import sys

import pytest

import fsm_rollout as fr
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


def test_a_transformers_teacher_says_that_it_scores_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns are NaN, with the reason: never what it would make of the ids without the pictures."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/vision"))
    from demo import AGENT, task

    engine = {"kind": "transformers", "model": "embedded:vision", "threads": 1}
    with fr.Rollout(AGENT, engine, teachers={"same": {"engine": engine}}) as rollout:
        batch = rollout.run(task.prompts(2))
    assert batch.teacher("same").log_probs[batch["response_mask"].bool()].isnan().all()
    assert {row["same"] for row in batch["teachers"]} == {
        "EngineError: the transformers engine scores text only, and the request has pictures"
    }
