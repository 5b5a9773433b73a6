"""Rows end to end in flat arrays, or as rectangles, and back.

Invariant: ``unpad(pad(rows))`` and ``unpack(pack(rows))`` are the rows' arrays again, whatever the pad id (it may well
be a token that occurs: the attention mask tells them apart). A rectangle holds the packed values where the attention
mask is 1, so padded and packed batches cannot disagree.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.trajectory.tokens import NO_VERSION

Array = npt.NDArray[np.generic]
LARGE = 2**22  # from so many bytes on, NumPy asks for huge pages


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
    "sampling_mask_counts": Column("sampling_mask_counts", np.int32, np.int32, 0),
}

# Every key with a value for each token, and the one that says how long each of its rows is. Only `routed_experts` has
# further dimensions, and is left out where they are empty.
RAGGED_OF: Mapping[str, str] = {
    "prompts": "prompts",
    "responses": "responses",
    "input_ids": "input_ids",
    "attention_mask": "input_ids",
    "position_ids": "input_ids",
    **dict.fromkeys(RESPONSE_COLUMNS, "responses"),
    "routed_experts": "input_ids",
}


def pack(rows: Sequence[TrainingRow]) -> tuple[dict[str, Array], dict[str, npt.NDArray[np.int64]]]:
    """Return the keys of :data:`RAGGED_OF` end to end without padding, and the offsets ``[B + 1]`` of their rows.

    Offsets are given once for each ragged dimension: ``prompts``, ``responses``, ``input_ids``.
    """
    prompts = np.array([len(row.prompt_ids) for row in rows], dtype=np.int64)
    responses = np.array([len(row.response_ids) for row in rows], dtype=np.int64)
    lengths = {"prompts": prompts, "responses": responses, "input_ids": prompts + responses}
    offsets = {key: np.concatenate([[0], np.cumsum(counts)]).astype(np.int64) for key, counts in lengths.items()}
    total = offsets["input_ids"][-1]
    values: dict[str, Array] = {
        "prompts": _joined((row.prompt_ids for row in rows), np.int64),
        "responses": _joined((row.response_ids for row in rows), np.int64),
        "input_ids": _joined((ids for row in rows for ids in (row.prompt_ids, row.response_ids)), np.int64),
        "attention_mask": np.ones(total, dtype=np.int64),
        "position_ids": np.arange(total) - np.repeat(offsets["input_ids"][:-1], lengths["input_ids"]),
    }
    for key, column in RESPONSE_COLUMNS.items():
        values[key] = _joined((getattr(row, column.of) for row in rows), column.type)
    if any(row.routed_experts.size for row in rows):
        values["routed_experts"] = np.concatenate([row.routed_experts for row in rows])
    return values, offsets


def unpack(values: Mapping[str, Array], offsets: Mapping[str, Array]) -> dict[str, list[Array]]:
    """Return each array of the rows, by its name in :class:`TrainingRow`, as a list over the rows."""

    def cut(key: str, row_type: type[np.generic]) -> list[Array]:
        starts = offsets[RAGGED_OF[key]].tolist()
        flat = values[key].astype(row_type) if key in values else np.zeros((starts[-1], 0, 0), row_type)
        return [flat[start:end] for start, end in pairwise(starts)]

    return {
        "prompt_ids": cut("prompts", np.int32),
        "response_ids": cut("responses", np.int32),
        **{column.of: cut(key, column.row_type) for key, column in RESPONSE_COLUMNS.items()},
        "routed_experts": cut("routed_experts", np.int16),
    }


def pad(
    rows: Sequence[TrainingRow], pad_id: int, prompt_width: int | None, response_width: int | None
) -> dict[str, Array]:
    """Return the keys of :data:`RAGGED_OF` as rectangles, padded to the longest row where no width is given.

    Prompts are padded on the left, responses on the right. The rows must fit.
    """
    # 1. Where in each rectangle, read line by line, a row's own values stand: what is only padding is not looked at.
    values, offsets = pack(rows)
    lengths = {key: np.diff(starts) for key, starts in offsets.items()}
    left = int(lengths["prompts"].max(initial=0)) if prompt_width is None else prompt_width
    right = int(lengths["responses"].max(initial=0)) if response_width is None else response_width
    widths = {"prompts": left, "responses": right, "input_ids": left + right}
    first = {key: np.arange(len(rows)) * width for key, width in widths.items()}
    for key in ("prompts", "input_ids"):
        first[key] += left - lengths["prompts"]
    places = {
        key: np.arange(offsets[key][-1]) + np.repeat(first[key] - offsets[key][:-1], lengths[key]) for key in widths
    }
    # 2. Each key's rectangle; after the last token, positions are its own, as verl counts.
    fills: dict[str, float] = {
        "prompts": pad_id,
        "responses": pad_id,
        "input_ids": pad_id,
        "attention_mask": 0,
        "position_ids": 0,
    }
    fills |= {key: column.fill for key, column in RESPONSE_COLUMNS.items()} | {"routed_experts": -1}
    padded: dict[str, Array] = {}
    for key, flat in values.items():
        ragged, further = RAGGED_OF[key], flat.shape[1:]
        column = _zeros(len(rows) * widths[ragged] * math.prod(further), flat.dtype)
        if fills[key]:  # zeros are there already, in memory that nobody has touched
            column.fill(fills[key])
        column = column.reshape(-1, *further)
        column[places[ragged]] = flat
        padded[key] = column.reshape(len(rows), widths[ragged], *further)
    behind = left + lengths["responses"]
    for row, length in enumerate(lengths["input_ids"].tolist()):
        padded["position_ids"][row, behind[row] :] = max(0, length - 1)
    return padded


def unpad(padded: Mapping[str, Array]) -> dict[str, list[Array]]:
    """Return each array of the rows, by its name in :class:`TrainingRow`, as a list over the rows."""
    width = padded["prompts"].shape[1]
    attended = padded["attention_mask"].astype(bool)
    masks = {"prompts": attended[:, :width], "responses": attended[:, width:], "input_ids": attended}
    offsets = {key: np.concatenate([[0], mask.sum(axis=1).cumsum()]) for key, mask in masks.items()}
    return unpack({key: values[masks[RAGGED_OF[key]]] for key, values in padded.items()}, offsets)


def _zeros(length: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return zeros of which only those pages cost memory and time that somebody writes to.

    NumPy's own ask for huge pages, and the kernel clears 2 MB of them for one value.
    """
    if length * dtype.itemsize < LARGE:
        return np.zeros(length, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, length * dtype.itemsize, flags=flags)
    return np.frombuffer(memory, dtype)


def _joined(pieces: Iterable[npt.ArrayLike], dtype: type[np.generic]) -> Array:
    return np.concatenate([np.zeros(0, dtype), *pieces]).astype(dtype, copy=False)
