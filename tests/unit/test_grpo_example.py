"""The example that trains: its ratios are 1 before the first update, and it stops when a mask is wrong."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.kit import ROOT

EXAMPLE: dict[str, Any] = runpy.run_path(str(ROOT / "examples/grpo/grpo.py"))
SHORT = {"steps": 1, "groups": 2, "n": 4, "held_back": 2, "minibatches": 1}


def test_ratios_are_one_before_the_first_update_and_the_engine_gets_the_new_weights(tmp_path: Path) -> None:
    first, last = EXAMPLE["train"](EXAMPLE["Settings"](**SHORT), tmp_path)
    assert first["ratio_off"] < 1e-3
    assert (first["clipped"], first["step"], last["step"]) == (0.0, 0, 1)
    assert first["trained_tokens"] > 0
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text("utf-8").splitlines()] == [0, 1]
    assert (tmp_path / "model/config.json").exists()


@pytest.mark.parametrize("mask", ["environment", "shifted", "logprobs"])
def test_a_wrong_mask_is_found_at_the_first_step(tmp_path: Path, mask: str) -> None:
    with pytest.raises(SystemExit, match="do not belong together"):
        EXAMPLE["train"](EXAMPLE["Settings"](**SHORT, mask=mask), tmp_path)
