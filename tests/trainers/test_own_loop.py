"""The loop of one's own for models of any size: its trial runs, and stops where tokens and numbers do not fit."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

import fsm_rollout as fr
from tests.kit import ROOT
from tests.trainers.example_batches import gsm8k

TRIAL = ["model=embedded:early", "gpus=0", "held_back=2", "groups=4", "--steps", "2"]


def test_the_trial_trains_a_tiny_model_and_a_shifted_batch_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the model, the GPUs and how soon it stops differ from a real run; GSM8K is a folder of that name here."""
    gsm8k(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.path", [*sys.path])
    example = runpy.run_path(str(ROOT / "examples/own_loop/train.py"))
    first, second, last = example["main"](TRIAL)
    assert "held_back" in first
    assert "held_back" in last
    for line in (first, second):
        assert 0 < line["score"] < 1, "answers were compared with the numbers after the solutions"
        assert line["kl"] < 1e-8, "each step was sampled with the weights that the trainer had"
        assert line["grad_norm"] > 0
    trained, _ = fr.load_model("runs/own_loop/model")
    early, _ = fr.load_model("embedded:early")
    assert not torch.equal(trained.lm_head.weight, early.lm_head.weight)

    config, folder, _ = example["read_config"](TRIAL, None, ROOT / "examples/own_loop/config.yaml")
    trainer = example["Trainer"](config)
    options = {"reward": config.reward, "sampling": {"temperature": 1.5}}  # at 1 it is too sure for a shift to be seen
    with fr.Rollout(folder / config.agent, example["engine"](config.model, 0), **options) as rollout:
        batch = rollout.run(example["prompts"](config.prompts, folder, 16), n=2)
    assert trainer.update(batch, 0)["kl"] < 1e-8
    trainer = example["Trainer"](config)
    batch.tensordict["rollout_log_probs"] = batch["rollout_log_probs"].roll(1, 1)
    with pytest.raises(SystemExit, match=r"before any update, `most_kl` is 0\.05"):
        trainer.update(batch, 0)


def test_a_code_agent_is_other_words_in_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    named = {"agent": "agents/code_user.yaml", "prompts": "data/arithmetic_train.jsonl"}
    task = [f"{key}=../../configs/{file}" for key, file in {**named, "evaluate_on": "data/arithmetic.jsonl"}.items()]
    first, _ = runpy.run_path(str(ROOT / "examples/own_loop/train.py"))["main"]([*task, *TRIAL[:-1], "1"])
    assert 0 < first["score"] < 1
    assert first["kl"] < 1e-8, "what ran in the sandbox is in no loss"
