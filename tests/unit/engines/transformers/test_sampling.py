"""Sampling against an oracle in numpy and plain Python: sets, probabilities, frequencies."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.engines.protocol import SamplingParams
from fsm_rollout.engines.transformers import sampling
from fsm_rollout.engines.transformers.sampling import Sampler, uniforms

CPU = torch.device("cpu")


def oracle(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Return token → probability, by the definition: rank, keep k, keep the fewest that reach p, normalise."""
    scaled = np.array(logits, dtype=np.float32).astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    ranked = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    ranked = ranked[: top_k or None]
    total = sum(weights[token] for token in ranked)
    kept, reached = [], 0.0
    for token in ranked:
        if kept and reached >= top_p:
            break
        kept.append(token)
        reached += weights[token] / total
    mass = sum(weights[token] for token in kept)
    return {token: weights[token] / mass for token in kept}


def draws(logits: list[float], count: int, **options: float) -> list[tuple[int, float]]:
    """Sample ``count`` times under different seeds, in one batch."""
    params = [SamplingParams(1, seed=seed, **options) for seed in range(count)]  # type: ignore[arg-type]
    rows = torch.tensor([logits]).expand(count, -1)
    return list(zip(*Sampler(params, CPU)(rows, [7] * count)[:2], strict=True))


# Spaced so that no sum of probabilities falls on top_p up to rounding.
spaced = st.lists(st.integers(-40, 40), min_size=1, max_size=12, unique=True).map(lambda xs: [x / 7 for x in xs])


@given(spaced, st.sampled_from([0.3, 1.0, 2.5]), st.integers(0, 14), st.sampled_from([0.05, 0.37, 0.731, 0.9113, 1.0]))
def test_tokens_and_logprobs_are_those_of_the_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float
):
    expected = oracle(logits, temperature, top_k, top_p)
    for token, logprob in draws(logits, 50, temperature=temperature, top_k=top_k, top_p=top_p):
        assert token in expected
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.8), (1.5, 5, 0.77)]
)
def test_frequencies_are_the_probabilities(temperature: float, top_k: int, top_p: float):
    """Chi-squared over 20,000 fixed seeds; 5 standard deviations above its mean would be a one in a million draw."""
    logits = [0.3, -1.2, 2.0, 0.0, 1.1, -0.4, 0.9, -3.0]
    count = 20_000
    expected = oracle(logits, temperature, top_k, top_p)
    seen = np.bincount(
        [token for token, _ in draws(logits, count, temperature=temperature, top_k=top_k, top_p=top_p)], minlength=8
    )
    assert sum(seen) == sum(seen[token] for token in expected)
    chi_squared = sum((seen[token] - count * p) ** 2 / (count * p) for token, p in expected.items())
    freedom = len(expected) - 1
    assert chi_squared < freedom + 5 * math.sqrt(2 * freedom)


def test_greedy_takes_the_likeliest_with_its_unscaled_logprob():
    logits = [0.1, 2.0, -1.0]
    ((token, logprob),) = draws(logits, 1, temperature=0.0, top_k=2, top_p=0.1)
    assert token == 1
    assert logprob == pytest.approx(2.0 - math.log(sum(map(math.exp, logits))), abs=1e-6)


def test_equal_logits_are_cut_to_exactly_k_lower_ids_first():
    assert {token for token, _ in draws([1.0] * 300, 300, top_k=3)} == {0, 1, 2}


def test_a_row_is_sampled_as_if_it_were_alone():
    generator = np.random.default_rng(5)
    logits = torch.tensor(generator.normal(size=(40, 30)), dtype=torch.float32)
    params = [
        SamplingParams(1, temperature=(i % 3) / 2, top_k=(i % 4) * 3, top_p=(0.6, 1.0)[i % 2], seed=i)
        for i in range(40)
    ]
    tokens, logprobs, _ = Sampler(params, CPU)(logits, list(range(40)))
    for i in range(40):
        assert Sampler([params[i]], CPU)(logits[i : i + 1], [i])[:2] == ([tokens[i]], [logprobs[i]])


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float):
    for token, logprob in draws([3.0, 80.0, -80.0], 20, temperature=temperature):
        assert math.isfinite(logprob)
        assert logprob <= 0
        assert temperature > 1 or token == 1


def test_tokens_without_probability_are_never_drawn():
    logits = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    assert {token for token, _ in draws(logits, 2000)} == {1, 3}


def test_not_even_when_the_random_number_is_zero_or_almost_one(monkeypatch: pytest.MonkeyPatch):
    for number, token in ((0.0, 1), (1 - 2.0**-48, 3)):
        monkeypatch.setattr(sampling, "uniforms", lambda seeds, _, number=number: np.full(len(seeds), number))
        assert draws([-math.inf, 0.0, -math.inf, 0.3, -math.inf], 1)[0][0] == token


def test_nan_logits_are_seen_in_the_logprob():
    assert math.isnan(draws([0.0, math.nan, 1.0], 1)[0][1])


def test_uniforms_are_uniform_and_belong_to_seed_and_position():
    seeds, positions = np.divmod(np.arange(40_000, dtype=np.uint64), np.uint64(200))
    numbers = uniforms(seeds, positions)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 49 + 5 * math.sqrt(98)
    assert len(np.unique(numbers)) == 40_000
    for lag in (1, 200):  # neighbouring positions, neighbouring seeds
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 5 / math.sqrt(40_000)
    again = uniforms(seeds[::-1], positions[::-1])[::-1]
    assert (again == numbers).all()


def test_what_top_p_and_top_k_left_is_told_of_the_rows_that_have_them():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).expand(4, -1)
    params = [
        SamplingParams(1),
        SamplingParams(1, top_k=2),
        SamplingParams(1, top_p=0.5),
        SamplingParams(1, temperature=0.0, top_p=0.5),
    ]
    *_, kept = Sampler(params, CPU)(logits, [0] * 4)
    assert {row: list(ids) for row, ids in kept.items()} == {1: [0, 1], 2: [0]}
