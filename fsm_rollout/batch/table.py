"""A batch for people: its mean score with the error of that, and its rows as a table.

Invariant: these are views. They change nothing about a batch, and a table has one line for each row, in its order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from fsm_rollout.batch.advantages import SampleScore
from fsm_rollout.batch.columns import PER_TOKEN
from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.errors import BatchError

if TYPE_CHECKING:
    import pandas as pd

TENSORS: Mapping[str, str] = {column.field: key for key, column in PER_TOKEN.items() if column.field}
"""What the arrays of a row are called in a batch, and wherever its rows are columns."""


def score_with_error(scores: Iterable[SampleScore]) -> str:
    """Return the mean of those that have a score, with its standard error: ``0.612 ± 0.034``; ``-`` where none has."""
    every = tuple(scores)
    scored = [sample.score for sample in every if sample.score is not None]
    if not scored:
        return "-"
    error = standard_error(every)
    return f"{math.fsum(scored) / len(scored):.3f}" + ("" if error is None else f" ± {error:.3f}")


def standard_error(scores: Iterable[SampleScore]) -> float | None:
    """Return the standard error of the mean score; ``None`` where there are fewer than two scores.

    Samples of one prompt are alike, so the error is that of a mean over clusters (Liang and Zeger 1986, with the factor
    G / (G - 1) for G groups); for one sample a prompt it is the usual one. Of a single group it is that of its samples.
    """
    scored = [(group, score) for group, _, score in scores if score is not None]
    if len({group for group, _ in scored}) == 1:
        scored = [(str(number), score) for number, (_, score) in enumerate(scored)]
    mean = math.fsum(score for _, score in scored) / max(1, len(scored))
    residuals: defaultdict[str, float] = defaultdict(float)
    for group, score in scored:
        residuals[group] += score - mean
    count = len(residuals)
    if count < 2:
        return None
    return math.sqrt(math.fsum(value * value for value in residuals.values()) * count / (count - 1)) / len(scored)


def row_data(row: TrainingRow) -> dict[str, Any]:
    """Return a row's fields by name, those of tensors by the batch's; arrays as they are."""
    data = {TENSORS.get(field.name, field.name): getattr(row, field.name) for field in fields(row)}
    return data | {"routed_experts": row.routed_experts.tolist() if row.routed_experts.size else []}


def data_frame(rows: Iterable[TrainingRow]) -> pd.DataFrame:
    """Return rows as a table of pandas; see :meth:`~fsm_rollout.batch.batch.TrajectoryBatch.to_pandas`."""
    try:
        import pandas as pd
    except ImportError:
        raise BatchError("a table of pandas needs pandas: pip install 'fsm-rollout[pandas]'") from None
    first = ("trajectory_id", "group_id", "sample", "score", "stop_reason", "num_turns")
    lines = []
    for row in rows:
        data = row_data(row)
        tokens = {"prompt_tokens": len(row.prompt_ids), "response_tokens": len(row.response_ids)}
        facts = {key: data.pop(key) for key in first} | tokens | {"trained_tokens": int(row.mask.sum())}
        lines.append(facts | dict(sorted(data.items(), key=lambda item: item[0] in TENSORS.values())))
    return pd.DataFrame(lines)
