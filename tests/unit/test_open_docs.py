"""The YAML of the pages about foreign agents, servers and tools is what the package takes."""

import json
import re

import yaml

from fsm_rollout.agent.graph import ToolSpec
from fsm_rollout.agent.loader import loads
from fsm_rollout.engines.specs import faults
from fsm_rollout.jobs.run_config import PromptSource
from tests.kit import ROOT


def blocks(page: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", (ROOT / f"docs/{page}.md").read_text("utf-8"), re.DOTALL)


def test_external() -> None:
    (block,) = blocks("external")
    assert loads(block).states["EXTERNAL"].options["dialect"] == "openai"


def test_mcp() -> None:
    (block,) = blocks("mcp")
    tool = ToolSpec.model_validate_json(json.dumps(yaml.safe_load(block)["tools"]["files"]))
    assert tool.mcp is not None
    assert not tool.may_repeat


def test_openai_engine() -> None:
    plain, updated = (yaml.safe_load(block)["engine"] for block in blocks("openai_engine"))
    assert faults(plain) == []
    assert faults(updated) == []


def test_environments() -> None:
    played, tools, run = blocks("environments")
    assert loads(played).interaction is not None
    tool = ToolSpec.model_validate_json(json.dumps(yaml.safe_load(tools)["tools"]["sums"]))
    assert tool.verifiers is not None
    assert tool.is_source
    source = PromptSource.model_validate_json(json.dumps(yaml.safe_load(run)["prompts"]))
    assert source.kwargs == {"taskset": "sums-taskset", "config": {"size": 64}}
