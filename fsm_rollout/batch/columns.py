"""The columns of a batch: one table, from which packing, padding, storage, exports and the documentation follow.

Invariant: a key of a batch's TensorDict is in this table, and each field of a row
(:class:`~fsm_rollout.batch.rows.TrainingRow`, its ``state_names`` apart) is in exactly one column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from fsm_rollout.trajectory.tokens import NO_VERSION


class Along(StrEnum):
    """What a column has one value for each of; the first three are keys, whose lengths are those of the others."""

    PROMPTS = "prompts"
    """The tokens of the prompts, padded left."""
    RESPONSES = "responses"
    """The tokens of the responses, padded right."""
    INPUT_IDS = "input_ids"
    """All tokens: prompts and responses side by side."""
    ROWS = "rows"
    """The rows."""


@dataclass(frozen=True, slots=True)
class Column:
    """One key of a batch, and which field of a row it holds."""

    key: str
    along: Along
    dtype: type[np.generic] | None
    """The tensor's type; ``None``: no tensor, but plain data."""
    field: str = ""
    """Empty: no field of its own; it follows from others."""
    row_dtype: type[np.signedinteger[Any] | np.floating[Any]] = np.int32
    """The type of a row's array."""
    fill: float | None = 0
    """What stands where there is no token; ``None``: the batch's ``pad_id``."""


MEDIA = "media"
"""The column of pictures."""
OPTIONAL: Mapping[str, type] = {MEDIA: list, "teachers": dict, "teacher_top_ids": list, "teacher_top_logprobs": list}
"""The columns that are no tensors and are left out where no row has anything in them; what each then holds is empty."""
COLUMNS: Mapping[str, Column] = {
    column.key: column
    for column in (
        Column("prompts", Along.PROMPTS, np.int64, "prompt_ids", np.int32, fill=None),
        Column("responses", Along.RESPONSES, np.int64, "response_ids", np.int32, fill=None),
        Column("input_ids", Along.INPUT_IDS, np.int64, fill=None),
        Column("attention_mask", Along.INPUT_IDS, np.int64),
        Column("roles", Along.INPUT_IDS, np.int8, "roles", np.int8, fill=-1),
        Column("position_ids", Along.INPUT_IDS, np.int64),
        Column("response_mask", Along.RESPONSES, np.int64, "mask", np.int8),
        Column("rollout_log_probs", Along.RESPONSES, np.float32, "logprobs", np.float32),
        Column("token_level_scores", Along.RESPONSES, np.float32, "scores", np.float32),
        Column("weight_versions", Along.RESPONSES, np.int32, "versions", np.int32, fill=NO_VERSION),
        Column("state_ids", Along.RESPONSES, np.int32, "state_ids", np.int32, fill=-1),
        Column("turn_ids", Along.RESPONSES, np.int32, "turn_ids", np.int32, fill=-1),
        Column("temperatures", Along.RESPONSES, np.float32, "temperatures", np.float32, fill=1),
        Column("sampling_mask_counts", Along.RESPONSES, np.int32, "sampling_mask_counts", np.int32),
        # These have further dimensions, and are left out where they are empty.
        Column("teacher_logprobs", Along.RESPONSES, np.float32, "teacher_logprobs", np.float32),
        Column("teacher_versions", Along.RESPONSES, np.int32, "teacher_versions", np.int32, fill=NO_VERSION),
        Column("teacher_top_counts", Along.RESPONSES, np.int32, "teacher_top_counts", np.int32),
        Column("routed_experts", Along.INPUT_IDS, np.int16, "routed_experts", np.int16, fill=-1),
        Column("mrope_position_ids", Along.INPUT_IDS, np.int64, "mrope_position_ids", np.int32),
        Column("trajectory_scores", Along.ROWS, np.float32, "score"),
        Column("group_index", Along.ROWS, np.int64),
        Column("sample", Along.ROWS, np.int64, "sample"),
        *(
            Column(name, Along.ROWS, None, name)
            for name in (
                "group_id", "trajectory_id", "stream", "shares", "context", "agent", "stop_reason", "failure",
                "num_turns", "sampling", "sampling_mask", "metrics", "turn_scores", "state_scores", "tool_rewards",
                "tool_reward_turns", "reward_parts", "extra", *OPTIONAL,
            )
        ),
    )
}  # fmt: skip
PER_TOKEN: Mapping[str, Column] = {key: column for key, column in COLUMNS.items() if column.along != Along.ROWS}
"""The columns with a value for each token: tensors that are padded, or jagged."""
RAGGED = (Along.PROMPTS, Along.RESPONSES, Along.INPUT_IDS)
"""The dimensions along which rows differ in length."""
TAUGHT = ("teacher_logprobs", "teacher_versions", "teacher_top_counts")
"""The columns of teachers, each with one value per token and teacher."""
FURTHER: Mapping[str, tuple[int, ...]] = {
    "routed_experts": (0, 0), "mrope_position_ids": (0,), **dict.fromkeys(TAUGHT, (0,))
}  # fmt: skip
"""The columns with further dimensions, and those while they are empty."""
NON_TENSOR_KEYS = tuple(key for key, column in COLUMNS.items() if column.dtype is None and key not in OPTIONAL)
"""The other columns that are no tensors: one value per row."""
PLAIN = (*NON_TENSOR_KEYS, *OPTIONAL)
"""All columns that are no tensors."""
MADE = ("multi_modal_data", "multi_modal_inputs")
"""What follows from pictures: it is there where rows have some, and is made again from them."""
