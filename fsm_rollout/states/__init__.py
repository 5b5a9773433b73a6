"""State handlers: what a visit of a working state does."""

from fsm_rollout.states.base import State

__all__ = ["State"]
