"""The users that a YAML names as ``fsm_rollout.interactions:NAME``; see :mod:`fsm_rollout.environment.users`."""

from fsm_rollout.environment.users import Conversation, Interaction, ModelUser, Reply, ScriptedUser

__all__ = ["Conversation", "Interaction", "ModelUser", "Reply", "ScriptedUser"]
