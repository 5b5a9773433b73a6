"""A package that is installed brings words: what they name works in a run, and mistakes are told with what there is."""

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fsm_rollout as fr
from fsm_rollout.agent.json_schema import agent_schema
from fsm_rollout.agent.loader import dump, load_agent
from fsm_rollout.agent.predicates import PREDICATE_NAMES
from fsm_rollout.agent.words import HANDLERS, INTERACTIONS
from fsm_rollout.chat.formats.registry import FORMATS
from fsm_rollout.cli import app
from fsm_rollout.engines.specs import ENGINES, ROUTERS
from fsm_rollout.environment.rewards import GROUP_FILTERS, REWARDS
from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.run_prompts import PROMPT_SOURCES
from fsm_rollout.jobs.run_schema import run_schema
from fsm_rollout.names.registry import Registry
from fsm_rollout.report.readers import READERS
from tests.cases import FILES
from tests.kit import ROOT

REGISTRIES = (
    ENGINES, ROUTERS, FORMATS, READERS, REWARDS, GROUP_FILTERS, HANDLERS, PREDICATE_NAMES, INTERACTIONS, PROMPT_SOURCES
)  # fmt: skip
CODE = FILES["code of each group"]
WORDS = {
    "engines": "Parrot", "routers": "Routes", "tool_formats": "Format", "trackers": "Lines", "rewards": "length",
    "group_filters": "every", "handlers": "Nod", "predicates": "loud", "interactions": "Nobody", "prompts": "prompts",
}  # fmt: skip
AGENT = FILES["parrot"]
RUN = FILES["run of a parrot"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that is installed: its module, and the folder in which an installer says what it brings."""
    site = tmp_path / "site"
    install(site, "demo_pack", {group: f"demo_pack:{name}" for group, name in WORDS.items()})
    (site / "demo_pack.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "demo_pack", raising=False)
    return site


def install(site: Path, name: str, brings: dict[str, str]) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    points = "".join(f"[fsm_rollout.{group}]\ndemo = {path}\n" for group, path in brings.items())
    (info / "entry_points.txt").write_text(points, encoding="utf-8")


def test_all_that_a_package_brings_works_in_a_run(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parrot.yaml").write_text(AGENT, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", "run.yaml"])
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "runs/parrot/summary.json").read_text("utf-8"))
    assert summary["stop_reasons"] == {"loud": 1}
    assert summary["score_mean"] == len("HELLO")
    steps = (tmp_path / "runs/parrot/lines.jsonl").read_text("utf-8").splitlines()
    assert json.loads(steps[0])["score/mean"] == len("HELLO")
    # What a journal says is data: the code of a package is imported as the run's own file names it, too.
    own = RUN.replace("kind: demo, says: HELLO, replicas: 2, router: demo", "kind: scripted, turns: [HELLO]")
    (tmp_path / "run.yaml").write_text(own, encoding="utf-8")
    refusal = CliRunner().invoke(app, ["resume", "runs/parrot"])
    assert refusal.exit_code == 2
    assert "engine.kind: the run in" in refusal.output
    assert "began with 'demo', and that file names none" in refusal.output
    graph = load_agent(tmp_path / "parrot.yaml")
    assert graph.interaction is not None
    assert (graph.interaction.use, graph.interaction.kwargs) == ("demo_pack:Nobody", {"mood": "calm"})
    assert load_agent(dump(graph)) == graph


def test_a_package_is_imported_only_for_its_words(package: Path, tmp_path: Path) -> None:
    assert [registry.group for registry in REGISTRIES if "demo" not in registry] == []
    assert "demo" in json.dumps(run_schema())
    assert "demo" in json.dumps(agent_schema())
    assert "demo_pack" not in sys.modules
    assert {registry.group.removeprefix("fsm_rollout.") for registry in REGISTRIES} == WORDS.keys()


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.group)
def test_words_that_ship_need_no_look_at_packages(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsm_rollout.names.registry.entry_points", None)  # what would look
    assert [word for word in (*registry.built_in, "some:Code") if registry.expanded(word) != word] == []
    if all(isinstance(path, str) for path in registry.built_in.values()) and registry is not PROMPT_SOURCES:
        assert all(callable(registry.find(word)) for word in registry.built_in)


def test_a_word_that_is_not_there(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in REGISTRIES:
        with pytest.raises(ConfigError) as error:
            registry.path("demoo")
        assert str(error.value) == (
            f"{registry.what} 'demoo' does not exist; did you mean 'demo'? Or give '{registry.form}'"
        )
    with pytest.raises(fr.ConfigError, match="reward 'exact_anser' does not exist; did you mean 'exact_answer'"):
        fr.Rollout(ROOT / "configs/agents/single_turn.yaml", {"kind": "scripted", "turns": ["4"]}, reward="exact_anser")
    install(tmp_path / "other", "other_pack", {"routers": "other_pack:Router"})
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="router 'demo' is brought by several packages; give one: "):
        ROUTERS.path("demo")
    assert importlib.metadata.version("demo_pack") == "1.0"


def test_the_guide_names_every_group() -> None:
    guide = (ROOT / "docs/howto/package.md").read_text("utf-8")
    assert [registry.group for registry in REGISTRIES if f"`{registry.group}`" not in guide] == []
