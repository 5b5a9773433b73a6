"""Which tokens of a batch are trained, and how much better each was than the other samples of its group.

``of_places`` asks which token made a sample better. The samples of a group that begin alike part at some token: the
baseline of a token is the mean, over the samples with the same tokens before it, of whether this turn is right. Where
all of them go on alike, or none is better, nothing is trained.

``of_samples`` is GRPO as it was published: one advantage for all tokens of a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import fsm_rollout as fr

MASKS = ("right", "environment", "recomputed", "shifted", "logprobs")


class Trained(NamedTuple):
    """Tokens to train, each ``[n]``: response column ``column`` of row ``row`` is, or could have been, ``token``."""

    row: torch.Tensor
    column: torch.Tensor
    token: torch.Tensor
    old: torch.Tensor
    """Its log probability when it was sampled."""
    advantage: torch.Tensor


def of_places(batch: fr.TrajectoryBatch) -> Trained:
    """Return the tokens with which samples of a group part: each once, with the sum of its samples' advantages."""
    columns = batch.tensordict
    right = [int(parts["right_turns"]) for parts in columns.get("reward_parts").tolist()]
    sampled = torch.where(columns["response_mask"].bool(), columns["turn_ids"], -1)
    tokens, turns, groups = columns["responses"].tolist(), sampled.tolist(), columns["group_index"].tolist()
    trained: list[tuple[int, int, int, float, float]] = []
    for index in sorted(set(groups)):
        # 1. Who sampled what after which tokens, up to the first mistake; who goes furthest comes first.
        by_place: dict[tuple[int, ...], dict[int, list[int]]] = {}
        for row in sorted((row for row, group in enumerate(groups) if group == index), key=lambda row: -right[row]):
            for column, turn in enumerate(turns[row]):
                if turn > right[row]:
                    break
                if turn >= 0:
                    at_place = by_place.setdefault(tuple(tokens[row][:column]), {})
                    at_place.setdefault(tokens[row][column], []).append(row)
        # 2. How often the turn went well after each token, against all tokens of the place.
        for before, by_token in by_place.items():
            column, rows = len(before), [row for rows in by_token.values() for row in rows]
            well = {row for row in rows if turns[row][column] < right[row]}
            for token, those in by_token.items():
                if advantage := len(well.intersection(those)) * len(rows) - len(well) * len(those):
                    old = columns["rollout_log_probs"][those[0], column].item()
                    trained.append((rows[0], column, token, old, advantage / len(rows)))
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
