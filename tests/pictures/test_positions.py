"""Positions in three dimensions are what the model itself counts, found without its weights."""

from pathlib import Path

import pytest
import torch

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.model.folders import load_processor
from tests.unit.batch.test_media import PAD, picture, trajectory
from tests.vision import save


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_the_model_itself(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path)
    eye = load_processor(tmp_path)
    a, b = picture(1, 60, 90), picture(2, 57, 128)
    made = [trajectory(family, 0, [a], [b, a]), trajectory(family, 1, [], [])]
    whole = TrajectoryBatch.from_trajectories(made, pad_id=PAD, processor=eye)
    inputs = whole.model_inputs()
    types = inputs["mm_token_type_ids"]
    expected, _ = model.model.get_rope_index(
        input_ids=whole.tensordict["input_ids"], attention_mask=whole.tensordict["attention_mask"],
        image_grid_thw=inputs["image_grid_thw"], mm_token_type_ids=types,
    )  # fmt: skip
    attended = whole.tensordict["attention_mask"].bool()
    assert torch.equal(whole.tensordict["mrope_position_ids"][attended], expected.permute(1, 2, 0)[attended])
    assert whole.rows()[0].mrope_position_ids.shape[1] == 3
