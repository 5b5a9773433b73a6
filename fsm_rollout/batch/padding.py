"""Rows as rectangles or as flat arrays, and back.

Invariant: ``unpad(pad(rows))`` and ``unpack(pack(rows))`` are the rows' arrays again, whatever the pad id (it may well
be a token that occurs: the attention mask tells them apart).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.trajectory.tokens import NO_VERSION

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A tensor with one value per response token: which array of a row it holds, the types there, its padding."""

    of: str
    row_type: type[np.generic]
    type: type[np.generic]
    fill: float


RESPONSE_COLUMNS: Mapping[str, Column] = {
    "response_mask": Column("mask", np.int8, np.int64, 0),
    "rollout_log_probs": Column("logprobs", np.float32, np.float32, 0.0),
    "token_level_scores": Column("scores", np.float32, np.float32, 0.0),
    "weight_versions": Column("versions", np.int32, np.int32, NO_VERSION),
    "state_ids": Column("state_ids", np.int32, np.int32, -1),
}

RAGGED_OF: Mapping[str, str] = {
    "prompts": "prompts",
    "responses": "responses",
    "input_ids": "input_ids",
    "attention_mask": "input_ids",
    "position_ids": "input_ids",
    **dict.fromkeys(RESPONSE_COLUMNS, "responses"),
}
"""Every two-dimensional key, and the one that says how long each of its rows is."""


def pad(
    rows: Sequence[TrainingRow], pad_id: int, prompt_width: int | None, response_width: int | None
) -> dict[str, Array]:
    """Return the keys of :data:`RAGGED_OF` as rectangles, padded to the longest row where no width is given.

    Prompts are padded on the left, responses on the right. The rows must fit.
    """
    prompt_lengths, response_lengths = _lengths(rows)
    left = int(prompt_lengths.max(initial=0)) if prompt_width is None else prompt_width
    right = int(response_lengths.max(initial=0)) if response_width is None else response_width

    input_ids = np.full((len(rows), left + right), pad_id, dtype=np.int64)
    padded = {
        key: np.full((len(rows), right), column.fill, dtype=column.type) for key, column in RESPONSE_COLUMNS.items()
    }
    for i, row in enumerate(rows):
        input_ids[i, left - len(row.prompt_ids) : left] = row.prompt_ids
        input_ids[i, left : left + len(row.response_ids)] = row.response_ids
        for key, column in RESPONSE_COLUMNS.items():
            padded[key][i, : len(row.response_ids)] = getattr(row, column.of)

    place = np.arange(left + right)
    attended = (place >= left - prompt_lengths[:, None]) & (place < left + response_lengths[:, None])
    return padded | {
        "prompts": input_ids[:, :left].copy(),
        "responses": input_ids[:, left:].copy(),
        "input_ids": input_ids,
        "attention_mask": attended.astype(np.int64),
        # as verl counts: 0 in the left padding, the last token's in the right
        "position_ids": np.maximum(attended.cumsum(axis=1, dtype=np.int64) - 1, 0),
    }


def unpad(padded: Mapping[str, Array]) -> dict[str, list[Array]]:
    """Return each array of the rows, by its name in :class:`~fsm_rollout.batch.rows.TrainingRow`, as a list over the rows."""
    width = padded["prompts"].shape[1]
    starts = width - padded["attention_mask"][:, :width].sum(axis=1)
    ends = padded["attention_mask"][:, width:].sum(axis=1)
    arrays = {
        "prompt_ids": [row[at:].astype(np.int32) for row, at in zip(padded["prompts"], starts, strict=True)],
        "response_ids": [row[:at].astype(np.int32) for row, at in zip(padded["responses"], ends, strict=True)],
    }
    for key, column in RESPONSE_COLUMNS.items():
        arrays[column.of] = [row[:at].astype(column.row_type) for row, at in zip(padded[key], ends, strict=True)]
    return arrays


def pack(rows: Sequence[TrainingRow]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the keys of :data:`RAGGED_OF` end to end without padding, and the offsets ``[B + 1]`` of their rows.

    Offsets are given once for each ragged dimension: ``prompts``, ``responses``, ``input_ids``.
    """
    prompt_lengths, response_lengths = _lengths(rows)
    lengths = prompt_lengths + response_lengths
    values = {
        "prompts": _joined((row.prompt_ids for row in rows), np.int64),
        "responses": _joined((row.response_ids for row in rows), np.int64),
        "input_ids": _joined((ids for row in rows for ids in (row.prompt_ids, row.response_ids)), np.int64),
        "attention_mask": np.ones(lengths.sum(), dtype=np.int64),
        "position_ids": _joined(map(np.arange, lengths), np.int64),
    }
    for key, column in RESPONSE_COLUMNS.items():
        values[key] = _joined((getattr(row, column.of) for row in rows), column.type)
    ragged = {"prompts": prompt_lengths, "responses": response_lengths, "input_ids": lengths}
    return values, {key: np.concatenate([[0], np.cumsum(each)]).astype(np.int64) for key, each in ragged.items()}


def unpack(values: Mapping[str, Array], offsets: Mapping[str, Array]) -> dict[str, list[Array]]:
    """Return each array of the rows, by its name in :class:`~fsm_rollout.batch.rows.TrainingRow`, as a list over the rows."""

    def cut(key: str, row_type: type[np.generic]) -> list[Array]:
        flat = values[key].astype(row_type)
        return [flat[start:end] for start, end in pairwise(offsets[RAGGED_OF[key]].tolist())]

    return {
        "prompt_ids": cut("prompts", np.int32),
        "response_ids": cut("responses", np.int32),
        **{column.of: cut(key, column.row_type) for key, column in RESPONSE_COLUMNS.items()},
    }


def _lengths(rows: Sequence[TrainingRow]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return (
        np.array([len(row.prompt_ids) for row in rows], dtype=np.int64),
        np.array([len(row.response_ids) for row in rows], dtype=np.int64),
    )


def _joined(pieces: Iterable[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate([np.zeros(0, dtype), *pieces]).astype(dtype, copy=False)
