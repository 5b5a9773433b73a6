"""Means, pass@k and pass^k over prompts, with intervals that hold for prompts that were not drawn.

Invariant: prompts are what chance drew; the samples of one prompt tell of that prompt alone. So each prompt weighs the
same and counts once, whatever its number of samples, and all uncertainty is read off the spread between prompts
(errors clustered by prompt: https://arxiv.org/abs/2411.00640). One prompt says nothing of others: its interval is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
CONFIDENCE = 0.95
POWER = 0.8
"""How often a difference that is there is to be seen, where it is asked how many prompts that takes."""
FIRST_LOOK = 32
"""Prompts before the first look at an interval that may end an evaluation: fewer say little of their own spread."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts, and the interval in which that of all prompts of their kind lies."""

    value: float
    """NaN: there were no prompts."""
    error: float
    """The standard error of the mean, clustered by prompt; NaN with fewer than two prompts."""
    low: float
    high: float
    prompts: int
    samples: int

    @property
    def margin(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        """Return the mean with its interval, as people write it."""
        if math.isnan(self.error):
            return "-" if math.isnan(self.value) else f"{self.value:.3f}"
        return f"{self.value:.3f} ± {self.error:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean(groups: Iterable[Sequence[float]], confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean of the scores of some prompts' samples; prompts without a score are left out.

    The interval is Student's over the prompts' own means. Where every score is 0 or 1 it is Wilson's for as many
    independent samples as would have the same error: Student's is too narrow near 0 and 1, and has no width there.
    """
    scored = [group for group in groups if len(group)]
    values = np.array([math.fsum(group) / len(group) for group in scored])
    samples = sum(map(len, scored))
    binary = all(score in (0, 1) for group in scored for score in group)
    return _share(values, samples, confidence) if binary and samples else of_means(values, samples, confidence)


def pass_at(groups: Iterable[Sequence[bool]], k: int, confidence: float = CONFIDENCE) -> Estimate:
    """Return pass@k: how often at least one of ``k`` samples of a prompt passes.

    Unbiased (https://arxiv.org/abs/2107.03374); prompts with fewer than ``k`` samples are left out.
    """
    return _of_counts(groups, k, lambda n, c: 1 - math.comb(n - c, k) / math.comb(n, k), confidence)


def pass_all(groups: Iterable[Sequence[bool]], k: int, confidence: float = CONFIDENCE) -> Estimate:
    """Return pass^k: how often all of ``k`` samples of a prompt pass (https://arxiv.org/abs/2406.12045), unbiased."""
    return _of_counts(groups, k, lambda n, c: math.comb(c, k) / math.comb(n, k), confidence)


def looks(prompts: int) -> list[int]:
    """Return after how many prompts an evaluation that may end early is looked at: 32, 64, 128, …, all of them."""
    sizes = [FIRST_LOOK << power for power in range(prompts.bit_length()) if FIRST_LOOK << power < prompts]
    return [*sizes, prompts]


def confidence_of_a_look(prompts: int, confidence: float = CONFIDENCE) -> float:
    """Return the confidence that the interval of each look needs for all of them to hold together.

    Whoever stops at the first narrow interval has looked several times. Each look spends an equal share of what may go
    wrong (Bonferroni), so the interval that ends the evaluation keeps its promise, whatever it was that ended it.
    """
    return 1 - (1 - confidence) / len(looks(prompts))


def _of_counts(
    groups: Iterable[Sequence[bool]], k: int, of: Callable[[int, int], float], confidence: float
) -> Estimate:
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    enough = [group for group in groups if len(group) >= k]
    values = np.array([of(len(group), sum(group)) for group in enough])
    samples = sum(map(len, enough))
    return _share(values, samples, confidence)


def of_means(values: Values, samples: int, confidence: float = CONFIDENCE) -> Estimate:
    """Return the estimate of what each prompt has one value of, ``[prompts]``, by Student's distribution."""
    count, value = len(values), float(values.mean()) if len(values) else math.nan
    if count < 2:
        return Estimate(value, math.nan, math.nan, math.nan, count, samples)
    error = _error(values)
    margin = _student(confidence, count - 1) * error
    return Estimate(value, error, value - margin, value + margin, count, samples)


def error_of_mean(groups: Iterable[Sequence[float]]) -> float:
    """Return the standard error of the mean score of some prompts' samples; NaN with fewer than two prompts."""
    return _error(np.array([np.mean(scores) for scores in groups if len(scores)]))


def _error(values: Values) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _share(values: Values, samples: int, confidence: float) -> Estimate:
    """Return the estimate of a share, from that of each prompt's samples."""
    plain = of_means(values, samples, confidence)
    if plain.prompts < 2:
        return plain
    # 1. As how many independent samples the prompts count. Where all agree, nothing says that a prompt's samples do not
    #    depend on one another wholly, so each prompt counts once.
    share, variance = plain.value, plain.value * (1 - plain.value)
    count = min(samples, variance / plain.error**2) if plain.error else samples if variance else plain.prompts
    # 2. Wilson's interval, by Student's quantile since the error is an estimate too.
    square = _student(confidence, plain.prompts - 1) ** 2
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = math.sqrt(square * variance / count + (square / (2 * count)) ** 2) / (1 + square / count)
    return Estimate(share, plain.error, max(0.0, centre - half), min(1.0, centre + half), plain.prompts, samples)


@cache
def _student(confidence: float, freedom: int) -> float:
    """Return how many standard errors an interval of Student's distribution reaches to either side."""
    return float(student_t().ppf((1 + confidence) / 2, freedom))


def student_t() -> Any:
    """Return SciPy's Student distribution, imported when it is asked for: that takes half a second."""
    from scipy.stats import t

    return t
