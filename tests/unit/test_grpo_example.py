"""The example that trains: its ratios are 1 before the first update, and it stops when a mask is wrong."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import fsm_rollout as fr
from tests.kit import ROOT

sys.path.insert(0, str(ROOT / "examples/grpo"))  # as Python does for a script
EXAMPLE: dict[str, Any] = runpy.run_path(str(ROOT / "examples/grpo/grpo.py"))
SHORT = {"steps": 1, "groups": 2, "n": 4, "held_back": 2, "minibatches": 1}


def test_ratios_are_one_before_the_first_update_and_the_engine_gets_the_new_weights(tmp_path: Path) -> None:
    first, last = EXAMPLE["train"](EXAMPLE["Settings"](**SHORT), tmp_path)
    assert first["ratio_off"] < 1e-3
    assert (first["clipped"], first["step"], last["step"]) == (0.0, 0, 1)
    assert first["trained_tokens"] > 0
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text("utf-8").splitlines()] == [0, 1]
    assert (tmp_path / "model/config.json").exists()


@pytest.mark.parametrize("mask", ["environment", "shifted", "logprobs"])
def test_a_wrong_mask_is_found_at_the_first_step(tmp_path: Path, mask: str) -> None:
    with pytest.raises(SystemExit, match="do not belong together"):
        EXAMPLE["train"](EXAMPLE["Settings"](**SHORT, mask=mask), tmp_path)


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


def test_a_turn_is_compared_with_the_same_turn_of_its_group() -> None:
    agent = fr.load_agent(ROOT / "configs/agents/tool_user.yaml")
    rewards = ["fsm_rollout.rewards:exact_answer", (EXAMPLE["right_turns"], 0.0)]
    prompts = fr.read_prompts(ROOT / "configs/data/arithmetic.jsonl", limit=3)
    with fr.Rollout(agent, {"kind": "transformers", "model": "embedded:early"}, reward=rewards) as rollout:
        batch = rollout.run(prompts, n=4)
    advantages, columns = EXAMPLE["turn_advantages"](batch), batch.tensordict
    for index in columns["group_index"].unique():
        assert advantages[columns["group_index"] == index].sum(0).abs().max() < 1e-4
    parts, turns = columns.get("reward_parts").tolist(), columns["turn_ids"].amax(1).tolist()
    for row, (part, last) in enumerate(zip(parts, turns, strict=True)):
        right = int(part["right_turns"])
        assert part["exact_answer"] == 1.0 or right <= last, "only who made no mistake is right to the end"
        assert (advantages[row, :right] >= 0).all()
        assert (advantages[row, right : right + 1] <= 0).all()
        assert not advantages[row, right + 1 :].any()


def test_runs_are_drawn_from_their_logs(tmp_path: Path) -> None:
    logs = sorted((ROOT / "examples/grpo/logs").glob("*.jsonl"))
    runpy.run_path(str(ROOT / "examples/grpo/plot.py"))["draw"](logs, tmp_path / "curve.svg")
    drawn = (tmp_path / "curve.svg").read_text("utf-8")
    assert logs
    assert [log.stem for log in logs if f"<!-- {log.stem.replace('_', ' ')} -->" not in drawn] == []
