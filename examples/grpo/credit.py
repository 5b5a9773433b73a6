"""Which tokens of a batch are trained, and with which weight.

``of_tokens`` compares, token by token, the samples of a group that have the same tokens before it. Trained with the
logarithm of the probability to be right (`grpo.py`), they count however sure the policy is. GRPO raises the probability
itself, whose derivative vanishes where the policy is sure, also where it is sure of a mistake.

``of_samples`` is GRPO as it was published: one advantage for all tokens of a sample.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

import fsm_rollout as fr

SURE = 0.999
"""A right choice that is as probable teaches nothing more, and is left out."""
MASKS = ("right", "environment", "recomputed", "shifted", "logprobs")


class Trained(NamedTuple):
    """Tokens to train, each ``[n]``: response column ``column`` of row ``row`` is, or could have been, ``token``."""

    row: torch.Tensor
    column: torch.Tensor
    token: torch.Tensor
    old: torch.Tensor
    """Its log probability when it was sampled."""
    advantage: torch.Tensor


class _Choice(NamedTuple):
    """A token that one or several samples of a group took at a place."""

    row: int
    """One of them."""
    column: int
    old: float
    """Its log probability."""
    right: bool


def of_tokens(batch: fr.TrajectoryBatch) -> Trained:
    """Return the tokens up to each sample's first mistake, each once.

    At a place of which the group knows right tokens, these have advantages that sum to 1, in proportion to their
    probabilities; where all that it took were wrong, these have -1 each.
    """
    columns = batch.tensordict
    tokens, logprobs = columns["responses"].tolist(), columns["rollout_log_probs"].tolist()
    groups, parts = columns["group_index"].tolist(), columns.get("reward_parts").tolist()
    # 1. What the samples of a group took after the same tokens.
    places: dict[tuple[int, ...], dict[int, _Choice]] = {}
    for row, group in enumerate(groups):
        right = int(parts[row]["right_tokens"])
        sampled = columns["response_mask"][row].nonzero()[:, 0].tolist()
        for number, column in enumerate(sampled[: right + 1]):
            choice = _Choice(row, column, logprobs[row][column], number < right)
            places.setdefault((group, *tokens[row][:column]), {})[tokens[row][column]] = choice
    # 2. What to raise, and what to lower.
    trained: list[tuple[int, int, int, float, float]] = []
    for place in places.values():
        right_mass = sum(math.exp(choice.old) for choice in place.values() if choice.right)
        for token, choice in place.items():
            if choice.right and right_mass < SURE:
                weight = math.exp(choice.old) / right_mass
            elif not choice.right and not right_mass:
                weight = -1.0
            else:
                continue
            trained.append((choice.row, choice.column, token, choice.old, weight))
    return Trained(*map(torch.tensor, zip(*trained, strict=True))) if trained else Trained(*torch.zeros(5, 0).unbind())


def of_samples(batch: fr.TrajectoryBatch, wrong: str = "right") -> Trained:
    """Return all tokens of the mask, with their sample's advantage: the batch's own mask, or a ``wrong`` one."""
    columns = batch.tensordict
    mask, old = columns["response_mask"], columns["rollout_log_probs"]
    match wrong:
        case "environment" | "recomputed":  # the environment's tokens are trained like the model's
            mask = columns["attention_mask"][:, -mask.shape[1] :]
        case "shifted":  # an off-by-one
            mask = torch.roll(mask, 1, dims=1) * columns["attention_mask"][:, -mask.shape[1] :]
        case "logprobs":  # the same off-by-one on the other side
            old = torch.roll(old, 1, dims=1)
    row, column = (mask.bool() & (batch.advantages() != 0)[:, None]).nonzero(as_tuple=True)
    return Trained(row, column, columns["responses"][row, column], old[row, column], batch.advantages()[row])
