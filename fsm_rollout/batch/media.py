"""What a model is fed beside ids: the pictures of rows, as tensors of its own processor's.

Invariant: each picture's tensors are those from which its ids in the stream were counted, computed once in a process;
nothing here looks at a family's name. What belongs to tokens (a type for each) stands where the picture's span stands,
the rest is put end to end, in the order of the pictures.

Positions are what the model's own ``get_rope_index`` makes of them, where it has one (Qwen-VL's and others', whose
positions have three dimensions); a processor carries it, as verl's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from fsm_rollout.batch.plain import put_column
from fsm_rollout.chat.pictures import looker_of
from fsm_rollout.trajectory.tokens import MediaSpan

TOKEN_TYPES = "token_type_ids"  # how the keys end of what belongs to tokens


def row_inputs(media: Sequence[MediaSpan], length: int, processor: Any) -> dict[str, torch.Tensor]:
    """Return what a model's ``forward`` is fed beside the ids of one row of ``length`` tokens, by the processor's keys.

    Pixel values and grids are ``[pictures or patches, …]`` as the processor gives them; types of tokens ``[length]``.
    """
    looker = looker_of(processor)
    inputs: dict[str, list[torch.Tensor]] = {}
    types: dict[str, torch.Tensor] = {}
    for span in media:
        for key, value in looker.seen(span.picture, processor.tokenizer.decode([span.placeholder])).inputs.items():
            if key.endswith(TOKEN_TYPES):
                types.setdefault(key, torch.zeros(length, dtype=value.dtype))[span.start : span.end] = value[0]
            else:
                inputs.setdefault(key, []).append(value)
    return {key: end_to_end(values) for key, values in inputs.items()} | types


def end_to_end(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one along their first dimension, the others padded with zeros to the largest."""
    if len(values) == 1:
        return values[0]
    sizes = [max(size) for size in zip(*(value.shape[1:] for value in values), strict=True)]
    if all(list(value.shape[1:]) == sizes for value in values):
        return torch.cat(list(values))
    whole = values[0].new_zeros((sum(map(len, values)), *sizes))
    start = 0
    for value in values:
        whole[(slice(start, start + len(value)), *map(slice, value.shape[1:]))] = value
        start += len(value)
    return whole


def batch_inputs(
    rows: Sequence[Sequence[MediaSpan]], starts: Sequence[int], width: int, processor: Any
) -> dict[str, torch.Tensor]:
    """Return what a model's ``forward`` is fed beside padded ids ``[rows, width]``, by the processor's keys.

    ``starts`` are where the rows' own tokens begin.
    """
    of_rows = [row_inputs(media, width, processor) for media in rows]
    keys = dict.fromkeys(key for inputs in of_rows for key in inputs)
    made: dict[str, torch.Tensor] = {}
    for key in keys:
        if key.endswith(TOKEN_TYPES):
            kind = next(inputs[key].dtype for inputs in of_rows if key in inputs)
            types = [inputs.get(key, torch.zeros(width, dtype=kind)) for inputs in of_rows]
            made[key] = torch.stack([each.roll(start) for each, start in zip(types, starts, strict=True)])
        else:
            made[key] = end_to_end([inputs[key] for inputs in of_rows if key in inputs])
    return made


def put_inputs(tensordict: TensorDict, lengths: Sequence[int], processor: Any) -> None:
    """Put what follows from the pictures of a batch's rows, which have some, and so many tokens."""
    rows = tensordict.get("media").tolist()
    columns: dict[str, list[Any]] = {
        "multi_modal_data": [{"images": [span.picture for span in media]} for media in rows]
    }
    if processor is not None:
        each = zip(rows, lengths, strict=True)
        columns["multi_modal_inputs"] = [row_inputs(media, length, processor) for media, length in each]
    for key, values in columns.items():
        put_column(tensordict, key, values)


def rope_positions(
    ids: npt.NDArray[np.integer[Any]], media: Sequence[MediaSpan], processor: Any
) -> npt.NDArray[np.int32]:
    """Return the positions ``[tokens, 3]`` of a row's tokens, as the model counts them; it has ``get_rope_index``."""
    if not media:
        return np.repeat(np.arange(len(ids), dtype=np.int32)[:, None], 3, axis=1)
    inputs = row_inputs(media, len(ids), processor)
    types = {key: value[None] for key, value in inputs.items() if key.endswith(TOKEN_TYPES)}
    grids = {key: value for key, value in inputs.items() if key.endswith("grid_thw")}
    input_ids = torch.from_numpy(ids.astype(np.int64))[None]
    positions, _ = processor.get_rope_index(
        input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **types, **grids
    )
    found: npt.NDArray[np.int32] = positions[:, 0].T.to(torch.int32).numpy()
    return found
