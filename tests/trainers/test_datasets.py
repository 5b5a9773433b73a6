"""Data sets as the `datasets` package has them, and a hub's, are prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

import fsm_rollout as fr
from fsm_rollout.environment.hub_datasets import prompts
from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.run_config import load_run
from fsm_rollout.jobs.runner import _prompts
from tests.kit import ROOT

ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {n} + 3?"}], "answer": str(n + 3), "agent": None}
    for n in range(3)
]


def test_a_dataset_object_is_a_list_of_prompts() -> None:
    engine = {"kind": "scripted", "turns": ["The answer is 4."]}
    with fr.Rollout(ROOT / "configs/agents/single_turn.yaml", engine, reward="exact_answer") as rollout:
        batch = rollout.run(Dataset.from_list(ROWS), n=2)
    assert sorted(batch.tensordict["trajectory_scores"].tolist()) == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def test_a_run_names_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"q": row["prompt"][0]["content"]}) for row in ROWS))
    text = (ROOT / "configs/runs/scripted.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("prompts:")]
    run = tmp_path / "run.yaml"
    run.write_text("\n".join([*lines, f"prompts: {{use: datasets, path: {folder}, messages: q}}"]))
    found = _prompts(load_run(run, ["limit=2"]))
    assert [prompt.messages[0]["content"] for prompt in found] == ["What is 0 + 3?", "What is 1 + 3?"]


def test_a_data_set_that_cannot_be_had_says_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"data set 'nobody/nothing': .* `hf download --repo-type dataset nobody/nothing`"
    ):
        prompts("nobody/nothing")
