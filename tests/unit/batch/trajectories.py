"""Trajectories of one turn for batches, and what tensors hold."""

from typing import Any

import torch

from fsm_rollout.trajectory.events import AnyEvent, Ended, Scored
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.events import generated, opened, prompted

DTYPES = {
    **dict.fromkeys(
        ("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids"), torch.int64
    ),
    **dict.fromkeys(("rollout_log_probs", "token_level_scores", "trajectory_scores", "temperatures"), torch.float32),
    **dict.fromkeys(("weight_versions", "state_ids", "turn_ids", "sampling_mask_counts"), torch.int32),
    **dict.fromkeys(("group_index", "sample"), torch.int64),
    "roles": torch.int8,
}
NO_EXPERTS = [[-1, -1], [-1, -1]]
USER = {"role": "user", "content": "?"}


def history(trajectory_id: str, sampled: int = 2, extra: dict[str, Any] | None = None, **facts: Any) -> list[AnyEvent]:
    """Return how a trajectory of one turn begins."""
    begun = prompted(trajectory_id, group_id="g", at=1.0, agent="solver", messages=[USER], extra=extra or {})
    turn = {"seconds": 0.75, "temperature": 0.5, "top_k": 8, "versions": [(sampled, 4)]}
    opening = opened(state="GENERATING", messages=[{"role": "system", "content": "!"}, USER])
    return [begun, opening, generated(sampled=sampled, **(turn | facts))]


def trajectory(
    trajectory_id: str, sampled: int = 2, *scores: Scored, extra: dict[str, Any] | None = None
) -> Trajectory:
    """Return an ended trajectory of one turn of ``sampled`` tokens at -0.5 each, after a prompt of two."""
    ended = Ended(at=3.5, stop_reason="answered")
    return Trajectory.fold([*history(trajectory_id, sampled, extra), ended, *scores])
