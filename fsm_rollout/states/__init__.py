"""State handlers: what a visit of a working state does. One file per built-in handler."""

from fsm_rollout.states.base import State

__all__ = ["State"]
