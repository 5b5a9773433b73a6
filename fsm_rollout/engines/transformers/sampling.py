"""Sampling from logits: temperature, top_k, top_p, and random numbers that belong to a request.

Invariant: which token a row gets is a function of that row's logits, its sampling parameters, its seed and the token's
position, and of nothing else in the batch. The random number is a hash of (seed, position), so there is no generator
whose state could depend on who else sampled; a request that goes on where another stopped draws the same numbers.

One caveat: matrix products of different batch shapes round differently (around 1e-6 in a logit), which moves a draw
across a boundary between two tokens about once in a million tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from fsm_rollout.engines.protocol import SamplingParams
from fsm_rollout.trajectory.tokens import Ids

Uints = npt.NDArray[np.uint64]
NOTHING: Mapping[int, tuple[Sequence[int], int]] = MappingProxyType({})


def _mix(x: Uints) -> Uints:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014), vectorised."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Uints, positions: Uints) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position), shape ``[n]``; multiples of 2^-48.

    48 bits, so that times a cumulative sum it stays below that sum in double precision.
    """
    mixed = _mix(_mix(seeds) + positions * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(16)).astype(np.float64) * 2.0**-48


class Sampler:
    """Samples one token for each of ``n`` rows; build one per set of requests, call it once per step."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self.rows = len(params)
        self._device = device
        self._seeds = np.array([p.seed % 2**64 for p in params], dtype=np.uint64)
        greedy = [p.temperature == 0 for p in params]
        self._any_greedy, self._all_greedy = any(greedy), all(greedy)
        self._greedy = torch.tensor(greedy, device=device)
        self._temperature = torch.tensor([[p.temperature or 1.0] for p in params], device=device)
        self._cut_rows = cut = [i for i, p in enumerate(params) if p.cuts]
        self.bent = {i: p for i, p in enumerate(params) if p.bends}
        """The rows with penalties, which must know what was said before."""
        self._cut = torch.tensor(cut, device=device) if cut else None
        big = torch.iinfo(torch.int64).max
        self._top_k = torch.tensor([[params[i].top_k or big] for i in cut], device=device)
        self._top_p = torch.tensor([[params[i].top_p] for i in cut], dtype=torch.float64, device=device)
        self._min_p = torch.tensor([[params[i].min_p] for i in cut], dtype=torch.float64, device=device)

    def __call__(
        self, logits: torch.Tensor, positions: Sequence[int], before: Mapping[int, tuple[Sequence[int], int]] = NOTHING
    ) -> tuple[list[int], list[float], dict[int, Ids]]:
        """Sample from ``logits`` (any float type, ``[n, V]``) for the tokens at ``positions``.

        ``before``: of each row of :attr:`bent`, all its tokens, and how many of them came before this generation.

        Returns:
            n token ids, and their natural-log probabilities under the distribution they were sampled from: after
            penalties and temperature, then top_k (exactly k tokens; of equal ones the lower ids), then top_p over what
            is left (the fewest tokens that reach it), then min_p. Temperature 0 takes the likeliest token, with its
            unscaled log probability. NaN logits give NaN logprobs. Then, by row, the ids that top_k, top_p and min_p
            left, where there is one of them.
        """
        logits = logits.float()
        if before:
            logits = logits.clone()
            for row, (history, start) in before.items():
                _penalise(logits[row], self.bent[row], history, start)
        logits = (logits - logits.amax(-1, keepdim=True)) / self._temperature
        logprobs = torch.log_softmax(logits, -1)
        tokens = logits.argmax(-1)
        kept: dict[int, Ids] = {}
        if not self._all_greedy:
            weights = logprobs.double().exp()
            if self._cut is not None:
                cut_weights = _cut(weights[self._cut], self._top_k, self._top_p, self._min_p)
                weights[self._cut] = cut_weights
                weights_of_rows = zip(self._cut_rows, cut_weights.cpu(), strict=True)
                kept = {row: Ids("i", of_row.nonzero()[:, 0].tolist()) for row, of_row in weights_of_rows}
                logprobs[self._cut] -= cut_weights.sum(-1, keepdim=True).log().float()
            drawn = self._draw(weights, positions)
            tokens = torch.where(self._greedy, tokens, drawn) if self._any_greedy else drawn
        chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1).clamp(max=0.0)
        return tokens.tolist(), chosen.tolist(), kept

    def _draw(self, weights: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Invert the cumulative distribution: the first token whose cumulative weight exceeds u times the total."""
        random = uniforms(self._seeds, np.array(positions, dtype=np.uint64))
        cumulative = weights.cumsum(-1)
        target = torch.from_numpy(random).to(self._device)[:, None] * cumulative[:, -1:]
        return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def _penalise(logits: torch.Tensor, params: SamplingParams, history: Sequence[int], start: int) -> None:
    """Change the logits ``[V]`` of tokens that were said: all of them, and those from ``start`` on by how often."""
    every = torch.tensor(sorted(set(history)), device=logits.device)
    known, penalty = logits[every], params.repetition_penalty
    logits[every] = torch.where(known > 0, known / penalty, known * penalty)
    sampled = torch.tensor(history[start:], dtype=torch.int64, device=logits.device)
    counts = torch.bincount(sampled, minlength=len(logits))
    logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def _cut(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return ``weights`` ``[m, V]`` with everything outside top_k, top_p and min_p set to 0 (not normalised again)."""
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    ranked = ranked * (rank < top_k)
    before = ranked.cumsum(-1) - ranked
    ranked = ranked * ((before < top_p * ranked.sum(-1, keepdim=True)) | (rank == 0))
    ranked = ranked * (ranked >= min_p * ranked[:, :1])
    return torch.zeros_like(weights).scatter_(-1, order, ranked)
