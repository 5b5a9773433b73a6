"""Agent rollouts as explicit finite state machines.

An agent is a YAML state graph; it is proven to end before it runs; what comes out are batches in which every token is
exactly what the engine sampled or the environment wrote, and a mask, derived, that says which. See the README.

Everything is imported on first use, so ``import fsm_rollout`` loads neither torch nor transformers.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from fsm_rollout.names.lazy import lazy_names

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(__name__)
__all__ = __dir__()

if TYPE_CHECKING:
    from fsm_rollout.agent.graph import AgentGraph as AgentGraph
    from fsm_rollout.agent.loader import load_agent as load_agent
    from fsm_rollout.agent.proof import prove as prove
    from fsm_rollout.agent.verify import verify as verify
    from fsm_rollout.batch.batch import TrajectoryBatch as TrajectoryBatch
    from fsm_rollout.chat import ChatTemplate as ChatTemplate
    from fsm_rollout.engines.adapters import Adapter as Adapter
    from fsm_rollout.engines.broadcast import Broadcast as Broadcast
    from fsm_rollout.engines.broadcast import BroadcastGroup as BroadcastGroup
    from fsm_rollout.engines.scripted.engine import ScriptedEngine as ScriptedEngine
    from fsm_rollout.engines.transformers.checkpoints import load_model as load_model
    from fsm_rollout.engines.transformers.engine import TransformersEngine as TransformersEngine
    from fsm_rollout.engines.weight_sources import Tensors as Tensors
    from fsm_rollout.errors import BadArguments as BadArguments
    from fsm_rollout.errors import ConfigError as ConfigError
    from fsm_rollout.errors import RolloutError as RolloutError
    from fsm_rollout.rollout import Rollout as Rollout
    from fsm_rollout.scheduler.group import Group as Group
    from fsm_rollout.serve.remote import RemoteRollout as RemoteRollout
    from fsm_rollout.states import State as State
    from fsm_rollout.states.external.handler import ForeignVisit as ForeignVisit
    from fsm_rollout.tools import ToolContext as ToolContext
    from fsm_rollout.tools import ToolResult as ToolResult
    from fsm_rollout.trajectory.journal import Journal as Journal
    from fsm_rollout.trajectory.outcome import Outcome as Outcome
    from fsm_rollout.trajectory.pictures import picture_of as picture_of
    from fsm_rollout.trajectory.prompt import Prompt as Prompt
    from fsm_rollout.trajectory.prompt import endless_prompts as endless_prompts
    from fsm_rollout.trajectory.prompt import read_prompts as read_prompts
    from fsm_rollout.trajectory.trajectory import Trajectory as Trajectory

if (_ipython := sys.modules.get("IPython")) is not None:  # in a notebook, agents and trajectories are pictures
    import_module("fsm_rollout.report.notebook").register(_ipython.get_ipython())
