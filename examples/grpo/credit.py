"""How much each token of a batch is to be raised or lowered: ``[rows, response columns]``, 0 where it is not trained.

``of_tokens`` compares, token by token, the samples of a group that have the same tokens before it. Trained with the
logarithm of the probability to be right (`grpo.py`), they count however sure the policy is. GRPO raises the probability
itself, whose derivative vanishes where the policy is sure, also where it is sure of a mistake.

``of_samples`` is GRPO as it was published: one advantage for all tokens of a sample.

``of_answers`` knows nothing but which answers were right, and learns from these alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

import fsm_rollout as fr
from fsm_rollout.trajectory.enums import ROLES, Role

SURE = 0.999
"""A right choice that is as probable teaches nothing more, and is left out."""
WORTH = 0.1
"""An answer with less credit is not worth the time of feeding it."""
MASKS = ("right", "environment", "recomputed", "shifted", "logprobs", "tools")


class _Choice(NamedTuple):
    """Tokens that one or several samples of a group took at a place."""

    row: int
    """One of them."""
    columns: list[int]
    old: float
    """Their log probability when they were sampled."""
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
            choice = _Choice(row, [column], logprobs[row][column], number < right)
            places.setdefault((group, *tokens[row][:column]), {})[tokens[row][column]] = choice
    # 2. What to raise, and what to lower.
    credit = torch.zeros_like(columns["rollout_log_probs"])
    for place in places.values():
        right_mass = sum(math.exp(choice.old) for choice in place.values() if choice.right)
        for choice in place.values():
            if choice.right and right_mass < SURE:
                credit[choice.row, choice.columns] = math.exp(choice.old) / right_mass
            elif not choice.right and not right_mass:
                credit[choice.row, choice.columns] = -1.0
    return credit


def of_answers(batch: fr.TrajectoryBatch, sure: float = SURE, worth: float = 0.0) -> torch.Tensor:
    """Return the credit of whole answers: of all tokens from the answer before on, the calls that led to it included.

    It is `of_tokens` for answers in the place of tokens, and knows nothing but which of them were right. What samples
    of a group did after the same tokens counts once, however many did it. Of those that came to a right answer the
    credits sum to 1, in proportion to their probabilities. Where none did, each has the slope of the logarithm of the
    probability that is left: little where the policy tries many things, much where it is sure of a mistake.

    Left out is what is right with a probability of ``sure`` already, and what has a credit below ``worth``.
    """
    columns = batch.tensordict
    tokens, logprobs = columns["responses"].tolist(), columns["rollout_log_probs"].tolist()
    groups, scores = columns["group_index"].tolist(), columns.get("turn_scores").tolist()
    # 1. What the samples of a group did after the same tokens.
    places: dict[tuple[int, ...], dict[tuple[int, ...], _Choice]] = {}
    for row, told in enumerate(scores):
        sampled = columns["response_mask"][row].nonzero()[:, 0].tolist()
        turns = columns["turn_ids"][row].tolist()
        first, ends = 0, [*((turn, score > 0) for turn, score in told)]
        if len(sampled) and (not ends or ends[-1][0] < turns[sampled[-1]]):
            ends.append((turns[sampled[-1]], False))  # it ended without an answer
        for turn, right in ends:
            own = [column for column in sampled if first <= turns[column] <= turn]
            old = sum(logprobs[row][column] for column in own)
            place = places.setdefault((groups[row], *tokens[row][: own[0]]), {})
            place[tuple(tokens[row][own[0] : own[-1] + 1])] = _Choice(row, own, old, right)
            first = turn + 1
    # 2. What to raise, and what to lower.
    credit = torch.zeros_like(columns["rollout_log_probs"])
    for place in places.values():
        right_mass = sum(math.exp(choice.old) for choice in place.values() if choice.right)
        left = 1.0 - min(SURE, sum(math.exp(choice.old) for choice in place.values()))
        for choice in place.values():
            found = math.exp(choice.old) * (choice.right / right_mass if right_mass else -1 / left)
            if right_mass < sure and abs(found) >= worth:
                credit[choice.row, choice.columns] = found
    return credit


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
