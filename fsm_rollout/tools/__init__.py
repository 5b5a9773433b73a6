"""Tools: from a Python function to a schema, a bounded call, and a message to the model.

`base` is what authors of tools import, `schema` shows a tool to the model, `toolbox` carries its calls out.
"""

from fsm_rollout.errors import BadArguments
from fsm_rollout.tools.base import AgentAnswer, AgentCall, Hidden, Tool, ToolContext, ToolResult
from fsm_rollout.tools.bound_tools import RunAgent, tool_schema_of
from fsm_rollout.tools.schema import tool_schema, validate_arguments
from fsm_rollout.tools.tool_messages import truncate
from fsm_rollout.tools.toolbox import Toolbox, ToolSession

__all__ = [
    "AgentAnswer",
    "AgentCall",
    "BadArguments",
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
