"""Chat templates as exact token ids: what goes between two generations, or a refusal that names its rule."""

from fsm_rollout.chat.template import ChatTemplate, Encoded

__all__ = ["ChatTemplate", "Encoded"]
