"""What a model folder's small files say is what its loaded model says."""

import json
import shutil
from pathlib import Path

import pytest

from fsm_rollout.engines.weights import shapes_in
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from fsm_rollout.model.folders import config_number, load_tokenizer, stop_tokens_in
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
