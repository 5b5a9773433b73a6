"""A model by its name: from the cache without a look at the network, else downloaded, else a message that helps."""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fsm_rollout as fr
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.specs import faults
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.model import embedded_model
from fsm_rollout.model.folders import model_folder, recorded_engine, recorded_tokenizer
from fsm_rollout.trajectory.journal import Journal, metadata
from tests.hub import COMMIT, Hub, fill_cache, serving
from tests.kit import ROOT

NAME = "tiny/Calculator-3M"
NOWHERE = "http://127.0.0.1:1"  # where nobody listens


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what HF_ENDPOINT does, which is read as `huggingface_hub` is imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a hub that cannot be reached, and no token."""
    from huggingface_hub import constants

    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    point_at(NOWHERE, monkeypatch)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return folder


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has the embedded model by a name, and one model without weights."""
    bare = cache.parent / "bare"
    bare.mkdir()
    shutil.copy(embedded_model() / "config.json", bare)
    with serving({f"models/{NAME}": embedded_model(), "models/tiny/bare": bare}) as served:
        point_at(served.url, monkeypatch)
        yield served


def test_a_model_in_the_cache_needs_no_network(cache: Path) -> None:
    snapshot = fill_cache(cache, NAME, embedded_model())
    assert model_folder(NAME) == model_folder(NAME, revision=COMMIT) == snapshot
    prompts = fr.read_prompts(ROOT / "configs/data/arithmetic.jsonl", limit=1)
    with fr.Rollout(fr.load_agent(ROOT / "configs/agents/tool_agent.yaml"), NAME) as rollout:
        named = rollout.run(prompts)
    with fr.Rollout(fr.load_agent(ROOT / "configs/agents/tool_agent.yaml"), "embedded") as rollout:
        assert rollout.run(prompts).tensordict["responses"].tolist() == named.tensordict["responses"].tolist()


def test_a_model_is_downloaded_once_and_said_to_be(hub: Hub, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fsm_rollout"):
        folder = model_folder(NAME)
    assert f"downloading '{NAME}' from {hub.url} into {cache}" in caplog.text
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (embedded_model() / name).read_bytes()
    asked = list(hub.asked)
    assert model_folder(NAME) == folder
    assert hub.asked == asked


def test_a_tokenizer_comes_without_weights_and_these_later(hub: Hub) -> None:
    engine = build_engine({"kind": "scripted", "turns": ["no"], "tokenizer": NAME}, Path())
    assert not any("safetensors" in path for path in hub.asked)
    assert engine.facts.eos_ids
    assert (model_folder(NAME) / "model.safetensors").is_file()


def test_a_broken_download_is_begun_again(hub: Hub, cache: Path) -> None:
    snapshot = fill_cache(cache, NAME, embedded_model())
    (snapshot / "model.safetensors").unlink()
    assert (model_folder(NAME) / "model.safetensors").is_file()


def test_a_journal_finds_the_tokenizer_of_a_named_model(cache: Path, tmp_path: Path) -> None:
    fill_cache(cache, NAME, embedded_model(), revision="second")
    spec = {"kind": "scripted", "turns": ["4"], "tokenizer": NAME, "revision": "second"}
    agent = fr.load_agent(ROOT / "configs/agents/single_turn.yaml")
    with fr.Rollout(agent, spec, journal=Journal(tmp_path / "run.sqlite")) as rollout:
        rollout.run(["2 + 2?"])
    facts = recorded_engine(metadata(tmp_path / "run.sqlite"), "policy")
    assert (facts.tokenizer, facts.revision) == (NAME, "second")
    assert Path(recorded_tokenizer(facts).name_or_path).name == COMMIT


Change = Callable[[pytest.MonkeyPatch, Hub], object]


def _unplugged(monkeypatch: pytest.MonkeyPatch, _: Hub) -> None:
    point_at(NOWHERE, monkeypatch)


def _offline(monkeypatch: pytest.MonkeyPatch, _: Hub) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def _locked(_: pytest.MonkeyPatch, hub: Hub) -> None:
    hub.token = "secret"


WRONG: list[tuple[str, dict[str, Any], Change | None, str]] = [
    (NAME, {}, _unplugged, f"{NOWHERE} cannot be reached .*refused.*: `hf download {NAME}`"),
    (NAME, {"revision": "v2"}, _unplugged, f"`hf download {NAME} --revision v2`"),
    (NAME, {}, _offline, "HF_HUB_OFFLINE is set; where"),
    (NAME, {"revision": "v2"}, None, f"model '{NAME}' has no revision 'v2' on the hub"),
    (NAME, {}, _locked, f"the hub has no model '{NAME}', or not for you"),
    ("tiny/absent", {}, None, "the hub has no model 'tiny/absent', .*nor is there a folder 'tiny/absent'"),
    ("tiny/bare", {}, None, r"model 'tiny/bare' of the hub has no \*\.safetensors"),
    ("embeded", {}, None, "there is no folder 'embeded'; did you mean 'embedded'"),
    ("embedded", {"revision": "v2"}, None, "is the folder '.*', so it has no revision 'v2'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "change", "message"), WRONG)
def test_what_cannot_be_had_says_what_to_do(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], change: Change | None, message: str
) -> None:
    if change is not None:
        change(monkeypatch, hub)
    with pytest.raises(EngineError, match=message):
        model_folder(name, **options)


def test_a_token_opens_what_is_private(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (model_folder(NAME) / "model.safetensors").is_file()


def test_a_check_asks_no_hub(hub: Hub) -> None:
    assert faults({"kind": "transformers", "model": NAME}, Path()) == []
    assert hub.asked == []
    with pytest.raises(ConfigError, match="model 'no/such/folder': there is no folder"):
        build_engine({"kind": "sglang", "model": "no/such/folder"}, Path())
