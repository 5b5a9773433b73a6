"""A batch as a tree: tokens that rows share once, and what a model needs to see each row in it as it was.

Invariant: the places of a row give back its tokens bit by bit, and a token attends to what stands before it in its rows
and to nothing else. Tokens stand in the order of a walk through the tree, each before all that goes on from it, so one
number per token (where what goes on from it ends) is the whole attention mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from fsm_rollout.batch.branches import Branch, grow, opening_of
from fsm_rollout.batch.rows import TrainingRow


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """``N`` tokens in ``M`` nodes; all tensors are int64. Feed ``input_ids[None]`` and ``position_ids[None]``."""

    input_ids: torch.Tensor
    """``[N]``"""
    position_ids: torch.Tensor
    """``[N]``: how many tokens stand before it in its rows."""
    previous: torch.Tensor
    """``[N]``: the token before it, whose logits predict it; -1: it is the first."""
    exits: torch.Tensor
    """``[N]``: the place behind the last token that goes on from it."""
    node_entries: torch.Tensor
    """``[M]``: the place of each node's first token, which is when a walk through the tree enters it."""
    node_exits: torch.Tensor
    """``[M]``: when the walk leaves the node, with all below it."""
    node_parents: torch.Tensor
    """``[M]``: the node above each; -1: none."""
    places: torch.Tensor
    """``[B, P+R]``, as the batch has ``input_ids`` (jagged if it is packed): where each token stands; -1: padding."""

    @property
    def ratio(self) -> float:
        """How many of the rows' tokens are left: 1.0 where they share none."""
        places = self.places.values() if self.places.is_nested else self.places
        return len(self.input_ids) / max(1, int((places >= 0).sum()))

    def to(self, device: torch.device | str) -> TokenTree:
        """Return the tree with its tensors on a device."""
        return TokenTree(*(getattr(self, each.name).to(device) for each in fields(self)))

    def attention_mask(self) -> torch.Tensor:
        """Return which token (line) attends to which, bool ``[1, 1, N, N]``, as SDPA takes it; memory grows with N²."""
        place = torch.arange(len(self.exits), device=self.exits.device)
        return ((place <= place[:, None]) & (place[:, None] < self.exits))[None, None]

    def mask_mod(self) -> Callable[..., torch.Tensor]:
        """Return the same for FlexAttention: ``create_block_mask(tree.mask_mod(), None, None, N, N)``."""
        exits = self.exits

        def attends(batch: object, head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & (query < exits[key])

        return attends

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return each token's log-prob ``[N]`` by the model's logits ``[N, V]``; 0.0 for first tokens.

        Logits that are to be divided by ``temperatures`` are divided before, each with that of the token it predicts.
        """
        known = self.previous >= 0
        precise = torch.promote_types(logits.dtype, torch.float32)
        predicted = torch.log_softmax(logits[self.previous.clamp(min=0)], dim=-1, dtype=precise)
        found = predicted.gather(-1, self.input_ids[:, None])[:, 0]
        return torch.where(known, found, torch.zeros_like(found))

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """Return values ``[N]`` of tokens as the batch has ``input_ids``, 0 on padding; ``[:, P:]`` are responses'."""
        if self.places.is_nested:
            offsets = self.places.offsets()  # type: ignore[attr-defined]
            return torch.nested.nested_tensor_from_jagged(values[self.places.values()], offsets)
        return torch.where(self.places >= 0, values[self.places.clamp(min=0)], torch.zeros_like(values[:1]))


def token_tree(rows: Sequence[TrainingRow], width: int | None, prompt_width: int | None) -> TokenTree:
    """Return the tree of rows; their batch has ``input_ids`` of this width, of which prompts have ``prompt_width``."""
    # 1. The form. What events say is shared is taken only where the tokens bear it out: a row may have been cut.
    ids = [np.concatenate([row.prompt_ids, row.response_ids]) for row in rows]
    openings = [opening_of(np.asarray(row.prompt_ids, np.int32)) for row in rows]
    grown = grow(
        (
            Branch(row.row_id, opening, len(row.prompt_ids), len(whole), row.shares)
            for row, opening, whole in zip(rows, openings, ids, strict=True)
        ),
        lambda row, other, tokens: np.array_equal(ids[row][:tokens], ids[other][:tokens]),
    )
    nodes = grown.nodes
    # 2. Where each node's tokens stand, and where what goes on from them ends.
    lengths = np.array([node.end - node.start for node in nodes], np.int64)
    entries = np.cumsum(lengths) - lengths
    parents = np.array([node.parent for node in nodes], np.int64)
    exits = entries + lengths
    for index in range(len(nodes) - 1, -1, -1):
        if (parent := parents[index]) >= 0:
            exits[parent] = max(exits[parent], exits[index])
    # 3. Tokens, node after node, and rows, as the paths to their leaves.
    none = np.zeros(0, np.int64)
    depths = [np.arange(node.start, node.end) for node in nodes]
    previous = np.arange(-1, int(lengths.sum()) - 1)
    last = entries + lengths - 1
    previous[entries] = np.where(parents < 0, -1, last[parents])
    paths = [
        np.concatenate([none, *(np.arange(entries[i], entries[i] + lengths[i]) for i in grown.path(row))])
        for row in range(len(rows))
    ]
    if width is None or prompt_width is None:
        offsets = torch.from_numpy(np.cumsum([0, *map(len, paths)]))
        places = torch.nested.nested_tensor_from_jagged(torch.from_numpy(np.concatenate([none, *paths])), offsets)
    else:
        rectangle = np.full((len(rows), width), -1)
        for line, row, path_places in zip(rectangle, rows, paths, strict=True):
            start = prompt_width - len(row.prompt_ids)
            line[start : start + len(path_places)] = path_places
        places = torch.from_numpy(rectangle)
    own = [ids[node.row][node.start : node.end].astype(np.int64) for node in nodes]
    return TokenTree(
        input_ids=torch.from_numpy(np.concatenate([none, *own])),
        position_ids=torch.from_numpy(np.concatenate([none, *depths])),
        previous=torch.from_numpy(previous),
        exits=torch.from_numpy(np.repeat(exits, lengths)),
        node_entries=torch.from_numpy(entries),
        node_exits=torch.from_numpy(exits),
        node_parents=torch.from_numpy(parents),
        places=places,
    )
