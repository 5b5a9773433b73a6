"""Importance weights: the oracle adds up token by token; what they are for is checked where all outcomes are listed."""

import math
from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.batch.off_policy import correct
from fsm_rollout.batch.rows import TrainingRow, rows
from fsm_rollout.errors import BatchError
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.histories import several_trajectories
from tests.unit.batch.test_credit import trajectory

LEVELS = st.sampled_from(["token", "turn", "sequence"])
differences = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=7)


def as_responses(batch: TrajectoryBatch, per_row: list[list[float]]) -> torch.Tensor:
    """Values of each row's response, laid out as the batch has it."""
    if batch.packed:
        flat = torch.tensor([value for row in per_row for value in row], dtype=torch.float64)
        return torch.nested.nested_tensor_from_jagged(flat, batch["responses"].offsets())
    laid_out = torch.zeros(batch["responses"].shape, dtype=torch.float64)
    for line, row in zip(laid_out, per_row, strict=True):
        line[: len(row)] = torch.tensor(row, dtype=torch.float64)
    return laid_out


def segment(row: TrainingRow, level: str, at: int) -> object:
    return {"token": at, "turn": int(row.turn_ids[at]), "sequence": 0}[level]


@given(several_trajectories, differences, LEVELS, st.booleans(), st.booleans(), st.booleans())
def test_weights_are_bounded_ratios(
    trajectories: list[Trajectory], drawn: list[float], level: str, geometric: bool, masked: bool, packed: bool
) -> None:
    batch = TrajectoryBatch.from_trajectories(trajectories, pad_id=0, packed=packed)
    rows = batch.rows()
    away = [[drawn[(i + 3 * at) % len(drawn)] for at in range(len(row.mask))] for i, row in enumerate(rows)]
    trainer = [(row.logprobs + np.array(ds)).tolist() for row, ds in zip(rows, away, strict=True)]
    bound: Any = {"bound": "mask", "low": 0.25} if masked else {}
    found = batch.off_policy(as_responses(batch, trainer), level=level, geometric=geometric, high=1.5, **bound)  # type: ignore[arg-type]
    k3: defaultdict[int, list[float]] = defaultdict(list)
    for number, row in enumerate(rows):
        logs: defaultdict[object, list[float]] = defaultdict(list)
        trained = [at for at, mask in enumerate(row.mask.tolist()) if mask]
        for at in trained:
            logs[segment(row, level, at)].append(away[number][at])
            k3[int(row.versions[at])].append(math.exp(away[number][at]) - 1 - away[number][at])
        for at in range(len(row.mask)):
            ratio, weight, kept = (t[number][at].item() for t in (found.ratios, found.weights, found.kept))
            if at not in trained:
                assert (ratio, weight, kept) == (0, 0, False)
                continue
            of_it = logs[segment(row, level, at)]
            wanted = math.exp(sum(of_it) / (len(of_it) if geometric else 1))
            assert ratio == pytest.approx(wanted, rel=1e-4)
            if abs(wanted - 1.5) < 1e-3 or abs(wanted - 0.25) < 1e-3:
                continue
            assert kept == (not masked or 0.25 <= wanted <= 1.5)
            assert weight == pytest.approx(min(wanted, 1.5) if kept else 0, rel=1e-4)
    every = [value for values in k3.values() for value in values]
    if every:
        assert found.figures["kl_k3"] == pytest.approx(sum(every) / len(every), rel=1e-3, abs=1e-5)
        assert {version: figures["tokens"] for version, figures in found.by_version.items()} == pytest.approx(
            {version: len(values) / len(every) for version, values in k3.items()}
        )
        for version, values in k3.items():
            share = sum(values) / sum(every) if sum(every) > 1e-3 else None
            assert share is None or found.by_version[version]["kl_share"] == pytest.approx(share, rel=1e-3, abs=1e-4)
        assert 0 < found.figures["ess"] <= 1 + 1e-9 or math.isnan(found.figures["ess"])
    else:
        assert math.isnan(found.figures["kl"])
        assert not found.by_version


ENGINE, TRAINER = {"a": 0.7, "b": 0.3}, {"a": 0.4, "b": 0.6}
"""What each of two tokens is sampled with."""


def expectations(level: str, **bounds: Any) -> tuple[float, dict[str, float]]:
    """Return the mean weighted value of all sequences of two tokens, as the engine samples them, and mean figures.

    A sequence is worth 1 if it is ``ab``; its weight is its last token's: with levels above the token's, all have one.
    """
    value, figures = 0.0, dict.fromkeys(("kl", "kl_k3"), 0.0)
    for sequence in product("ab", repeat=2):
        probability = math.prod(ENGINE[token] for token in sequence)
        trainer, engine = (torch.tensor([math.log(p[t]) for t in sequence]) for p in (TRAINER, ENGINE))
        segments = torch.zeros(2) if level == "sequence" else torch.arange(2)
        options: dict[str, Any] = {"bound": "truncate", "low": None, "high": 1e9, "geometric": False} | bounds
        found = correct(trainer, engine, torch.ones(2), segments, torch.zeros(2, dtype=torch.int32), **options)
        value += probability * float(found.weights[-1]) * (sequence == ("a", "b"))
        figures = {name: total + probability * found.figures[name] for name, total in figures.items()}
    return value, figures


def test_a_sequence_s_whole_weight_is_unbiased_and_the_others_are_not() -> None:
    exact = TRAINER["a"] * TRAINER["b"]
    kl = sum(p * math.log(p / TRAINER[token]) for token, p in ENGINE.items())
    value, figures = expectations("sequence")
    assert value == pytest.approx(exact)
    assert figures == {"kl": pytest.approx(kl), "kl_k3": pytest.approx(kl)}, "both estimators are unbiased"
    by_token, _ = expectations("token")
    assert by_token == pytest.approx(ENGINE["a"] * TRAINER["b"]), "the token before is the engine's still"
    truncated, _ = expectations("sequence", high=1.1)
    assert truncated == pytest.approx(ENGINE["a"] * ENGINE["b"] * 1.1), "4/7 times 2 is bounded"
    masked, _ = expectations("sequence", bound="mask", high=1.1)
    assert masked == 0


@cases("batch")
def test_what_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    batch = TrajectoryBatch.from_rows([], pad_id=0)
    with pytest.raises(BatchError) as raised:
        batch.off_policy(torch.zeros(0, 0), **options)
    assert message in str(raised.value)
    with pytest.raises(BatchError, match=r"laid out as `responses`, \(0, 0\), got \(0, 3\)"):
        batch.off_policy(torch.zeros(0, 3))
    packed = TrajectoryBatch.from_rows(rows([trajectory(0, 2), trajectory(1, 1)]), pad_id=0, packed=True)
    with pytest.raises(BatchError, match="log_probs must be laid out as `responses`"):
        packed.off_policy(packed["input_ids"].double())
    one = torch.tensor([math.nan])
    with pytest.raises(BatchError, match="1 trained tokens have log-probs that are not finite"):
        correct(one, one, torch.ones(1), torch.ones(1), torch.ones(1), bound="mask", low=None, high=2, geometric=False)
