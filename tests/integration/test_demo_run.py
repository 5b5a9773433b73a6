"""The shipped runs, for real: the embedded model samples, and what comes out agrees with a plain forward pass."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from fsm_rollout import TrajectoryBatch
from fsm_rollout.cli import app
from fsm_rollout.model import embedded_model
from fsm_rollout.trajectory import journal as journals
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.embedded import tokenizer
from tests.kit import ROOT

CONFIGS = ROOT / "configs"
RUNS = sorted(path for path in (CONFIGS / "runs").glob("*.yaml") if "engine:" in path.read_text("utf-8"))
SUMMARY_KEYS = {
    "trajectories", "groups", "wall_seconds", "transitions", "states", "stop_reasons", "sub_agents", "turns_mean",
    "tokens", "trained_tokens", "tool_calls", "bad_calls", "tool_failures", "scored", "score_mean", "score_error",
    "timing", "engine",
}  # fmt: skip


def fsm_rollout(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "demo"
    done = fsm_rollout("run", str(CONFIGS / "runs/demo.yaml"), "limit=8", "n=2", f"out={out}")
    assert done.exit_code == 0, done.output
    return out


def test_the_demo_visits_all_five_states_and_mostly_succeeds(demo: Path) -> None:
    summary = json.loads((demo / "summary.json").read_text("utf-8"))
    assert not SUMMARY_KEYS - set(summary)
    assert set(summary["states"]) == {"PENDING", "GENERATING", "PROCESSING_TOOLS", "INTERACTING", "TERMINATED"}
    assert (summary["trajectories"], summary["groups"]) == (16, 8)
    assert summary["score_mean"] >= 0.75
    assert summary["tool_calls"] >= 32


def test_ids_mask_and_logprobs_agree_with_a_forward_pass(demo: Path) -> None:
    """One plain forward over each row's final ids: the recorded logprobs are the model's own, on mask 1 only."""
    model = AutoModelForCausalLM.from_pretrained(embedded_model(), dtype=torch.float32)
    batch = TrajectoryBatch.load(demo / "batch").tensordict
    width = batch["prompts"].shape[1]
    stop = tokenizer().eos_token_id
    for row in range(len(batch)):
        kept = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][kept]
        mask = torch.cat([torch.zeros(width, dtype=torch.long), batch["response_mask"][row]])[kept]
        recorded = torch.cat([torch.zeros(width), batch["rollout_log_probs"][row]])[kept]
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        expected = torch.log_softmax(logits[:-1].float(), -1).gather(1, ids[1:, None])[:, 0]
        trained = mask[1:].bool()
        assert trained.any()
        assert torch.allclose(recorded[1:][trained], expected[trained], atol=1e-3)
        assert (recorded[1:][~trained] == 0).all()
        text = tokenizer().decode(ids)
        turns = text.count("<|im_start|>assistant\n")
        assert int((ids[1:][trained] == stop).sum()) == turns, "each assistant turn ends in a sampled stop token"
        by_mask = tokenizer().decode(ids[1:][trained])
        by_text = "".join(
            part.split("<|im_end|>")[0] + "<|im_end|>" for part in text.split("<|im_start|>assistant\n")[1:]
        )
        assert by_mask == by_text, "the mask is exactly what stands between assistant headers and their ends"


def test_the_journal_folds_to_what_the_batch_holds(demo: Path) -> None:
    batch = TrajectoryBatch.load(demo / "batch").tensordict
    trajectories = {t.trajectory_id: t for t in journals.read(demo / "journal.sqlite")}
    assert len(trajectories) == 16
    for row, trajectory_id in enumerate(batch["trajectory_id"]):
        trajectory: Trajectory = trajectories[trajectory_id]
        (stream,) = trajectory.streams
        mask = batch["response_mask"][row][: stream.tokens.response_length]
        assert mask.tolist() == stream.tokens.response_mask().tolist()
        assert trajectory.score == pytest.approx(float(batch["trajectory_scores"][row]))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_shipped_run_runs(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = fsm_rollout("run", str(path), "limit=2", f"out={out}")
    assert done.exit_code == 0, done.output
    assert {p.name for p in out.iterdir()} == {"batch", "journal.sqlite", "summary.json", "report.html", "trajectories"}
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert sum(summary["stop_reasons"].values()) == summary["trajectories"]
    expected = {"reflect": {"accepted": 2}, "delegate": {"answered": 2}, "compaction": {"answered": 2}}
    if path.stem in expected:
        assert summary["stop_reasons"] == expected[path.stem]
    rows = TrajectoryBatch.load(out / "batch").tensordict
    if path.stem == "compaction":
        assert rows["stream"] == [0, 1, 0, 1], "each stream is a row"
    if path.stem == "reflect":
        assert set(rows["context"]) == {"main"}, "the critic is not trained"
    if path.stem == "delegate":
        assert set(rows["agent"]) == {"delegate", "tool_agent"}


def test_the_same_seed_gives_the_same_tokens_and_another_does_not(tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        arguments = [str(CONFIGS / "runs/demo.yaml"), "limit=2", "n=2", f"seed={seed}", f"out={tmp_path / name}"]
        assert fsm_rollout("run", *arguments, "engine.model=embedded:early").exit_code == 0
        batch = TrajectoryBatch.load(tmp_path / name / "batch").tensordict
        kept = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        found.append([ids[attended].tolist() for ids, attended in kept])
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_validation_is_greedy(tmp_path: Path) -> None:
    arguments = [str(CONFIGS / "runs/demo.yaml"), "limit=1", "n=2", "validate=true", f"out={tmp_path / 'v'}"]
    assert fsm_rollout("run", *arguments).exit_code == 0
    batch = TrajectoryBatch.load(tmp_path / "v" / "batch").tensordict
    assert batch["responses"][0].tolist() == batch["responses"][1].tolist()
