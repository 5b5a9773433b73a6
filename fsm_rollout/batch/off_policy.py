"""How far the engine that sampled was from the policy that is trained, and weights that make up for it.

Invariant: what is compared are log-probs of the same tokens, the trainer's and the engine's, and only trained tokens
count. Weights are constants: no gradient flows through them.

The engine's numbers differ from the trainer's although both have the same weights (other kernels, other precision), and
more so where weights have changed since (partial rollouts, asynchronous training). Sources:

- truncated importance sampling: Ionides 2008 (J. Comput. Graph. Stat. 17); for this mismatch, Yao and others 2025,
  *Your Efficient RL Framework Secretly Brings You Off-Policy RL Training*; V-trace's ρ̄, arXiv 1802.01561;
- masked: IcePop in Ring-1T, arXiv 2510.18855; Liu and others 2025, *When Speed Kills Stability*;
- by turn: ST-PPO, arXiv 2511.20718; by sequence, as a geometric mean: GSPO, arXiv 2507.18071;
- the estimators ``kl`` and ``kl_k3``: Schulman 2020, *Approximating KL Divergence* (k1 and k3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from fsm_rollout.errors import BatchError, did_you_mean

Level = Literal["token", "turn", "sequence"]
Bound = Literal["truncate", "mask"]
LARGEST = 60.0  # of the logarithm of a ratio: its weight is bounded anyway, and its square is finite in float64


@dataclass(frozen=True, slots=True, eq=False)
class OffPolicy:
    """The correction of a batch; its tensors are as ``responses``, and 0 on tokens that are not trained."""

    ratios: torch.Tensor
    """Of the trainer's probability to the engine's: the token's own, or its turn's or sequence's; float32."""
    weights: torch.Tensor
    """What a token's loss is multiplied by: the bounded ratio; float32."""
    kept: torch.Tensor
    """Which trained tokens count, bool: all that are not masked. Divide by their number, not by that of all."""
    figures: dict[str, float]
    """``kl`` (k1) and ``kl_k3``, from the engine's distribution to the trainer's, in nats per trained token;
    ``ratio_min``, ``ratio_max``; ``bounded``: the share of trained tokens whose weight is not their ratio; ``ess``: the
    effective sample size of the weights, as a share."""
    by_version: dict[int, dict[str, float]]
    """By the weights that sampled: ``tokens``, their share of the trained tokens, ``kl_k3``, and ``kl_share``, of the
    sum over all."""


def correct(
    trainer: torch.Tensor,
    engine: torch.Tensor,
    mask: torch.Tensor,
    segments: torch.Tensor,
    versions: torch.Tensor,
    *,
    bound: Bound,
    low: float | None,
    high: float,
    geometric: bool,
) -> OffPolicy:
    """Return the correction for tokens end to end, all ``[T]``; ``segments`` numbers what has one ratio."""
    check_bounds(bound, low, high)
    # 1. Ratios, in float64: a sequence's is a product over thousands of tokens.
    on = mask.bool()
    logs = (trainer.detach().double() - engine.double())[on]
    if not bool(logs.isfinite().all()):
        raise BatchError(f"{int((~logs.isfinite()).sum())} trained tokens have log-probs that are not finite")
    _, own = torch.unique(segments[on], return_inverse=True)
    size = int(own.max()) + 1 if len(own) else 0
    sums = torch.zeros(size, dtype=torch.float64, device=logs.device).index_add(0, own, logs)
    if geometric:
        sums = sums / own.bincount(minlength=size)
    ratios = sums[own].clamp(-LARGEST, LARGEST).exp()
    # 2. What is made of them.
    lowest = 1 / high if low is None else low
    kept = (ratios <= high) & (ratios >= lowest) if bound == "mask" else torch.ones_like(ratios, dtype=torch.bool)
    weights = torch.where(kept, ratios.clamp(max=high), torch.zeros_like(ratios))
    # 3. Figures.
    k3 = logs.clamp(max=LARGEST).exp() - 1 - logs
    figures = {"kl": _mean(-logs), "kl_k3": _mean(k3)}
    least, most = (float(edge) for edge in ratios.aminmax()) if len(ratios) else (math.nan, math.nan)
    figures |= {"ratio_min": least, "ratio_max": most, "bounded": _mean(weights != ratios)}
    squares = float(weights.square().sum())
    figures["ess"] = float(weights.sum()) ** 2 / (len(weights) * squares) if squares else math.nan
    by_version = {}
    for version in sorted(set(versions[on].tolist())):
        of_it = versions[on] == version
        share = float(k3[of_it].sum() / k3.sum()) if float(k3.sum()) else math.nan
        by_version[int(version)] = {"tokens": _mean(of_it), "kl_k3": _mean(k3[of_it]), "kl_share": share}

    def whole(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros(len(on), dtype=dtype, device=on.device)
        tensor[on] = values.to(dtype)
        return tensor

    weighted = whole(ratios, torch.float32), whole(weights, torch.float32), whole(kept, torch.bool)
    return OffPolicy(*weighted, figures, by_version)


def check_bounds(bound: str, low: float | None, high: float) -> None:
    """Raise BatchError for bounds that mean nothing."""
    if bound not in ("truncate", "mask"):
        raise BatchError(
            f"bound must be 'truncate' or 'mask', got {bound!r}{did_you_mean(bound, ('truncate', 'mask'))}"
        )
    if bound == "truncate" and low is not None:
        raise BatchError("truncated weights have no lower bound; leave `low` out, or take bound='mask'")
    if not (high >= 1 and (low is None or 0 <= low <= 1)):
        raise BatchError(f"`high` must be 1 or more and `low` between 0 and 1, got {high} and {low}")


def _mean(values: torch.Tensor) -> float:
    return float(values.double().mean()) if len(values) else math.nan
