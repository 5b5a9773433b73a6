"""What a model makes of given ids: rows are filled with them, and the logits of each place are looked at.

Invariant: the log-prob of a token is the log-softmax of the model's own forward pass over all the tokens before it,
rounding apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsm_rollout.engines.transformers.key_value_rows import Filling, Rows
from fsm_rollout.trajectory.tokens import TokenScores, as_ids, as_logprobs

PLACES = 1024  # that go through the model at once: a logit for each of them and each token of the vocabulary is there
COLUMNS = 256  # ... of one row: a score for each pair of tokens is there


def scored(rows: Rows, filling: Filling, targets: Sequence[tuple[Sequence[int], int]]) -> list[TokenScores]:
    """Fill rows, and return of each what the model makes of the tokens that follow those that it is filled with.

    Args:
        rows: of a model.
        filling: without pictures; what pads a row is not looked at.
        targets: of each row, as many tokens as it is filled with, each the one that follows, and how many of the
            likeliest tokens in its place are asked for.
    """
    lengths = torch.tensor([len(ids) for ids, _ in targets])
    found: list[tuple[list[float], list[int], list[float]]] = [([], [], []) for _ in targets]
    width = min(COLUMNS, max(1, PLACES // len(targets)))
    for start in range(0, filling.ids.shape[1], width):
        # 1. A pass over so many columns, and the logits of those of its places that are no padding.
        ids, positions = (each[:, start : start + width] for each in (filling.ids, filling.positions))
        asked = start + torch.arange(ids.shape[1]) < lengths[:, None]
        logits = rows.score(filling._replace(ids=ids, positions=positions), asked)
        given = torch.log_softmax(logits.float(), -1)
        # 2. What they say, row by row.
        ends = asked.sum(1).cumsum(0).tolist()
        for first, end, (target_ids, top), of_row in zip([0, *ends], ends, targets, found, strict=False):
            own, (logprobs, top_ids, top_logprobs) = given[first:end], of_row
            follow = torch.tensor(target_ids[start : start + len(own)], dtype=torch.int64, device=own.device)
            logprobs += own.gather(-1, follow[:, None])[:, 0].clamp(max=0.0).tolist()
            if top:
                likeliest = own.topk(min(top, own.shape[-1]))
                top_ids += likeliest.indices.flatten().tolist()
                top_logprobs += likeliest.values.clamp(max=0.0).flatten().tolist()
    return [TokenScores(as_logprobs(own), as_ids(ids), as_logprobs(tops)) for own, ids, tops in found]
