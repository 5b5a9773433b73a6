"""SkyRL 0.3: what ``GeneratorInterface.generate`` returns.

Checked by ``skyrl.train.utils.trainer_utils.validate_generator_output``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fsm_rollout.adapters.requirements import experts_of, one_row_each, score_of, text_only, versions_of
from fsm_rollout.batch.rows import TrainingRow

if TYPE_CHECKING:
    from skyrl.train.generators.base import GeneratorOutput

TRAINER = "SkyRL without step-wise training"


def generator_output(rows: Sequence[TrainingRow], *, step_wise: bool = False) -> GeneratorOutput:
    """Return the rows as SkyRL's generator output, rewards per token (the score on the last trained one).

    With ``step_wise`` (SkyRL's ``generator.step_wise_trajectories``) a sample may have several rows; they are brought
    together, in the order of the samples' first rows, and the last of each is marked. ``env_metrics`` carries each
    row's weight versions and stop reason. Routed experts are given where they are known of every row, the last token of
    each with zeros, as SkyRL's own generator has it.

    Raises:
        BatchError: a row has no score, or (without ``step_wise``) a sample has several rows.
    """
    text_only(rows, "SkyRL")
    from skyrl.train.generators.base import TrajectoryID

    if not step_wise:
        one_row_each(rows, TRAINER)
    by_sample: dict[tuple[str, int], list[TrainingRow]] = {}
    for row in rows:
        score_of(row, "SkyRL")
        by_sample.setdefault((row.group_id, row.sample), []).append(row)
    ordered = [row for of_sample in by_sample.values() for row in of_sample]
    last = [number == len(of_sample) - 1 for of_sample in by_sample.values() for number in range(len(of_sample))]
    metrics = []
    for row in ordered:
        oldest, newest = versions_of(row)
        facts = {"min_weight_version": oldest, "max_weight_version": newest, "stop_reason": row.stop_reason}
        metrics.append({"trajectory_id": row.trajectory_id, **facts})
    known = [indices for row in ordered if (indices := experts_of(row)) is not None]
    experts = [np.append(indices, 0 * indices[:1], axis=0).tolist() for indices in known]
    return {
        "prompt_token_ids": [row.prompt_ids.tolist() for row in ordered],
        "response_ids": [row.response_ids.tolist() for row in ordered],
        "rewards": [row.scores.tolist() for row in ordered],
        "loss_masks": [row.mask.tolist() for row in ordered],
        "stop_reasons": [row.stop_reason or "abort" for row in ordered],
        "rollout_metrics": None,
        "rollout_logprobs": [row.logprobs.tolist() for row in ordered],
        "trajectory_ids": [TrajectoryID(row.group_id, row.sample) for row in ordered],
        "trajectory_generation_times": [
            row.metrics["generate_seconds"] or 0.0 for row, end in zip(ordered, last, strict=True) if end
        ],
        "rollout_expert_indices": None if len(experts) < len(ordered) else experts,
        "is_last_step": last if step_wise else None,
        "env_metrics": metrics,
        "pixel_values": None,
        "image_grid_thw": None,
    }
