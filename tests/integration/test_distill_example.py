"""What the distillation example trains on is the teacher's, token by token; a teacher shifted by one shows at once."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import fsm_rollout as fr
from tests.kit import ROOT, example

EXAMPLE = example("examples/distill/distill.py")
SETTINGS = EXAMPLE["Settings"](top_k=16)


@pytest.mark.real
def test_it_learns_what_the_teacher_says_and_a_shifted_teacher_is_told_before_any_update() -> None:
    engine = {"kind": "transformers", "threads": 1}
    with fr.Rollout(
        ROOT / "configs/agents/tool_user.yaml",
        engine | {"model": "embedded:early"},
        teachers={"final": {"engine": engine | {"model": "embedded"}, "top_k": SETTINGS.top_k}},
    ) as rollout:
        batch = rollout.run(fr.read_prompts(ROOT / "configs/data/arithmetic_train.jsonl", limit=8))
    shifted = replace(SETTINGS, shifted=True)
    assert 0 < EXAMPLE["gap"](batch, SETTINGS) < 0.5
    assert EXAMPLE["gap"](batch, shifted) > 0.8
    learner = EXAMPLE["Learner"](SETTINGS)

    def loss(settings: Any) -> float:
        with torch.no_grad():
            return sum(
                float(EXAMPLE["loss_of"](learner.model, part, settings)) for part in batch.parts(max_tokens=2048)
            )

    before, wrong = loss(SETTINGS), loss(shifted)
    assert wrong > 10 * before
    for _ in range(4):
        EXAMPLE["update"](learner, batch, SETTINGS)
    assert loss(SETTINGS) < before / 1.5
