"""Engines from run YAMLs: what is built, and what is said of mistakes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, field_validator

from fsm_rollout.engines import build
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.engines.specs import faults
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.trajectory.tokens import as_ids
from tests.cases import cases, table
from tests.embedded import tokenizer


def said(spec: dict[str, Any], base: Path) -> str:
    """Return what the engine answers to the first turn of context main."""
    pool = build_engine({"kind": "scripted", **spec}, base)
    params = SamplingParams(50, stop_ids=pool.facts.eos_ids)
    request = Request("r", as_ids([1]), params, agent="solver", context="main")

    async def ids() -> list[int]:
        pending = EngineClient(pool).submit(request)
        await pending.done.wait()
        await pool.aclose()
        return list(pending.ids)

    return str(pool.facts.tokenizer.decode(asyncio.run(ids()), skip_special_tokens=True))


def test_a_script_stands_in_the_spec_or_in_a_file(tmp_path: Path):
    turns = ["The answer is 7.", {"text": "Bye.", "delay": 1}]
    (tmp_path / "list.yaml").write_text("- The answer is 7.\n- {text: Bye., delay: 1}\n")
    (tmp_path / "by_context.json").write_text(json.dumps({"main": turns, "critic": ["ACCEPT"]}))
    for spec in (
        {"turns": turns},
        {"turns": {"solver/main": turns}},
        {"script": "list.yaml"},
        {"script": "by_context.json"},
    ):
        assert said(spec, tmp_path) == "The answer is 7."


def test_a_key_that_is_null_is_not_there(tmp_path: Path):
    """So ``engine.replicas=null`` on the command line takes a key of the run file out."""
    keys = ("replicas", "placement", "gpus", "router", "pool", "ray", "script", "max_context")
    for nulls in (dict.fromkeys(keys), {"replicas": 2, "pool": {"attempts": None, "restarts": 1}}):
        assert said({"turns": ["The answer is 7."], **nulls}, tmp_path) == "The answer is 7."
    with pytest.raises(ConfigError, match="unknown key 'threds'"):
        build_engine({"kind": "transformers", "threads": None, "threds": 1}, tmp_path)


@cases("engines")
def test_mistakes_are_named_all_together(spec: dict[str, Any], messages: list[str], tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        build_engine(spec, tmp_path)
    for message in messages:
        assert message in str(error.value)


@cases("engines")
def test_mistakes_in_a_script_file_have_their_line(text: str, messages: list[str], tmp_path: Path):
    (tmp_path / "script.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        build_engine({"kind": "scripted", "script": "script.yaml"}, tmp_path)
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize("spec", table("engines")["a model that is not there"])
def test_a_model_that_is_not_there_is_found_before_anything_starts(
    spec: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(build, "resolve_name", None)  # what would import the engine
    with pytest.raises(ConfigError, match=f"model 'absent': there is no folder '{tmp_path}/absent'"):
        build_engine(spec, tmp_path)
    if spec.get("placement") == "ray":  # a cluster of others has folders of its own
        assert faults({**spec, "ray": {"address": "auto"}}, tmp_path) == []


@pytest.mark.parametrize(("name", "kind"), [("vllm", "openai"), ("hf", "transformers"), ("mock", "scripted")])
def test_a_kind_that_is_called_otherwise_elsewhere_leads_to_ours(name: str, kind: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"engine kind '{name}' does not exist; use '{kind}'"):
        build_engine({"kind": name}, tmp_path)


# -- engines of a user's own -----------------------------------------------------------------------------------------


class Shouting(ScriptedEngine):
    """Says one thing, loudly."""

    def __init__(self, says: str, times: int = 1, *, notes: Path | None = None) -> None:
        super().__init__([Turn(text=says.upper() * times)], tokenizer=tokenizer())
        self.notes = notes


class Choosy(Shouting):
    """Has declared its keys."""

    class Options(BaseModel):
        says: str
        times: int = Field(2, ge=1, le=3)

        @field_validator("says")
        @classmethod
        def _polite(cls, value: str) -> str:
            if "please" not in value:
                raise ValueError("say please")
            return value


def broken(says: str = "") -> object:
    """Return what is no engine, or nothing."""
    if says:
        raise OSError("no such device")
    return object()


NUMBER = 3
HERE = "tests.unit.engines.test_specs"


def test_an_engine_of_ones_own_takes_the_keys_of_its_class(tmp_path: Path):
    own = {"kind": f"{HERE}:Shouting", "says": "ab"}
    assert said(own, tmp_path) == "AB"
    assert said({**own, "times": 2}, tmp_path) == "ABAB"
    assert said({"kind": f"{HERE}:Choosy", "says": "please "}, tmp_path) == "PLEASE "
    engine = build_engine({**own, "notes": "notes.txt"}, tmp_path).replicas[0].engine
    assert engine.notes == tmp_path / "notes.txt"  # type: ignore[attr-defined]  # as every path of a run's file


def test_an_engine_of_ones_own_has_replicas(tmp_path: Path):
    spec = {"kind": f"{HERE}:Shouting", "says": "ab", "replicas": 2, "router": "least_loaded", "pool": {"attempts": 5}}
    pool = build_engine(spec, tmp_path)
    assert (len(pool.replicas), pool.tries.attempts) == (2, 5)
    asyncio.run(pool.aclose())
    assert said(spec, tmp_path) == "AB"


@cases("engines")
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_of_ones_own_that_cannot_be_built(says: str, message: str, tmp_path: Path, replicas: int):
    with pytest.raises(EngineError, match=message):
        build_engine({"kind": f"{HERE}:broken", "says": says, "replicas": replicas}, tmp_path)
