"""Rows end to end as flat arrays by key, or as rectangles, and back; and what a TensorDict takes of either.

Invariant: ``unpad(pad(rows))`` and ``unpack(pack(rows))`` are the rows' arrays again, whatever the pad id (it may well
be a token that occurs: the attention mask tells them apart). A rectangle holds the packed values where the attention
mask is 1, so padded and packed batches cannot disagree.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from fsm_rollout.batch.columns import FURTHER, PER_TOKEN, PLAIN, RAGGED
from fsm_rollout.batch.memory import LARGE, room
from fsm_rollout.batch.plain import plain_columns, put_columns
from fsm_rollout.batch.rows import Array, FlatRows

THREADS = 4  # for large rectangles: the kernel clears new memory, and NumPy fills it, without Python's lock


def pack(rows: FlatRows) -> tuple[dict[str, Array], dict[str, npt.NDArray[np.int64]]]:
    """Return the keys of :data:`~fsm_rollout.batch.columns.PER_TOKEN` end to end without padding, and their offsets.

    Offsets ``[B + 1]`` of the rows are given once for each ragged dimension: ``prompts``, ``responses``, ``input_ids``.
    """
    prompts, responses, lengths = rows.lengths.values()
    in_prompts = np.repeat(np.tile([True, False], len(lengths)), np.stack([prompts, responses], axis=1).ravel())
    input_ids = np.empty(len(in_prompts), np.int32)
    input_ids[in_prompts], input_ids[~in_prompts] = rows.arrays["prompt_ids"], rows.arrays["response_ids"]
    flats: dict[str, Array] = {
        "input_ids": input_ids,
        "attention_mask": np.ones(len(input_ids), dtype=np.int8),
        "position_ids": np.arange(len(input_ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths),
        **_by_key(rows),
    }
    values = {key: flat.astype(PER_TOKEN[key].dtype, copy=False) for key, flat in flats.items()}
    return values, {along: np.concatenate([[0], np.cumsum(lengths)]) for along, lengths in rows.lengths.items()}


def _by_key(rows: FlatRows) -> dict[str, Array]:
    """Return what each key holds that is a field of its own, end to end, in the rows' own types."""
    held = {key: rows.arrays[column.field] for key, column in PER_TOKEN.items() if column.field}
    return {key: flat for key, flat in held.items() if key not in FURTHER or flat.size}


def unpack(
    values: Mapping[str, Array],
    offsets: Mapping[str, Array],
    facts: Sequence[Mapping[str, Any]],
    state_names: tuple[str, ...],
) -> FlatRows:
    """Return the rows of which :func:`pack` has returned ``values`` and ``offsets``."""
    arrays: dict[str, Array] = {}
    for key, column in PER_TOKEN.items():
        if column.field:
            flat = values.get(key, np.zeros((offsets[column.along][-1], *FURTHER.get(key, ()))))  # it may be left out
            arrays[column.field] = flat.astype(column.row_dtype)
    return FlatRows({along: np.diff(offsets[along]) for along in RAGGED}, arrays, facts, state_names)


