"""New weights are numbers, whatever kind of numbers they are kept as; what is stored is whole and looked at once."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fsm_rollout.engines import weights as weights_module
from fsm_rollout.engines.weights import check_finite, check_folder, check_weights_there, shapes_in
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model

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


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(EngineError, match=r"model\.safetensors' is no safetensors file"):
        shapes_in(tmp_path)


def test_a_checkpoint_that_is_cut_off_or_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"has no weights \(\*\.safetensors, \*\.bin\)"):
        check_weights_there(tmp_path)
    whole = (embedded_model() / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole)
    check_weights_there(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(EngineError, match=f"it is cut off: it has {len(whole) - 1:,} of {len(whole):,} bytes"):
        check_weights_there(tmp_path)


def test_what_has_been_found_finite_is_not_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looked: list[str] = []
    look = weights_module.check_tensor
    monkeypatch.setattr(weights_module, "check_tensor", lambda name, *more: looked.append(name) or look(name, *more))
    save_file({"c": torch.ones(2)}, tmp_path / "model.safetensors")
    for _ in range(2):
        check_folder(tmp_path)
    assert looked == ["c"]
    save_file({"c": torch.full((3,), math.nan)}, tmp_path / "model.safetensors")
    for _ in range(2):
        with pytest.raises(EngineError, match=r"new weight 'c' in .* is not finite"):
            check_folder(tmp_path)
