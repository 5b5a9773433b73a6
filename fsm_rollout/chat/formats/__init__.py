"""Tool formats: how a model's turn becomes calls, problems and text. Start at :mod:`.base`."""

from fsm_rollout.chat.formats.base import Call, CallProblem, Parsed, ToolFormat
from fsm_rollout.chat.formats.registry import FORMAT_NAMES, detect_format, get_format

__all__ = ["FORMAT_NAMES", "Call", "CallProblem", "Parsed", "ToolFormat", "detect_format", "get_format"]
