"""Tools: what the model may call, from a Python function's signature to the text it is told.

`schema` shows a tool to the model, `toolbox` carries its calls out; `base` is what authors of tools import.
"""

from fsm_rollout.tools.base import AgentAnswer, CallResult, Hidden, RunAgent, Tool, ToolContext, ToolResult
from fsm_rollout.tools.schema import tool_schema, tool_schema_of, validate_arguments
from fsm_rollout.tools.toolbox import Toolbox, ToolSession
from fsm_rollout.tools.truncation import truncate

__all__ = [
    "AgentAnswer",
    "CallResult",
    "Hidden",
    "RunAgent",
    "Tool",
    "ToolContext",
    "ToolResult",
    "ToolSession",
    "Toolbox",
    "tool_schema",
    "tool_schema_of",
    "truncate",
    "validate_arguments",
]