def pad(rows: FlatRows, pad_id: int, prompt_width: int | None, response_width: int | None) -> dict[str, Array]:
    """Return the keys of :data:`~fsm_rollout.batch.columns.PER_TOKEN` as rectangles.

    They are padded to the longest row where no width is given: prompts on the left, responses on the right. The rows
    must fit.
    """
    # 1. Where in each rectangle a row's own values stand, bool: what is only padding is not looked at.
    prompts, responses, both = rows.lengths.values()
    left = int(prompts.max(initial=0)) if prompt_width is None else prompt_width
    right = int(responses.max(initial=0)) if response_width is None else response_width
    held = {"prompts": np.arange(left) >= (left - prompts)[:, None], "responses": np.arange(right) < responses[:, None]}
    held["input_ids"] = np.concatenate(list(held.values()), axis=1)
    # 2. Each key's rectangle, and what is in it.
    flats = _by_key(rows)

    def rectangle(key: str) -> Array:
        column, flat = PER_TOKEN[key], flats.get(key)  # none of its own: it follows from others
        where, dtype, fill = held[column.along], np.dtype(column.dtype), pad_id if column.fill is None else column.fill
        shape = where.shape if flat is None else where.shape + flat.shape[1:]
        if flat is not None and not fill and flat.dtype.kind != "f" and not flat.any():
            return np.zeros(shape, dtype)  # it takes no memory until somebody writes to it
        size = math.prod(shape) * dtype.itemsize
        if size < LARGE:
            made, cleared = np.zeros(shape, dtype), True
        else:
            tokens = int(rows.lengths[column.along].sum())
            written = size // where.size * tokens + shape[0] * mmap.PAGESIZE
            made, cleared = room(shape, dtype, filled=bool(fill) or 2 * written > size)
        if fill or not cleared:
            made.fill(fill)
        if flat is not None:
            made[where] = flat
        elif key == "input_ids":
            for along, part in (("prompts", made[:, :left]), ("responses", made[:, left:])):
                part[held[along]] = flats[along]
        elif key == "attention_mask":
            made[where] = 1
        else:  # after the last token, positions are its own, as verl counts
            np.subtract(np.arange(left + right), (left - prompts)[:, None], out=made)
            np.clip(made, 0, np.maximum(both - 1, 0)[:, None], out=made)
        return made

    # 3. Large ones side by side.
    keys = [*(key for key, column in PER_TOKEN.items() if not column.field), *flats]
    with ThreadPoolExecutor(THREADS) as threads:
        each = threads.map if 8 * held["input_ids"].size > LARGE else map
        return dict(zip(keys, each(rectangle, keys), strict=True))


def unpad(padded: Mapping[str, Array], facts: Sequence[Mapping[str, Any]], state_names: tuple[str, ...]) -> FlatRows:
    """Return the rows of which :func:`pad` has returned the rectangles."""
    width = padded["prompts"].shape[1]
    attended = padded["attention_mask"].astype(bool)
    masks = {"prompts": attended[:, :width], "responses": attended[:, width:], "input_ids": attended}
    offsets = {key: np.concatenate([[0], mask.sum(axis=1).cumsum()]) for key, mask in masks.items()}
    values = {key: rectangle[masks[PER_TOKEN[key].along]] for key, rectangle in padded.items()}
    return unpack(values, offsets, facts, state_names)


# -- as a TensorDict has them ---------------------------------------------------------------------------------------


def narrowed(
    tensordict: TensorDict, numbers: torch.Tensor, prompts: torch.Tensor, responses: torch.Tensor
) -> TensorDict:
    """Return some rows of a padded batch, without the columns that are padding in all of them.

    ``prompts`` and ``responses`` are the lengths of all its rows, int64 ``[B]``.
    """
    width = tensordict.get("prompts").shape[1]
    left = width - int(prompts[numbers].max()) if len(numbers) else width
    right = int(responses[numbers].max()) if len(numbers) else 0
    places = {"prompts": slice(left, None), "input_ids": slice(left, width + right), "responses": slice(0, right)}
    tensors = {
        key: value[numbers][:, places[PER_TOKEN[key].along]].clone() if key in PER_TOKEN else value[numbers]
        for key, value in tensordict.items()
        if key not in PLAIN
    }
    chosen = TensorDict(tensors, batch_size=[len(numbers)], device=tensordict.device)
    facts = plain_columns(tensordict)
    put_columns(chosen, [facts[i] for i in numbers.tolist()])
    return chosen


def jagged(values: Mapping[str, torch.Tensor], offsets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return each key as a nested tensor; keys of one ragged dimension share its offsets, so torch can combine them."""
    return {
        key: torch.nested.nested_tensor_from_jagged(flat, offsets[PER_TOKEN[key].along]) for key, flat in values.items()
    }
