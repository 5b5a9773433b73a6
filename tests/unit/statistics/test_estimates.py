"""Estimates against definitions that share no code with them: enumeration, and thousands of runs of a known truth."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import fmean

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.statistics.compare import compare
from fsm_rollout.statistics.estimates import confidence_of_a_look, looks, mean, pass_all, pass_at

RUNS = 10_000
Draw = Callable[[np.random.Generator, int, int], npt.NDArray[np.float64]]  # scores [prompts, samples]
groups_of_passes = st.lists(st.lists(st.booleans(), max_size=6), max_size=6)


@given(groups_of_passes, st.integers(1, 6))
def test_pass_at_k_and_pass_k_are_those_of_all_choices_of_k_samples(groups: list[list[bool]], k: int) -> None:
    enough = [group for group in groups if len(group) >= k]
    for estimate, of in ((pass_at(groups, k), any), (pass_all(groups, k), all)):
        assert (estimate.prompts, estimate.samples) == (len(enough), sum(map(len, enough)))
        if enough:
            expected = fmean(fmean(map(of, combinations(group, k))) for group in enough)
            assert estimate.value == pytest.approx(expected)
        else:
            assert math.isnan(estimate.value)


@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=2, max_size=20))
def test_the_error_is_the_cluster_robust_one_of_a_regression_on_a_constant(groups: list[list[float]]) -> None:
    estimate = mean(groups)
    everything = np.array(groups)
    residuals = (everything - everything.mean()).sum(axis=1)
    robust = math.sqrt((residuals**2).sum()) / everything.size * math.sqrt(len(groups) / (len(groups) - 1))
    assert estimate.value == pytest.approx(everything.mean(), abs=1e-12)
    assert estimate.error == pytest.approx(robust, abs=1e-9)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=4), min_size=2, max_size=9))
def test_more_samples_that_say_the_same_narrow_no_interval_of_scores(groups: list[list[float]]) -> None:
    groups[0] = [0.25]  # no mere shares
    once, twice = mean(groups), mean([group * 2 for group in groups])
    assert (once.low, once.high) == pytest.approx((twice.low, twice.high))


def test_who_knows_one_prompt_knows_nothing_of_others() -> None:
    estimate = mean([[1.0, 0.0], []])
    assert (estimate.value, estimate.prompts, estimate.samples) == (0.5, 1, 2)
    assert math.isnan(estimate.low)
    assert str(mean([])) == "-"
    assert str(estimate) == "0.500"


def test_where_all_pass_the_interval_still_has_a_width() -> None:
    estimate = mean([[1, 1, 1]] * 20)
    assert estimate.high == 1
    assert 0.75 < estimate.low < 0.9  # the rule of three says 0.85 of 20
    with pytest.raises(ValueError, match="k must be at least 1"):
        pass_at([[True]], 0)


# -- coverage ------------------------------------------------------------------------------------------------------


def solved(a: float, b: float) -> Draw:
    """0/1 scores of prompts that differ in how hard they are."""
    return lambda rng, prompts, n: rng.binomial(1, rng.beta(a, b, (prompts, 1)), (prompts, n)).astype(float)


def graded(rng: np.random.Generator, prompts: int, n: int) -> npt.NDArray[np.float64]:
    return rng.normal(rng.normal(0, 1, (prompts, 1)), 1, (prompts, n))


def covered(draw: Draw, truth: float, prompts: int, n: int) -> float:
    """Return in what share of runs the interval holds the truth."""
    rng = np.random.default_rng(0)
    estimates = [mean(draw(rng, prompts, n).tolist()) for _ in range(RUNS)]
    return fmean(estimate.low <= truth <= estimate.high for estimate in estimates)


@pytest.mark.parametrize("prompts", [30, 100])
def test_of_30_prompts_or_more_95_of_100_intervals_hold_the_truth(prompts: int) -> None:
    assert 0.94 <= covered(graded, 0.0, prompts, 4) <= 0.96


@pytest.mark.parametrize(
    ("draw", "truth", "prompts", "n"),
    [
        (graded, 0.0, 5, 4),
        (solved(1, 1), 0.5, 30, 4),
        (solved(8, 2), 0.8, 10, 1),
        (solved(19, 1), 0.95, 20, 8),
        (solved(0.5, 0.5), 0.5, 10, 4),
    ],
)
def test_of_few_prompts_or_shares_at_least_93_do(draw: Draw, truth: float, prompts: int, n: int) -> None:
    assert covered(draw, truth, prompts, n) >= 0.93


def test_an_evaluation_that_stops_when_it_is_sure_keeps_its_promise() -> None:
    """Whoever looks at each prompt at 95% and stops at the first narrow interval does not."""
    rng, truth, most = np.random.default_rng(1), 0.8, 500
    held, spent = [], []
    for _ in range(1_000):
        scores = solved(8, 2)(rng, most, 2).tolist()
        for count in looks(most):
            estimate = mean(scores[:count], confidence_of_a_look(most))
            if estimate.margin <= 0.07:
                break
        held.append(estimate.low <= truth <= estimate.high)
        spent.append(count)
    assert fmean(held) >= 0.95
    assert fmean(spent) < most / 2, "it never ended early, so nothing was tried"
    assert looks(20) == [20]
    assert looks(64) == [32, 64]


# -- two runs ------------------------------------------------------------------------------------------------------


def named(scores: Sequence[Sequence[float]]) -> dict[str, Sequence[float]]:
    return {str(number): each for number, each in enumerate(scores)}


@pytest.mark.parametrize("n", [1, 4])
def test_two_samplings_of_one_policy_are_told_apart_in_5_of_100(n: int) -> None:
    rng = np.random.default_rng(2)
    found = []
    for _ in range(2_000):
        hard = rng.beta(2, 1, (60, 1))
        runs = [named(rng.binomial(1, hard, (60, n)).tolist()) for _ in range(2)]
        found.append(compare(*runs).told_apart)
    assert 0.03 <= fmean(found) <= 0.07


# How many of four samples were right on each of 48 prompts of configs/data/arithmetic.jsonl, by `fsm-rollout eval` of
# the embedded checkpoints at temperature 1.
EARLY, FINAL = "310434023014440003344013340234004403444431031043", "4" * 39 + "3" + "4" * 8


@pytest.mark.parametrize("with_replacement", [True, False])
@pytest.mark.parametrize(("counts", "least"), [(EARLY, 0.03), (FINAL, 0.0)])
def test_a_recorded_run_is_told_apart_from_itself_in_5_of_100(
    counts: str, least: float, with_replacement: bool
) -> None:
    """The groups are sampled 1,000 times; where all but one sample are right nothing can be told apart."""
    rng = np.random.default_rng(3)
    recorded = np.array([[1.0] * int(right) + [0.0] * (4 - int(right)) for right in counts])
    found = []
    for _ in range(1_000):
        if with_replacement:
            drawn = [np.take_along_axis(recorded, rng.integers(0, 4, recorded.shape), 1) for _ in range(2)]
        else:
            drawn = np.hsplit(rng.permuted(recorded, axis=1), 2)
        found.append(compare(*(named(each.tolist()) for each in drawn)).told_apart)
    assert least <= fmean(found) <= 0.07


def test_as_many_prompts_as_it_says_show_a_difference_in_four_runs_of_five() -> None:
    rng = np.random.default_rng(4)

    def runs(prompts: int) -> tuple[dict[str, Sequence[float]], dict[str, Sequence[float]]]:
        hard = rng.normal(0, 3, prompts)
        return named((hard + rng.normal(0, 1, prompts))[:, None].tolist()), named(
            (hard + 0.3 + rng.normal(0, 1, prompts))[:, None].tolist()
        )

    needed = compare(*runs(2_000)).prompts_for(0.3)
    seen = fmean(compare(*runs(needed)).told_apart for _ in range(1_000))
    assert 0.76 <= seen <= 0.84
    pilot = compare(*runs(needed))
    assert pilot.visible == pytest.approx(0.3, rel=0.2)


def test_prompts_that_all_differ_alike_count_each_as_one_toss() -> None:
    four, six = ({str(p): [0.0] for p in range(n)} for n in (4, 6))
    assert compare(four, {name: [1.0] for name in four}).p_value == 2 / 2**4
    better = compare(six, {name: [1.0] for name in six} | {"more": [0.0]})
    assert (better.told_apart, better.estimate.value, better.estimate.prompts) == (True, 1.0, 6)
    same = compare(six, six)
    assert (same.told_apart, same.p_value) == (False, 1.0)
    with pytest.raises(ValueError, match="not 0"):
        better.prompts_for(0)
