"""What is read from a model folder, and what is checked and saved before weights travel; no SGLang needed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fsm_rollout.engines.sglang.model import check_weights_there, config_number, save_tensors, shapes_in, stop_tokens_in
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from fsm_rollout.model.folders import load_tokenizer
from tests.integration.sglang_oracle import model


def test_a_folder_says_what_its_loaded_model_says() -> None:
    folder, loaded = embedded_model(), model("final")
    assert shapes_in(folder) == {name: list(tensor.shape) for name, tensor in loaded.state_dict().items()}
    assert [config_number(folder, key) for key in ("vocab_size", "max_position_embeddings")] == [704, 2048]
    assert stop_tokens_in(folder, load_tokenizer(folder)) == {loaded.generation_config.eos_token_id}


def test_stop_tokens_come_from_the_first_that_names_them(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        shutil.copy(embedded_model() / name, tmp_path)
    tokenizer = load_tokenizer(embedded_model())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}), "utf-8")
    assert stop_tokens_in(tmp_path, tokenizer) == {1, 2}
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 3, "vocab_size": 9}}), "utf-8")
    assert stop_tokens_in(tmp_path, tokenizer) == {3}
    assert [config_number(tmp_path, key) for key in ("vocab_size", "max_position_embeddings")] == [9, None]
    (tmp_path / "config.json").write_text("{}", "utf-8")
    assert stop_tokens_in(tmp_path, tokenizer) == {tokenizer.eos_token_id}
    (tmp_path / "config.json").write_text("{", "utf-8")
    with pytest.raises(EngineError, match=r"config\.json' is not JSON"):
        config_number(tmp_path, "vocab_size")


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


def test_weights_travel_whole_whatever_memory_they_lie_in(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.arange(i * 40, dtype=torch.float32) for i in range(1, 8)}
    weights["view"] = torch.arange(10_000.0)[:5]
    weights["tied"], weights["turned"] = weights["w1"], weights["w2"].view(8, 10).T
    weights["half"] = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    save_tensors(weights, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())
    assert (tmp_path / "model.safetensors").stat().st_size < 8000, "a view must not take all of its storage along"
