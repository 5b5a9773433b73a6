"""New weights are numbers, whatever kind of numbers they are kept as."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.engines.finite import check_finite
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
