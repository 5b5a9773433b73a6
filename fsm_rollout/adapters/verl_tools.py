"""verl's tools in an agent: the entries of its tool YAML (``class_name``, ``config``, ``tool_schema``), as they are.

Invariant: the model is shown the schema that verl would show it, and a call does what verl's own loop does: ``create``
with the prompt's ``tools_kwargs[name]["create_kwargs"]``, ``execute``, ``release``, whatever else failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fsm_rollout.agent.graph import AgentGraph, ToolSpec
from fsm_rollout.agent.loader import load_agent
from fsm_rollout.errors import BadArguments, ConfigError, Problem, ToolError
from fsm_rollout.tools import ToolResult
from fsm_rollout.tools.bound_tools import BoundTool, MakeContext, Session
from fsm_rollout.tools.schema import Arguments

USE = "fsm_rollout.adapters.verl_tools:VerlTool"


def load_agent_with(agent: str | Path, tools: str | Path) -> AgentGraph:
    """Load the agent in the YAML ``agent`` with the tools of verl's tool YAML ``tools`` beside those of its own.

    A tool that both name is the agent's.

    Raises:
        ConfigError: the agent is wrong, or the other file is no tool YAML of verl.
    """
    try:
        entries = yaml.safe_load(Path(tools).read_text("utf-8"))["tools"]
        entered = {entry["tool_schema"]["function"]["name"]: {"use": USE, "kwargs": entry} for entry in entries}
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        problem = f"is no tool YAML of verl (tools: [{{class_name, config, tool_schema}}]): {error!r}"
        raise ConfigError(Problem(problem, str(tools))) from error
    try:
        own = yaml.safe_load(Path(agent).read_text("utf-8")).get("tools") or {}
    except (OSError, yaml.YAMLError, AttributeError):
        own = {}  # load_agent says what is wrong with it
    return load_agent(agent, [f"tools={json.dumps(entered | own)}"])


class VerlTool(BoundTool):
    """A tool of verl's; ``kwargs`` are its entry in the tool YAML."""

    def __init__(self, name: str, spec: ToolSpec) -> None:
        super().__init__(name, spec)
        from verl.tools.schemas import OpenAIFunctionToolSchema
        from verl.tools.tool_registry import get_tool_class

        entry: Mapping[str, Any] = spec.kwargs
        schema = OpenAIFunctionToolSchema.model_validate(entry["tool_schema"])
        self.tool = get_tool_class(entry["class_name"])(config=dict(entry.get("config") or {}), tool_schema=schema)
        self.schema = self.tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
        self._required = list(schema.function.parameters.required)

    def check(self, tools_kwargs: Mapping[str, object]) -> None:
        """Take what verl's datasets give: ``create_kwargs`` and the like."""
        unknown = set(tools_kwargs) - {"create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs"}
        if unknown:
            raise ToolError(f"{self.where}: tools_kwargs give {sorted(unknown)}; verl's tools take `create_kwargs`")

    def read(self, arguments: Mapping[str, object]) -> Arguments:
        """Return the arguments; those that the schema requires must be there."""
        if missing := [name for name in self._required if name not in arguments]:
            raise BadArguments(f"missing: {', '.join(missing)}")
        return dict(arguments)

    async def call(self, session: Session, arguments: Arguments, context: MakeContext) -> object:
        """Create, execute, release."""
        kwargs: Any = session.hidden.get(self.name, {}).get("create_kwargs", {})
        instance, _ = await self.tool.create(create_kwargs=dict(kwargs))
        try:
            response, reward, _ = await self.tool.execute(instance, arguments)
        finally:
            await self.tool.release(instance)
        if response.image or response.video:
            raise ToolError(f"{self.where}: it answered with pictures, which verl's tools cannot show here yet")
        return ToolResult(response.text or "", reward=reward)
