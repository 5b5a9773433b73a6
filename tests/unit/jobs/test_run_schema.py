"""The schemas that editors use: they take what loads, refuse typos, and describe every key."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.json_schema import agent_schema
from fsm_rollout.cli import app
from fsm_rollout.engines.specs import KINDS
from fsm_rollout.jobs.run_config import RunConfig
from fsm_rollout.jobs.run_schema import run_schema
from fsm_rollout.trajectory.prompt import Prompt
from tests.cases import cases
from tests.kit import CONFIGS
from tests.unit.jobs.test_run_config import EVERY_KEY, SMALLEST

RUNS = sorted((CONFIGS / "runs").glob("*.yaml"))


def models(root: type[BaseModel], found: dict[str, type[BaseModel]]) -> dict[str, type[BaseModel]]:
    """Return a model and those below it, by name."""

    def below(annotation: Any) -> Iterator[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        for argument in get_args(annotation):
            yield from below(argument)

    if root.__name__ not in found:
        found[root.__name__] = root
        for field in root.model_fields.values():
            for model in below(field.annotation):
                models(model, found)
    return found


MODELS: dict[str, type[BaseModel]] = {}
for _root in (AgentGraph, RunConfig, Prompt, *KINDS.values()):
    models(_root, MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_every_key_is_described(name: str) -> None:
    schema = MODELS[name].model_json_schema()
    keys = schema.get("properties") or schema["$defs"][name]["properties"]
    assert [key for key, field in keys.items() if not field.get("description")] == []
    endings = {key: field["description"] for key, field in keys.items() if field["description"].endswith(".")}
    assert endings == {}, "a description is a phrase; it has no full stop at its end"


def test_the_models_are_all_found() -> None:
    assert {"Sampling", "Limits", "ToolSpec", "Retry", "StateSpec", "Failures", "PoolSpec", "RaySpec", "Turn"} <= set(
        MODELS
    )


@pytest.mark.parametrize("schema", [agent_schema(), run_schema()], ids=["agent", "run"])
def test_the_schema_describes_every_key(schema: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    undescribed = [
        f"{name}.{key}"
        for name, definition in schema["$defs"].items()
        for key, value in definition.get("properties", {}).items()
        if not value.get("description")
    ]
    assert undescribed == []


VALIDATOR = jsonschema.Draft202012Validator(run_schema())


def accepts(text: str) -> bool:
    return VALIDATOR.is_valid(yaml.safe_load(text))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_shipped_runs_fit_the_schema(path: Path) -> None:
    text = path.read_text("utf-8")
    if "engine:" in text:
        assert accepts(text)


def test_the_schema_takes_what_loads() -> None:
    several = EVERY_KEY.replace("model: embedded, nested: {list: [1, two]}", "threads: null, pool: {attempts: null}")
    assert accepts(several)
    assert accepts(several.replace("{kind: scripted}", "{kind: scripted, turns: [Hello, {text: a, delay: 0.5}]}"))
    assert accepts(several.replace("{kind: scripted}", "{kind: scripted, turns: {main: [Hello]}}"))
    assert accepts(several.replace("{kind: scripted}", '{kind: "my.own:Engine", any: [key, 1]}'))
    assert accepts(SMALLEST + 'n: "${limit}"\nlimit: 4\nreward: "${x}"\nfailures: {tool: "${y}"}\n')
    assert accepts(SMALLEST.replace("a.yaml", "{one: a.yaml, two: /b.yaml}"))


@cases("jobs")
def test_the_schema_refuses_typos(old: str, new: str) -> None:
    assert accepts(SMALLEST)
    assert old in SMALLEST
    assert not accepts(SMALLEST.replace(old, new))


def test_the_command_prints_either() -> None:
    for arguments, schema in (([], agent_schema()), (["agent"], agent_schema()), (["run"], run_schema())):
        done = CliRunner().invoke(app, ["schema", *arguments])
        assert done.exit_code == 0
        assert json.loads(done.stdout) == schema
    assert CliRunner().invoke(app, ["schema", "rnu"]).exit_code == 2
