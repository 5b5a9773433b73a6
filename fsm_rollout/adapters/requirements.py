"""What trainers demand of rows, and the errors that say what to set when a row does not meet it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fsm_rollout.batch.media import TOKEN_TYPES, row_inputs
from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.batch.taught import column_of
from fsm_rollout.errors import BatchError


def one_row_each(rows: Sequence[TrainingRow], trainer: str) -> None:
    """Raise BatchError if a sample has several rows, for a trainer that takes one for each prompt it gave."""
    counts = Counter((row.group_id, row.sample) for row in rows)
    for row in rows:
        if (number := counts[row.group_id, row.sample]) > 1:
            contexts = sorted({other.context for other in rows if other.row_id[0] == row.trajectory_id})
            raise BatchError(
                f"sample {row.sample} of group '{row.group_id}' has {number} rows (contexts {', '.join(contexts)} of "
                f"trajectory {row.trajectory_id}), and {trainer} takes one; set `trainable: false` on all contexts of "
                "the agent but one, and use no `reset: true` and no sub-agents in it"
            )


def text_only(rows: Sequence[TrainingRow], trainer: str) -> None:
    """Raise BatchError if a row shows pictures, for a trainer that would be given their ids without them."""
    for row in rows:
        if row.media:
            raise BatchError(
                f"row {row.row_id} shows {len(row.media)} picture{'s' * (len(row.media) > 1)}, and nothing carries "
                f"them to {trainer} yet; it would train on their ids without them"
            )


def inputs_of(row: TrainingRow, processor: Any, trainer: str) -> dict[str, torch.Tensor] | None:
    """Return what the model is fed of a row's pictures, types of tokens apart; ``None`` where it shows none.

    Raises:
        BatchError: it shows some, and nobody gave the model's processor.
    """
    if not row.media:
        return None
    if processor is None:
        raise BatchError(
            f"row {row.row_id} shows {len(row.media)} picture{'s' * (len(row.media) > 1)}, and {trainer} would train "
            "on their ids without them; give the model's processor, as `batch.processor` is"
        )
    inputs = row_inputs(row.media, len(row.prompt_ids) + len(row.response_ids), processor)
    return {key: value for key, value in inputs.items() if not key.endswith(TOKEN_TYPES)}


def taught(row: TrainingRow, teacher: str | None) -> npt.NDArray[np.float32] | None:
    """Return what a teacher makes of each response token, NaN where it has failed; ``None``: there are no teachers.

    Raises:
        BatchError: the teacher is none of the row's, or not named although there are several.
    """
    if teacher is None and not row.teachers:
        return None
    return row.teacher_logprobs[:, column_of(teacher, list(row.teachers), f"row {row.row_id}")]


def score_of(row: TrainingRow, trainer: str) -> float:
    """Return a row's score; BatchError if it has none, for a trainer that cannot represent that."""
    if row.score is None:
        raise BatchError(
            f"row {row.row_id} has no score, and {trainer} would read that as a number; leave such rows out "
            "(`batch.select(~batch.advantages().isnan())`), or give the rollout a reward that scores them"
        )
    return row.score


def trained_turns(row: TrainingRow) -> Iterator[slice]:
    """Yield the stretches of a row's response that are trained, one for each generation, in order."""
    turns = np.where(row.mask == 1, row.turn_ids, -1)
    edges = np.flatnonzero(np.diff(turns, prepend=-1, append=-1))
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if turns[start] >= 0:
            yield slice(start, end)


def versions_of(row: TrainingRow) -> tuple[int, int]:
    """Return the oldest and the newest weight version that sampled a trained token of a row."""
    trained = row.versions[row.mask == 1]
    return int(trained.min()), int(trained.max())


def experts_of(row: TrainingRow, tokens: int | None = None) -> npt.NDArray[np.int32] | None:
    """Return the routed experts of a row's first ``tokens`` (or all) but the last of them, ``[T - 1, layers, top_k]``.

    ``None``: the engine says none, or not of every such token (a turn was cut off, or sampled by another replica).
    """
    experts = row.routed_experts[:tokens][:-1]
    return experts.astype(np.int32) if experts.size and (experts >= 0).all() else None


def whole(row: TrainingRow, values: np.ndarray, fill: float) -> np.ndarray:
    """Return values of a row's response with ``fill`` before them for its prompt: ``[P + R]``, of the same type."""
    return np.concatenate([np.full(len(row.prompt_ids), fill, dtype=values.dtype), values])
