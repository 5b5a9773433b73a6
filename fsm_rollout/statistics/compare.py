"""Whether two runs on the same prompts can be told apart, by how much, and what it would take.

Invariant: runs are compared prompt by prompt. What makes a prompt hard is common to both and cancels, so a difference
shows with far fewer prompts than the two means' own intervals would need; the samples of a prompt count together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fsm_rollout.statistics.estimates import CONFIDENCE, POWER, Estimate, of_means, student_t


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The second run less the first, over the prompts that both have scored."""

    estimate: Estimate
    p_value: float
    """How often a difference this large comes of chance alone (Student's paired test, two-sided); NaN: fewer than two
    prompts."""
    spread: float
    """The standard deviation of the prompts' differences."""
    told_apart: bool
    """Whether chance alone would not explain it, at the interval's confidence."""

    @property
    def visible(self) -> float:
        """The smallest true difference that as many prompts would show in four runs of five; NaN as the p-value."""
        return _quantiles() * self.estimate.error

    def prompts_for(self, difference: float) -> int:
        """Return how many prompts in all would show a true difference of that size in four runs of five."""
        if not difference or math.isnan(self.spread):
            raise ValueError("needs a difference that is not 0, and two prompts to know their spread")
        return max(2, math.ceil((_quantiles() * self.spread / difference) ** 2))


def compare(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]], confidence: float = CONFIDENCE
) -> PairedDifference:
    """Compare the scores of two runs' samples, by prompt; prompts that only one of them has scored are left out."""
    both = [prompt for prompt, scores in first.items() if len(scores) and len(second.get(prompt, ()))]
    values = np.array([np.mean(second[prompt]) - np.mean(first[prompt]) for prompt in both])
    samples = sum(len(first[prompt]) + len(second[prompt]) for prompt in both)
    estimate = of_means(values, samples, confidence)
    if estimate.error:
        p_value = float(2 * student_t().sf(abs(estimate.value) / estimate.error, len(both) - 1))
    else:  # no two prompts differ otherwise, so only their number speaks: each could have gone either way
        p_value = 2.0 ** (1 - len(both)) if estimate.value else 1.0
    return PairedDifference(estimate, p_value, estimate.error * math.sqrt(len(both)), p_value <= 1 - confidence)


def _quantiles() -> float:
    """Return how many standard errors a difference must have to be seen as often as :data:`POWER` says."""
    normal = NormalDist()
    return normal.inv_cdf((1 + CONFIDENCE) / 2) + normal.inv_cdf(POWER)
