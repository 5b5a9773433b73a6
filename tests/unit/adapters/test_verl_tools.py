"""What is no tool YAML of verl is said, with its name."""

from pathlib import Path

import pytest
import yaml

from fsm_rollout.adapters.verl_tools import load_agent_with
from fsm_rollout.errors import ConfigError
from tests.kit import ROOT

AGENT = ROOT / "configs/agents/tool_user.yaml"
ENTRY = {"class_name": "a.B", "config": {"type": "native"}, "tool_schema": {"function": {"name": "search"}}}


@pytest.mark.parametrize("text", [None, "tools: [", "{}", "tools: 3", "tools: [{class_name: a.B}]"])
def test_what_is_no_tool_yaml_is_said_with_its_name(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tools.yaml").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"tools\.yaml.*is no tool YAML of verl"):
        load_agent_with(AGENT, tmp_path / "tools.yaml")


@pytest.mark.parametrize("text", ["[]", "tools: [", "3"])
def test_an_agent_that_is_none_is_what_is_wrong(tmp_path: Path, text: str) -> None:
    (tmp_path / "tools.yaml").write_text("tools: []", "utf-8")
    (tmp_path / "agent.yaml").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"agent\.yaml"):
        load_agent_with(tmp_path / "agent.yaml", tmp_path / "tools.yaml")


def test_an_agent_that_is_not_there_is_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [ENTRY]}), "utf-8")
    with pytest.raises(ConfigError, match=r"agent\.yaml"):
        load_agent_with(tmp_path / "agent.yaml", tmp_path / "tools.yaml")
