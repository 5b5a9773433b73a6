"""State handlers: what a visit of a working state does. One file per built-in handler."""

from __future__ import annotations

from collections.abc import Mapping

from fsm_rollout.states.base import State
from fsm_rollout.states.generating import Generate
from fsm_rollout.states.interacting import Interact
from fsm_rollout.states.pending import OpenPrompt
from fsm_rollout.states.processing_tools import CallTools
from fsm_rollout.states.writing import Write

HANDLERS: Mapping[str, type[State]] = {
    "prompt": OpenPrompt,
    "generate": Generate,
    "call_tools": CallTools,
    "interact": Interact,
    "write": Write,
}
"""The handlers that a YAML names by one word; any other is ``module:Class``."""

__all__ = ["HANDLERS", "CallTools", "Generate", "Interact", "OpenPrompt", "State", "Write"]
