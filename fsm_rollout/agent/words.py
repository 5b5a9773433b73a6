"""The words by which an agent's YAML names code, and their short spelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsm_rollout.names.registry import Registry
from fsm_rollout.trajectory.settings import StrictModel

HANDLERS = Registry(
    "handler",
    "fsm_rollout.handlers",
    {
        "prompt": "fsm_rollout.states.built_in:OpenPrompt",
        "generate": "fsm_rollout.states.built_in:Generate",
        "call_tools": "fsm_rollout.states.built_in:CallTools",
        "interact": "fsm_rollout.states.built_in:Interact",
        "write": "fsm_rollout.states.built_in:Write",
        "external": "fsm_rollout.states.external.handler:External",
    },
)

INTERACTIONS = Registry(
    "interaction", "fsm_rollout.interactions", {"openenv": "fsm_rollout.environment.openenv:OpenEnv"}
)
"""The interactions that a YAML names by one word, with their arguments beside it."""


def is_custom(handler: str) -> bool:
    """Whether a handler's class declares keys of its own: a user's, or that of foreign agents."""
    return ":" in handler or handler == "external"


def gathered(value: Mapping[str, Any], model: type[StrictModel], under: str) -> dict[str, object]:
    """Return a mapping with all keys that ``model`` does not have gathered in the mapping at the key ``under``."""
    further = {key: item for key, item in value.items() if key not in model.model_fields}
    kept = {key: item for key, item in value.items() if key not in further}
    return kept | {under: {**value.get(under, {}), **further}} if further else kept


def named_by_one_word(value: object, words: Registry, model: type[StrictModel]) -> object:
    """Return ``{use: word, key: …}`` as ``{use: module:name, kwargs: {key: …}}``; all else as it is."""
    if not isinstance(value, Mapping) or not isinstance(word := value.get("use"), str) or ":" in word:
        return value
    return gathered(value, model, "kwargs") | {"use": words.as_setting(word)}
