"""Rows end to end in flat arrays, or as rectangles, and back.

Invariant: ``unpad(pad(rows))`` and ``unpack(pack(rows))`` are the rows' arrays again, whatever the pad id (it may well
be a token that occurs: the attention mask tells them apart). A rectangle holds the packed values where the attention
mask is 1, so padded and packed batches cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.trajectory.tokens import NO_VERSION

Array = npt.NDArray[np.generic]


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
    "turn_ids": Column("turn_ids", np.int32, np.int32, -1),
    "temperatures": Column("temperatures", np.float32, np.float32, 1.0),
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


def pack(rows: Sequence[TrainingRow]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the keys of :data:`RAGGED_OF` end to end without padding, and the offsets ``[B + 1]`` of their rows.

    Offsets are given once for each ragged dimension: ``prompts``, ``responses``, ``input_ids``.
    """
    prompts = np.array([len(row.prompt_ids) for row in rows], dtype=np.int64)
    responses = np.array([len(row.response_ids) for row in rows], dtype=np.int64)
    lengths = prompts + responses
    values = {
        "prompts": _joined((row.prompt_ids for row in rows), np.int64),
        "responses": _joined((row.response_ids for row in rows), np.int64),
        "input_ids": _joined((ids for row in rows for ids in (row.prompt_ids, row.response_ids)), np.int64),
        "attention_mask": np.ones(lengths.sum(), dtype=np.int64),
        "position_ids": _joined(map(np.arange, lengths), np.int64),
    }
    for key, column in RESPONSE_COLUMNS.items():
        values[key] = _joined((getattr(row, column.of) for row in rows), column.type)
    ragged = {"prompts": prompts, "responses": responses, "input_ids": lengths}
    return values, {key: np.concatenate([[0], np.cumsum(counts)]).astype(np.int64) for key, counts in ragged.items()}


def unpack(values: Mapping[str, Array], offsets: Mapping[str, Array]) -> dict[str, list[Array]]:
    """Return each array of the rows, by its name in :class:`TrainingRow`, as a list over the rows."""

    def cut(key: str, row_type: type[np.generic]) -> list[Array]:
        flat = values[key].astype(row_type)
        return [flat[start:end] for start, end in pairwise(offsets[RAGGED_OF[key]].tolist())]

    return {
        "prompt_ids": cut("prompts", np.int32),
        "response_ids": cut("responses", np.int32),
        **{column.of: cut(key, column.row_type) for key, column in RESPONSE_COLUMNS.items()},
    }


def pad(
    rows: Sequence[TrainingRow], pad_id: int, prompt_width: int | None, response_width: int | None
) -> dict[str, Array]:
    """Return the keys of :data:`RAGGED_OF` as rectangles, padded to the longest row where no width is given.

    Prompts are padded on the left, responses on the right. The rows must fit.
    """
    # 1. Where in each rectangle a row's own values stand.
    values, offsets = pack(rows)
    prompts, responses = (np.diff(offsets[key])[:, None] for key in ("prompts", "responses"))
    left = int(prompts.max(initial=0)) if prompt_width is None else prompt_width
    right = int(responses.max(initial=0)) if response_width is None else response_width
    place = np.arange(left + right)
    attended = (place >= left - prompts) & (place < left + responses)
    # 2. The ids, of which prompts and responses are the two halves.
    input_ids = np.full(attended.shape, pad_id, dtype=np.int64)
    input_ids[attended] = values["input_ids"]
    padded: dict[str, Array] = {
        "prompts": input_ids[:, :left].copy(),
        "responses": input_ids[:, left:].copy(),
        "input_ids": input_ids,
        "attention_mask": attended.astype(np.int64),
        # as verl counts: 0 in the left padding, the last token's in the right
        "position_ids": np.maximum(attended.cumsum(axis=1, dtype=np.int64) - 1, 0),
    }
    # 3. What there is one of per response token.
    for key, column in RESPONSE_COLUMNS.items():
        padded[key] = np.full((len(rows), right), column.fill, dtype=column.type)
        padded[key][attended[:, left:]] = values[key]
    return padded


def unpad(padded: Mapping[str, Array]) -> dict[str, list[Array]]:
    """Return each array of the rows, by its name in :class:`TrainingRow`, as a list over the rows."""
    width = padded["prompts"].shape[1]
    attended = padded["attention_mask"].astype(bool)
    masks = {"prompts": attended[:, :width], "responses": attended[:, width:]}
    keys = ("prompts", "responses", *RESPONSE_COLUMNS)
    offsets = {key: np.concatenate([[0], mask.sum(axis=1).cumsum()]) for key, mask in masks.items()}
    return unpack({key: padded[key][masks[RAGGED_OF[key]]] for key in keys}, offsets)


def _joined(pieces: Iterable[npt.ArrayLike], dtype: type[np.generic]) -> Array:
    return np.concatenate([np.zeros(0, dtype), *pieces]).astype(dtype, copy=False)
