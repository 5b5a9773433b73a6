"""New weights are numbers, whatever kind of numbers they are kept as."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.engines.weights_check import check_finite, check_weights
from fsm_rollout.errors import EngineError

KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn]


@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    place=st.integers(0, 1599),
    bad=st.sampled_from([None, float("nan"), float("inf"), -float("inf")]),
    turned=st.booleans(),
)
def test_one_number_that_is_none_is_found_wherever_it_is(
    kind: torch.dtype, rows: int, columns: int, place: int, bad: float | None, turned: bool
):
    values = torch.full((rows, columns), 3.0)
    if bad is not None:
        values[place % rows, place % columns] = bad
    values = values.to(kind)
    asked = {"first": torch.zeros(3), "layer.weight": values.t() if turned else values}
    if bool(values.float().isfinite().all()):  # one of the kinds has no infinity
        check_finite(asked)
    else:
        with pytest.raises(EngineError, match=r"new weight 'layer\.weight' is not finite: . NaN and . infinite of "):
            check_finite(asked)


@pytest.mark.parametrize("fine", [torch.zeros(0), torch.tensor(1.0), torch.arange(5), torch.tensor([True, False])])
def test_what_cannot_be_infinite_is_fine(fine: torch.Tensor):
    check_finite({"a": fine})


def test_the_largest_numbers_are_numbers():
    """Their sum is none."""
    check_finite({"a": torch.full((100,), torch.finfo(torch.float16).max, dtype=torch.float16)})


def test_weights_are_checked_by_name_and_shape() -> None:
    check_weights({"a": torch.zeros(2, 3)}, {"a": [2, 3]})
    check_weights({"a": torch.zeros(2)}, {})  # nobody knows what the model has
    with pytest.raises(EngineError, match="'ab', which the model does not have; "):
        check_weights({"ab": torch.zeros(1)}, {"abc": [1]})
    with pytest.raises(EngineError, match=r"has shape \[2\], the model's has \[3\]"):
        check_weights({"a": torch.zeros(2)}, {"a": [3]})
    with pytest.raises(EngineError, match="'a' is a list; weights are torch tensors by name"):
        check_weights({"a": [0.0]}, {"a": [1]})
