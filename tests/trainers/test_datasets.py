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
from fsm_rollout.jobs.runner import prompts_of
from fsm_rollout.trajectory.prompt import as_prompts, read_prompts
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
    found = prompts_of(load_run(run, ["limit=2"]))
    assert [prompt.messages[0]["content"] for prompt in found] == ["What is 0 + 3?", "What is 1 + 3?"]


def test_a_data_set_that_cannot_be_had_says_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"data set 'nobody/nothing': .* `hf download --repo-type dataset nobody/nothing`"
    ):
        prompts("nobody/nothing")


def test_pictures_are_taken_as_a_data_set_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Image as Feature
    from datasets import load_dataset
    from PIL import Image

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "shots"
    folder.mkdir()
    for n in range(2):
        Image.new("RGB", (40, 20), (n, 100, 0)).save(folder / f"{n}.jpg")
    rows = [{"file_name": f"{n}.jpg", "question": f"Is <image> picture {n}?"} for n in range(2)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = load_dataset("imagefolder", data_dir=str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert isinstance(table.features["image"], Feature)
    read = prompts("imagefolder", limit=1, options={"data_dir": str(folder)}, messages="question")
    table.to_parquet(folder / "rows.parquet")  # with the pictures' bytes
    columns = {"messages": "question"}
    for found in (
        read,
        as_prompts(table, 1, columns=columns),
        as_prompts(table.to_iterable_dataset(), 1, columns=columns),
        read_prompts(folder / "rows.parquet", 1, columns=columns),
    ):
        (prompt,) = found
        before, shown, after = prompt.messages[0]["content"]
        assert (before["text"], after["text"]) == ("Is ", " picture 0?")
        assert shown["image"].data == (folder / "0.jpg").read_bytes()
    decoded = table.with_transform(lambda batch: {"question": batch["question"], "image": batch["image"]})
    assert as_prompts(decoded, 1, columns=columns)[0].messages[0]["content"][1]["image"].mime == "image/png"
