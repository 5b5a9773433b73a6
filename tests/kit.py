"""What tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsm_rollout.trajectory.events import AnyEvent, Prompted
from fsm_rollout.trajectory.journal import Journal

if TYPE_CHECKING:
    import torch

    import fsm_rollout as fr

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""
CONFIGS = ROOT / "configs"


@contextmanager
def new_objects() -> Iterator[None]:
    """Have the collector know of new objects alone: a walk through all that a suite has imported takes a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def prompted(trajectory_id: str = "g/0", **facts: Any) -> Prompted:
    """Return how a trajectory begins: a group's sample, or what a sample has called, unless ``facts`` say otherwise."""
    group_id, _, sample = trajectory_id.partition("/")
    defaults = {
        "at": 0.0, "group_id": group_id, "sample": int(sample.partition("/")[0].partition("~")[0] or 0), "agent": "a",
        "parent_id": trajectory_id.rpartition("/")[0] if trajectory_id.count("/") > 1 else None, "initial": "PENDING",
        "messages": [], "extra": {}, "limits": {}, "seed": 0, "date": "2020-01-01T00:00:00",
    }  # fmt: skip
    return Prompted(trajectory_id=trajectory_id, **(defaults | facts))


def written(path: Path, *histories: Sequence[AnyEvent], **facts: object) -> Path:
    """Write a journal of these trajectories, with these facts of the run, and return its path."""
    with Journal(path, facts) as journal:
        for first, *rest in histories:
            for event in (first, *rest):
                journal.append(first.trajectory_id, event)  # type: ignore[union-attr]
    return path


def under_way(stretches: list[tuple[float, float]]) -> float:
    """Return the seconds in which at least one stretch ``(start, end)`` is under way."""
    times = sorted({at for stretch in stretches for at in stretch})
    return sum(
        later - earlier
        for earlier, later in pairwise(times)
        if any(start <= earlier and later <= end for start, end in stretches)
    )


def ratios(model: Any, batch: fr.TrajectoryBatch) -> torch.Tensor:
    """Return what a forward pass without cache makes of each trained token's probability, over what was sampled."""
    import torch

    columns, left = batch.tensordict, batch.tensordict["prompts"].shape[1]
    names = ("input_ids", "attention_mask", "position_ids")
    with torch.no_grad():
        logits = model(**{name: columns[name] for name in names}).logits[:, left - 1 : -1].float()
    logits = batch.masked_logits(logits / columns["temperatures"][..., None])
    logprobs = torch.log_softmax(logits, -1).gather(-1, columns["responses"][..., None])[..., 0]
    return torch.exp(logprobs - columns["rollout_log_probs"])[columns["response_mask"].bool()]
