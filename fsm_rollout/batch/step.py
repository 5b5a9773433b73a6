"""The batch of one training step: the rows of its groups, and its figures: what the groups cost and scored.

Invariant: every sample and every sampled token of the groups is counted, once: under ``dropped_…`` when its group is
dropped and in no row, under ``discarded_…`` when its attempt was given up, else without a prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.batch.columns import Along
from fsm_rollout.batch.fitting import check_fit
from fsm_rollout.batch.part import BatchPart, figures_of, joined_parts, part_of
from fsm_rollout.batch.rows import RowId
from fsm_rollout.errors import BatchError
from fsm_rollout.scheduler.group import Group


def batch_of(
    groups: Iterable[Group], *, parts: Sequence[BatchPart] = (), state_names: Sequence[str] = (), pad_id: int,
    packed: bool = False, processor: Any = None, **widths: Any,
) -> TrajectoryBatch:  # fmt: skip
    """Return the batch of some groups, in the order of their prompts' first appearance, without dropped ones.

    ``parts``: where the rows of these groups are, if they were made before; further options are those of
    :meth:`TrajectoryBatch.from_trajectories`.
    """
    ordered = sorted(groups, key=attrgetter("index"))
    dropped = {group.group_id: str(group.drop_reason) for group in ordered if group.drop_reason is not None}
    order = [group.group_id for group in ordered]
    if len(set(order)) < len(order):
        twice = next(name for name in order if order.count(name) > 1)
        raise BatchError(f"group {twice} was given twice; each token has one row at most")
    made_here = [] if parts else [part_of(ordered, state_names=state_names, processor=processor, **widths)]
    rows, facts = joined_parts(parts or made_here, order, state_names, processor, leave_out=dropped)
    widths.pop("overflow", None)
    if parts:  # which were made before anybody knew the widths
        prompts, responses = (rows.lengths[along].tolist() for along in (Along.PROMPTS, Along.RESPONSES))
        ids = (RowId(row["trajectory_id"], row["stream"]) for row in rows.facts)
        check_fit(
            list(zip(ids, prompts, responses, strict=True)), widths.get("prompt_width"), widths.get("response_width")
        )
    batch = TrajectoryBatch.from_flat(rows, pad_id=pad_id, packed=packed, processor=processor, **widths)
    kept = [fact for fact in facts if fact.group_id not in dropped]
    batch.sample_scores = tuple(score for fact in kept for score in fact.scores)
    batch.unrowed = {name: reason for fact in kept for name, reason in fact.unrowed.items()}
    batch.omitted = tuple(row for fact in kept for row in fact.omitted)
    batch.truncated = tuple(row for fact in kept for row in fact.truncated)
    batch.untrainable = "" if rows.facts else next((fact.untrainable for fact in kept if fact.untrainable), "")
    batch.dropped, batch.figures = dropped, figures_of(facts, dropped)
    return batch


def step_figures(groups: Iterable[Group]) -> dict[str, float]:
    """Return the figures of a step of some groups: see :func:`~fsm_rollout.batch.part.figures_of`."""
    groups = list(groups)
    dropped = {group.group_id: str(group.drop_reason) for group in groups if group.drop_reason is not None}
    return figures_of(part_of(groups).facts.values(), dropped)
