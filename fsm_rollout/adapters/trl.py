"""TRL 1.16: what GRPOTrainer's ``rollout_func`` returns, and the samples of AsyncGRPO's queue.

The plugs that run rollouts for these trainers are in :mod:`fsm_rollout.adapters.trl_plug`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fsm_rollout.adapters.requirements import one_row_each, text_only, versions_of, whole
from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.errors import BatchError

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

TRAINER = "GRPOTrainer's rollout_func"


def rollout_func_result(rows: Sequence[TrainingRow]) -> dict[str, list[object]]:
    """Return what a ``rollout_func`` returns: lists over the prompts it was given, one row each, in their order.

    ``env_mask`` is 1 on trained tokens. ``score`` (``None`` where there is none) and ``weight_versions`` (per token,
    -1 where none sampled) reach the reward functions as keyword arguments: :func:`score_reward` hands the score on. So
    does ``teacher_logprobs``, where there are teachers: by name, of each token of the completion.

    Pictures of prompts are not in it: the trainer makes the model's inputs from its dataset's column ``images``.

    Raises:
        BatchError: a sample has several rows, or shows pictures after its prompt.
    """
    for row in rows:
        if row.media and row.media[-1].end > len(row.prompt_ids):
            raise BatchError(
                f"row {row.row_id} shows pictures after its prompt, and {TRAINER} has no way for them: the trainer "
                "feeds the model those of its dataset alone; show all in the prompt, or train such agents elsewhere"
            )
    one_row_each(rows, TRAINER)
    taught = [{name: row.teacher_logprobs[:, i].tolist() for i, name in enumerate(row.teachers)} for row in rows]
    return {
        "prompt_ids": [row.prompt_ids.tolist() for row in rows],
        "completion_ids": [row.response_ids.tolist() for row in rows],
        "logprobs": [row.logprobs.tolist() for row in rows],
        "env_mask": [row.mask.tolist() for row in rows],
        "score": [row.score for row in rows],
        "weight_versions": [row.versions.tolist() for row in rows],
        "trajectory_id": [row.trajectory_id for row in rows],
        **({"teacher_logprobs": list(taught)} if any(taught) else {}),
    }


def score_reward(
    completions: Sequence[object], *, score: Sequence[float | None], samples_score: Sequence[float | None] = (),
    log_metric: Callable[[str, float], None] = lambda name, value: None, **_: object,
) -> list[float | None]:  # fmt: skip
    """Return the rollout's own scores: a reward function for GRPOTrainer, which leaves out what has none.

    Where the trainer is given some of a prompt's samples, what all came to is logged as ``samples_score``.
    """
    if known := [each for each in samples_score if each is not None]:
        log_metric("samples_score", sum(known) / len(known))
    return list(score)


def rollout_samples(batch: TrajectoryBatch, *, first_group_id: int = 0) -> list[RolloutSample]:
    """Return the samples of AsyncGRPO's queue, one for each row that has a score; rows of a sample share its group.

    ``model_version`` is that of the oldest trained token, by which the trainer drops what is stale. Groups are numbered
    from ``first_group_id``, which must go on from step to step. Messages, which the trainer only logs, are left out.

    Raises:
        BatchError: no row has a score.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    advantages = batch.advantages()
    scored = batch.select(~advantages.isnan())
    if len(batch) and not len(scored):
        raise BatchError(f"none of {len(batch)} rows has a score to learn from; give the rollout a reward")
    rows = scored.rows()
    text_only(rows, "TRL's AsyncGRPO")
    samples = []
    for row, advantage, group in zip(
        rows, scored.advantages().tolist(), scored.tensordict["group_index"].tolist(), strict=True
    ):
        oldest, newest = versions_of(row)
        samples.append(
            RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64),
                completion_mask=whole(row, row.mask, 0).astype(np.int64),
                old_log_probs=whole(row, row.logprobs, 0.0),
                advantage=advantage,
                model_version=oldest,
                group_id=first_group_id + group,
                metrics={"reward": float(row.score or 0.0), "weight_version_max": float(newest)},
            )
        )
    return samples
