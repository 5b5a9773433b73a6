"""The words by which an agent's YAML names code, and their short spelling."""

from __future__ import annotations

from collections.abc import Mapping

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


def named_by_one_word(value: object, words: Registry, model: type[StrictModel]) -> object:
    """Return ``{use: word, key: …}`` as ``{use: module:name, kwargs: {key: …}}``; all else as it is."""
    if not isinstance(value, Mapping) or not isinstance(word := value.get("use"), str) or ":" in word:
        return value
    options = {key: value[key] for key in value if key not in model.model_fields}
    kept = {key: value[key] for key in value if key not in options}
    return kept | {"use": words.as_setting(word), "kwargs": {**value.get("kwargs", {}), **options}}
