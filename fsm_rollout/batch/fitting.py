"""Which rows fit the widths of a batch, and what becomes of those that do not.

Invariant: a row that does not fit is an error unless the caller names what becomes of it. A row with pictures is never
cut: part of a picture is none, and a picture that is gone leaves its ids without one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.batch.columns import Along
from fsm_rollout.batch.rows import Cut, FlatRows, RowId
from fsm_rollout.errors import BatchError
from fsm_rollout.trajectory.trajectory import Trajectory

Overflow = Literal["error", "omit", "truncate"]


def check_widths(prompt_width: int | None, response_width: int | None) -> None:
    """Raise BatchError for a width that none can be."""
    for name, width in (("prompt_width", prompt_width), ("response_width", response_width)):
        if width is not None and width < 0:
            raise BatchError(f"{name} must be 0 or more, or None for the longest row, got {width}")


def fitting(
    streams: Sequence[Cut], prompt_width: int | None, response_width: int | None, overflow: Overflow
) -> tuple[list[Cut], list[Cut]]:
    """Return the streams that go into a batch, cut to its widths where that is asked for, and those that are cut."""
    check_widths(prompt_width, response_width)
    prompts = [stream.stream.tokens.prompt_length for stream in streams]
    if overflow == "error":
        lengths = [(s.row_id, prompt, s.end - prompt) for s, prompt in zip(streams, prompts, strict=True)]
        _check_fit(lengths, prompt_width, response_width)
        return list(streams), []
    chosen: list[Cut] = []
    cut: list[Cut] = []
    for stream, prompt in zip(streams, prompts, strict=True):
        start = 0 if prompt_width is None else max(0, prompt - prompt_width)
        end = stream.end if response_width is None else min(stream.end, prompt + response_width)
        if (start, end) == (0, stream.end):
            chosen.append(stream)
        elif overflow == "truncate" and not stream.stream.media and next(stream.stream.tokens.sampled()).start < end:
            cut.append(stream._replace(start=start, end=end))
            chosen.append(cut[-1])
    return chosen, cut


def check_lengths(rows: FlatRows, prompt_width: int | None = None, response_width: int | None = None) -> None:
    """Raise BatchError where rows that are made already do not fit, or for a width that none can be."""
    check_widths(prompt_width, response_width)
    ids = (RowId(row["trajectory_id"], row["stream"]) for row in rows.facts)
    prompts, responses = (rows.lengths[along].tolist() for along in (Along.PROMPTS, Along.RESPONSES))
    _check_fit(list(zip(ids, prompts, responses, strict=True)), prompt_width, response_width)


def _check_fit(lengths: Sequence[tuple[RowId, int, int]], prompt_width: int | None, response_width: int | None) -> None:
    """Raise BatchError for rows that do not fit, of which prompts and responses have some lengths."""
    widest = (
        math.inf if prompt_width is None else prompt_width,
        math.inf if response_width is None else response_width,
    )
    misfits = [row for row in lengths if row[1] > widest[0] or row[2] > widest[1]]
    if not misfits:
        return
    (row_id, prompt, response), further = misfits[0], len(misfits) - 1
    widths = {"prompt_width": prompt_width, "response_width": response_width}
    requested = " and ".join(f"{name} {width}" for name, width in widths.items() if width is not None)
    more = f" ({further} more row{'s' * (further > 1)} like it)" if further else ""
    raise BatchError(
        f"row {row_id} has a prompt of {prompt} and a response of {response} tokens, which do not fit "
        f"{requested}{more}; give wider ones, none, or overflow='omit' or 'truncate'"
    )


def why_untrainable(trajectory: Trajectory) -> str:
    """Return why nothing of a trajectory can be trained on; empty: no hosted model was its policy."""
    if not any(stream.counted is not None and stream.engine == POLICY for stream in trajectory.streams):
        return ""
    return (
        f"the policy of trajectory {trajectory.trajectory_id} gave text without the token ids that it sampled "
        "(`kind: chat`), so there is nothing to train on; evaluate with it (eval, stats, compare), and train "
        "with an engine that gives ids"
    )
