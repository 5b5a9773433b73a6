"""Rows end to end as flat arrays by key, or as rectangles, and back; and what a TensorDict takes of either.

Invariant: ``unpad(pad(rows))`` and ``unpack(pack(rows))`` are the rows' arrays again, whatever the pad id (it may well
be a token that occurs: the attention mask tells them apart). A rectangle holds the packed values where the attention
mask is 1, so padded and packed batches cannot disagree.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from fsm_rollout.batch.columns import FURTHER, PER_TOKEN, PLAIN, RAGGED
from fsm_rollout.batch.plain import plain_columns, put_columns
from fsm_rollout.batch.rows import Array, FlatRows

LARGE = 2**22  # from so many bytes on, NumPy asks for huge pages
THREADS = 4  # for large rectangles: the kernel clears new memory, and NumPy fills it, without Python's lock


def pack(rows: FlatRows) -> tuple[dict[str, Array], dict[str, npt.NDArray[np.int64]]]:
    """Return the keys of :data:`~fsm_rollout.batch.columns.PER_TOKEN` end to end without padding, and their offsets.

    Offsets ``[B + 1]`` of the rows are given once for each ragged dimension: ``prompts``, ``responses``, ``input_ids``.
    """
    values = {key: flat.astype(PER_TOKEN[key].dtype, copy=False) for key, flat in _by_key(rows).items()}
    return values, {along: np.concatenate([[0], np.cumsum(lengths)]) for along, lengths in rows.lengths.items()}


def _by_key(rows: FlatRows) -> dict[str, Array]:
    """Return what each key holds, end to end, in the rows' own types."""
    prompts, responses, lengths = rows.lengths.values()
    in_prompts = np.repeat(np.tile([True, False], len(lengths)), np.stack([prompts, responses], axis=1).ravel())
    input_ids = np.empty(len(in_prompts), np.int32)
    input_ids[in_prompts], input_ids[~in_prompts] = rows.arrays["prompt_ids"], rows.arrays["response_ids"]
    values: dict[str, Array] = {
        "input_ids": input_ids,
        "attention_mask": np.ones(len(input_ids), dtype=np.int8),
        "position_ids": np.arange(len(input_ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths),
    }
    for key, column in PER_TOKEN.items():
        if column.field and (key not in FURTHER or rows.arrays[column.field].size):
            values[key] = rows.arrays[column.field]
    return values


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
    # 2. Each key's rectangle. Zeros cost memory and time only where something is written to their pages; NumPy's own
    # ask for huge pages, and the kernel clears 2 MB of them for one value: too much where rows are far from full.
    padded: dict[str, Array] = {}
    for key, flat in (flats := _by_key(rows)).items():
        column, shape = PER_TOKEN[key], held[PER_TOKEN[key].along].shape + flat.shape[1:]
        dtype = np.dtype(column.dtype)
        size = math.prod(shape) * dtype.itemsize
        if pad_id if column.fill is None else column.fill:
            padded[key] = np.empty(shape, dtype)
        elif size < LARGE or 2 * (flat.size * dtype.itemsize + shape[0] * mmap.PAGESIZE) > size:
            padded[key] = np.zeros(shape, dtype)
        else:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            padded[key] = np.frombuffer(memory, dtype).reshape(shape)
    # 3. What is in them, large ones side by side; after the last token, positions are its own, as verl counts.
    with ThreadPoolExecutor(THREADS) as threads:
        each = threads.map if padded["input_ids"].nbytes > LARGE else map
        deque(each(_put, flats, flats.values(), padded.values(), repeat(held), repeat(pad_id)))
    for row, (behind, length) in enumerate(zip((left + responses).tolist(), both.tolist(), strict=True)):
        padded["position_ids"][row, behind:] = max(0, length - 1)
    return padded


def _put(key: str, flat: Array, rectangle: Array, held: Mapping[str, npt.NDArray[np.bool_]], pad_id: int) -> None:
    """Write a key's values to where its rectangle has tokens, as ``held`` says, and what stands elsewhere."""
    if fill := pad_id if PER_TOKEN[key].fill is None else PER_TOKEN[key].fill:
        rectangle.fill(fill)
    if fill or flat.dtype.kind == "f" or flat.any():
        rectangle[held[PER_TOKEN[key].along]] = flat


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
