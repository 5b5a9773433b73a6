"""How much each token of a batch is to be raised or lowered: ``[rows, response columns]``, 0 where it is not trained.

``of_tokens`` compares, token by token, the samples of a group that have the same tokens before it. Trained with the
logarithm of the probability to be right (`grpo.py`), they count however sure the policy is. GRPO raises the probability
itself, whose derivative vanishes where the policy is sure, also where it is sure of a mistake.

``of_samples`` is GRPO as it was published: one advantage for all tokens of a sample.

``of_answers`` knows nothing but which answers were right, and learns from these alone.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import torch

import fsm_rollout as fr
from fsm_rollout.trajectory.enums import ROLES, Role

SURE = 0.999
"""A right choice that is as probable teaches nothing more, and is left out."""
MASKS = ("right", "environment", "recomputed", "shifted", "logprobs", "tools")


class _Choice(NamedTuple):
    """A token that one or several samples of a group took at a place."""

    row: int
    """One of them."""
    column: int
    old: float
    """Its log probability when it was sampled."""
    right: bool


def of_tokens(batch: fr.TrajectoryBatch) -> torch.Tensor:
    """Return the credit of the tokens up to each sample's first mistake; what several samples took counts in one.

    At a place of which the group knows right tokens, these have credits that sum to 1, in proportion to their
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
    credit = torch.zeros_like(columns["rollout_log_probs"])
    for place in places.values():
        right_mass = sum(math.exp(choice.old) for choice in place.values() if choice.right)
        for choice in place.values():
            if choice.right and right_mass < SURE:
                credit[choice.row, choice.column] = math.exp(choice.old) / right_mass
            elif not choice.right and not right_mass:
                credit[choice.row, choice.column] = -1.0
    return credit


def of_answers(batch: fr.TrajectoryBatch) -> torch.Tensor:
    """Return the credit of the turns that led to each right answer: among the samples that found it, it sums to 1.

    That is the slope of the logarithm of the probability to be right, answer by answer: what few samples of a group
    find counts as much as what all do. No sample is compared with another, and wrong ones teach nothing.
    """
    columns = batch.tensordict
    groups, credit = columns["group_index"].tolist(), torch.zeros_like(columns["rollout_log_probs"])
    scores = columns.get("turn_scores").tolist()
    samples = list(zip(groups, scores, strict=True))
    found = Counter((group, place) for group, told in samples for place, (_, score) in enumerate(told) if score)
    for row, (group, told) in enumerate(samples):
        first = 0
        for place, (turn, score) in enumerate(told):
            if score:
                turns = columns["turn_ids"][row]
                credit[row, (turns >= first) & (turns <= turn)] = 1.0 / found[group, place]
            first = turn + 1
    return credit * columns["response_mask"]


def of_samples(batch: fr.TrajectoryBatch, wrong: str = "right") -> torch.Tensor:
    """Return each sample's advantage for all tokens of the mask: the batch's own mask, or a ``wrong`` one."""
    mask = batch.tensordict["response_mask"]
    real = batch.tensordict["attention_mask"][:, -mask.shape[1] :]
    match wrong:
        case "environment" | "recomputed":  # the environment's tokens are trained like the model's
            mask = real
        case "shifted":  # an off-by-one
            mask = torch.roll(mask, 1, dims=1) * real
        case "tools":  # roles that are exchanged: what tools answered for what was sampled
            mask = (batch["roles"][:, -mask.shape[1] :] == ROLES.index(Role.TOOL)).long()
    return mask * batch.advantages()[:, None]
