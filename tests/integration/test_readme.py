"""The README tells the truth: its YAML is the shipped one, its Python runs, its bound is the proven one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from fsm_rollout import load_agent, prove, read_prompts
from tests.kit import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_its_yaml_is_the_shipped_agent() -> None:
    (block,) = blocks("yaml")
    shown, shipped = yaml.safe_load(block), yaml.safe_load((ROOT / "configs/agents/tool_user.yaml").read_text("utf-8"))
    shipped.pop("description")
    assert shown == shipped


def test_its_bound_is_the_proven_one() -> None:
    assert f": {prove(load_agent(ROOT / 'configs/agents/tool_user.yaml'))}" in README


def test_its_python_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first, training = blocks("python")
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(compile(first, "README.md", "exec"), names)
    assert "32 rows" in capsys.readouterr().out
    trained: list[Any] = []
    names["prompts"] = iter(read_prompts(ROOT / "configs/data/arithmetic.jsonl"))
    names["train"] = lambda batch: trained.append(batch) or {}
    names["engine"] = names["engine"] | {"model": "embedded:early"}  # its groups' scores do differ
    exec(compile(training, "README.md", "exec"), names)
    assert len(trained) == 2
    assert [len(set(batch.tensordict["group_id"])) for batch in trained] == [2, 2]
    assert set(trained[1].tensordict["weight_versions"].unique().tolist()) <= {-1, 0, 1}


def test_its_commands_are_the_makefile_s() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for command in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_its_model_figures_are_the_measured_ones() -> None:
    import json

    card = json.loads((ROOT / "fsm_rollout/model/card.json").read_text("utf-8"))
    for name in ("final", "early"):
        assert f"{100 * card[name]['success_t1']:.1f} % | {100 * card[name]['success_greedy']:.1f} %" in README
