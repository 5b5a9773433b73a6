"""A batch for people: its mean score with the error of that, and its rows as a table.

Invariant: these are views. They change nothing about a batch, and a table has one line for each row, in its order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from fsm_rollout.batch.advantages import SampleScore
from fsm_rollout.batch.columns import FURTHER, PER_TOKEN
from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.errors import BatchError
from fsm_rollout.statistics.estimates import error_of_mean

if TYPE_CHECKING:
    import pandas as pd

TENSORS: Mapping[str, str] = {column.field: key for key, column in PER_TOKEN.items() if column.field}
"""What the arrays of a row are called in a batch, and wherever its rows are columns."""


OTHER_KEYS = {
    **dict.fromkeys(("score", "scores", "reward", "rewards"), "trajectory_scores"),
    **dict.fromkeys(("logprobs", "log_probs", "old_log_probs"), "rollout_log_probs"),
    **dict.fromkeys(("mask", "loss_mask", "env_mask"), "response_mask"),
    **dict.fromkeys(("completions", "completion_ids", "response_ids"), "responses"),
}
"""What others call columns, and what a row calls its own."""


def column_like(word: str, keys: Iterable[str]) -> str:
    """Return ``; did you mean batch["trajectory_scores"]?`` for the column that a word may stand for, or them all."""
    if word in ("groups", "trajectories", "samples"):
        return "; rollout.stream(…) gives groups, with their trajectories"
    keys = list(map(str, keys))
    meant = [OTHER_KEYS[word]] if word in OTHER_KEYS else get_close_matches(word, keys, n=1)
    return f'; did you mean batch["{meant[0]}"]?' if meant else f"; its columns are {', '.join(keys)}"


def score_with_error(scores: Iterable[SampleScore]) -> str:
    """Return the mean of those that have a score, with its standard error: ``0.612 ± 0.034``; ``-`` where none has."""
    every = tuple(scores)
    scored = [sample.score for sample in every if sample.score is not None]
    if not scored:
        return "-"
    error = standard_error(every)
    return f"{math.fsum(scored) / len(scored):.3f}" + ("" if error is None else f" ± {error:.3f}")


def standard_error(scores: Iterable[SampleScore]) -> float | None:
    """Return the standard error of the mean score, clustered by group; ``None`` with fewer than two scored groups."""
    by_group: defaultdict[str, list[float]] = defaultdict(list)
    for group, _, score in scores:
        if score is not None:
            by_group[group].append(score)
    error = error_of_mean(by_group.values())
    return None if math.isnan(error) else error


def row_data(row: TrainingRow) -> dict[str, Any]:
    """Return a row's fields by name, those of tensors by the batch's; arrays as they are."""
    data = {TENSORS.get(field.name, field.name): getattr(row, field.name) for field in fields(row)}
    nested = {key: data[key].tolist() if data[key].size else [] for key in FURTHER}
    return data | nested


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
