"""AReaL 1.0.4: what ``RolloutWorkflow.arun_episode`` returns.

Checked by ``areal.infra.workflow_executor.check_trajectory_format``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fsm_rollout.adapters.requirements import score_of, text_only, whole
from fsm_rollout.batch.rows import TrainingRow

TRAINER = "AReaL"


def trajectory(rows: Sequence[TrainingRow]) -> dict[str, torch.Tensor] | None:
    """Return the rows as tensors ``[rows, T]``, padded on the right; ``None`` (rejected) without rows.

    ``input_ids``, ``loss_mask``, ``versions`` and ``turn_ids`` (both -1 on prompts and padding): int32; ``logprobs``:
    float32; ``attention_mask``: bool; ``rewards``: float32 ``[rows]``.

    Raises:
        BatchError: a row has no score.
    """
    text_only(rows, "AReaL")
    if not rows:
        return None
    columns = {
        "input_ids": ([np.concatenate([row.prompt_ids, row.response_ids]) for row in rows], torch.int32, 0),
        "loss_mask": ([whole(row, row.mask, 0) for row in rows], torch.int32, 0),
        "logprobs": ([whole(row, row.logprobs, 0.0) for row in rows], torch.float32, 0.0),
        "versions": ([whole(row, row.versions, -1) for row in rows], torch.int32, -1),
        "turn_ids": ([whole(row, row.turn_ids, -1) for row in rows], torch.int32, -1),
        "attention_mask": ([np.ones(len(row.prompt_ids) + len(row.mask)) for row in rows], torch.bool, False),
    }
    tensors = {
        key: torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(array).to(dtype) for array in arrays], batch_first=True, padding_value=fill
        )
        for key, (arrays, dtype, fill) in columns.items()
    }
    tensors["rewards"] = torch.tensor([score_of(row, TRAINER) for row in rows], dtype=torch.float32)
    return tensors
