"""The example that trains: its ratios are 1 before the first update, and it stops when a mask is wrong."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fsm_rollout as fr
from fsm_rollout.batch.advantages import SampleScore
from tests.kit import ROOT

sys.path.insert(0, str(ROOT / "examples/grpo"))  # as Python does for a script
EXAMPLE: dict[str, Any] = runpy.run_path(str(ROOT / "examples/grpo/grpo.py"))
SHORT = {"steps": 1, "groups": 2, "n": 4, "held_back": 2, "minibatches": 1, "passes": 1}


@pytest.mark.parametrize("credit", ["place", "sample"])
def test_ratios_are_one_before_the_first_update_and_the_engine_gets_the_new_weights(
    tmp_path: Path, credit: str
) -> None:
    first, last = EXAMPLE["train"](EXAMPLE["Settings"](**SHORT, credit=credit), tmp_path)
    assert first["ratio_off"] < 1e-3
    assert (first["clipped"], first["step"], last["step"]) == (0.0, 0, 1)
    assert first["trained_tokens"] > 0
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text("utf-8").splitlines()] == [0, 1]
    assert (tmp_path / "model/config.json").exists()


@pytest.mark.parametrize("mask", ["environment", "shifted", "logprobs"])
def test_a_wrong_mask_is_found_at_the_first_step(tmp_path: Path, mask: str) -> None:
    with pytest.raises(SystemExit, match="do not belong together"):
        EXAMPLE["train"](EXAMPLE["Settings"](**SHORT, credit="sample", mask=mask), tmp_path)


def test_a_wrong_mask_is_one_of_all_tokens_of_a_sample(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--credit sample"):
        EXAMPLE["train"](EXAMPLE["Settings"](**SHORT, mask="shifted"), tmp_path)


def test_the_turns_that_are_right_are_those_that_the_answers_need() -> None:
    """Of all prompts: the calls that a question is said to need end with its answer."""
    operations, apply = (sys.modules["right_turns"].__dict__[name] for name in ("operations", "APPLY"))
    for name in ("arithmetic", "arithmetic_train"):
        for prompt in fr.read_prompts(ROOT / f"configs/data/{name}.jsonl"):
            value, script = 0, prompt.interaction_kwargs
            questions = [prompt.messages[0]["content"], *script["turns"]]
            for question, answer in zip(questions, [prompt.answer, *script["answers"]], strict=True):
                left, symbol, right = list(operations(question, value))[-1]
                value = apply[symbol](left, right)
                assert str(value) == answer


def test_a_token_is_compared_with_the_samples_that_have_the_same_tokens_before_it() -> None:
    """Computed anew, place by place, from the rows alone; and a dialogue ends with its first mistake."""
    engine = {"kind": "transformers", "model": "embedded:early"}
    rewards = ["fsm_rollout.rewards:exact_answer", (EXAMPLE["right_turns"], 0.0)]
    with fr.Rollout(EXAMPLE["load_agents"](), engine, reward=rewards, sampling={"temperature": 1.2}) as rollout:
        batch = rollout.run(EXAMPLE["prompts_for"]("until_mistake", "arithmetic", 3), n=6)
    columns, trained = batch.tensordict, EXAMPLE["of_places"](batch)
    right = [int(parts["right_turns"]) for parts in columns.get("reward_parts").tolist()]
    stops = columns.get("stop_reason").tolist()
    turns = columns["turn_ids"]
    for row, last in enumerate(turns.amax(1).tolist()):
        assert right[row] == last + (stops[row] == "answered"), "nothing is sampled after the first mistake"
    seen = set()
    for row, column, token, old, advantage in zip(*(values.tolist() for values in trained), strict=True):
        before = columns["responses"][row, :column]
        same = (columns["responses"][:, :column] == before).all(1)
        same &= (columns["group_index"] == columns["group_index"][row]) & (turns[:, column] == turns[row, column])
        outcome = torch.tensor([float(right[r] > turns[r, column]) for r in range(len(batch))])
        chose = same & (columns["responses"][:, column] == token)
        expected = (outcome[chose] - outcome[same].mean()).sum().item()
        assert advantage == pytest.approx(expected, abs=1e-6)
        assert columns["rollout_log_probs"][chose, column].tolist() == pytest.approx([old] * int(chose.sum()), abs=1e-4)
        seen.add((int(columns["group_index"][row]), tuple(before.tolist()), token))
    assert len(seen) == len(trained.row) > 0, "each token once"


def test_runs_are_drawn_from_their_logs(tmp_path: Path) -> None:
    logs = sorted((ROOT / "examples/grpo/logs").glob("*.jsonl"))
    runpy.run_path(str(ROOT / "examples/grpo/plot.py"))["draw"](logs, tmp_path / "curve.svg")
    drawn = (tmp_path / "curve.svg").read_text("utf-8")
    assert logs
    assert [log.stem for log in logs if f"<!-- {log.stem.replace('_', ' ')} -->" not in drawn] == []


def test_failed_prompts_come_again_until_they_are_solved() -> None:
    questions = [fr.Prompt(messages=({"role": "user", "content": f"{n}?"},), prompt_id=str(n)) for n in range(8)]
    prompts = EXAMPLE["Prompts"](questions, 0)
    solved = {"0", "1", "2", "3"}
    failed: set[str] = set()
    for _ in range(6):
        names = [str(prompt.prompt_id) for prompt in prompts.take(4, 0.5)]
        assert len(set(names)) == 4
        assert len(failed & set(names)) >= min(2, len(failed)), "half of them are such that were failed"
        prompts.note(SimpleNamespace(sample_scores=[SampleScore(name, 0, float(name in solved)) for name in names]))
        failed = (failed | set(names)) - solved
    solved |= failed
    for _ in range(6):
        names = [str(prompt.prompt_id) for prompt in prompts.take(4, 1.0)]
        prompts.note(SimpleNamespace(sample_scores=[SampleScore(name, 0, 1.0) for name in names]))
        failed -= set(names)
    assert not failed
    assert len(prompts.take(4, 1.0)) == 4
