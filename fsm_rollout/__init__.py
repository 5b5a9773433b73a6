"""Agent rollouts as explicit finite state machines.

An agent is a YAML state graph; it is proven to end before it runs; what comes out are batches in which every token is
exactly what the engine sampled or the environment wrote, and a mask, derived, that says which. See the README.

Everything is imported on first use, so ``import fsm_rollout`` loads neither torch nor transformers.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "AgentGraph": "agent.graph",
    "BadArguments": "errors",
    "ChatTemplate": "chat",
    "ConfigError": "errors",
    "ForeignVisit": "states.external.handler",
    "Group": "scheduler.group",
    "Journal": "trajectory.journal",
    "Outcome": "trajectory.trajectory",
    "Prompt": "trajectory.prompt",
    "Rollout": "rollout",
    "RolloutError": "errors",
    "ScriptedEngine": "engines.scripted.engine",
    "State": "states",
    "ToolContext": "tools",
    "ToolResult": "tools",
    "Trajectory": "trajectory.trajectory",
    "TrajectoryBatch": "batch.batch",
    "TransformersEngine": "engines.transformers.engine",
    "endless_prompts": "trajectory.endless",
    "load_agent": "agent.loader",
    "load_model": "engines.transformers.checkpoints",
    "prove": "agent.proof",
    "read_prompts": "trajectory.prompt",
    "verify": "agent.verify",
}

__all__ = [  # as in the table above; the type checker wants the literals
    "AgentGraph",
    "BadArguments",
    "ChatTemplate",
    "ConfigError",
    "ForeignVisit",
    "Group",
    "Journal",
    "Outcome",
    "Prompt",
    "Rollout",
    "RolloutError",
    "ScriptedEngine",
    "State",
    "ToolContext",
    "ToolResult",
    "Trajectory",
    "TrajectoryBatch",
    "TransformersEngine",
    "endless_prompts",
    "load_agent",
    "load_model",
    "prove",
    "read_prompts",
    "verify",
]

if TYPE_CHECKING:
    from fsm_rollout.agent.graph import AgentGraph
    from fsm_rollout.agent.loader import load_agent
    from fsm_rollout.agent.proof import prove
    from fsm_rollout.agent.verify import verify
    from fsm_rollout.batch.batch import TrajectoryBatch
    from fsm_rollout.chat import ChatTemplate
    from fsm_rollout.engines.scripted.engine import ScriptedEngine
    from fsm_rollout.engines.transformers.checkpoints import load_model
    from fsm_rollout.engines.transformers.engine import TransformersEngine
    from fsm_rollout.errors import BadArguments, ConfigError, RolloutError
    from fsm_rollout.rollout import Rollout
    from fsm_rollout.scheduler.group import Group
    from fsm_rollout.states import State
    from fsm_rollout.states.external.handler import ForeignVisit
    from fsm_rollout.tools import ToolContext, ToolResult
    from fsm_rollout.trajectory.endless import endless_prompts
    from fsm_rollout.trajectory.journal import Journal
    from fsm_rollout.trajectory.prompt import Prompt, read_prompts
    from fsm_rollout.trajectory.trajectory import Outcome, Trajectory


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"fsm_rollout.{_HOMES[name]}"), name)
    elif not name.startswith("_") and find_spec(f"fsm_rollout.{name}") is not None:
        return import_module(f"fsm_rollout.{name}")
    else:
        raise AttributeError(f"module 'fsm_rollout' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if (_ipython := sys.modules.get("IPython")) is not None:  # in a notebook, agents and trajectories are pictures
    import_module("fsm_rollout.report.notebook").register(_ipython.get_ipython())
