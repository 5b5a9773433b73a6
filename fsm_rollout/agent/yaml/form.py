"""Cutting what is wrong out of an agent's data, so that the rest can still be looked at."""

from __future__ import annotations

from typing import Any

from fsm_rollout.agent.graph import TERMINATED, State
from fsm_rollout.trajectory.model_errors import ConfigPath

STATE_KEYS = frozenset(State.model_fields) - {"options"}
"""The YAML keys of every state; a custom handler's options are written beside them."""


def repaired(data: Any, path: ConfigPath, dropped: set[ConfigPath]) -> bool:
    """Cut the wrong piece at ``path`` out of ``data`` and note it in ``dropped``; False when nothing would be left.

    Rows keep their place: a row's own required keys get values about which there is nothing to say.
    """
    if path and path[-1] == "[key]":
        path = path[:-1]
    holder, key, at = data, path[0] if path else "", 0
    for index, part in enumerate(path):  # the deepest mapping key on the way
        if isinstance(part, str):
            at, key = index, part
    for part in path[:at]:
        if isinstance(holder, dict) and part not in holder:
            return True  # cut out already, by an error further up
        holder = holder[part]
    dropped.add(path[: at + 1])
    below = path[:at]
    if below[-2:-1] == ("transitions",) and key in ("trigger", "source", "dest"):
        holder[key] = {"trigger": "failed", "source": [], "dest": TERMINATED}[key]
    elif key == "transitions" and len(path) > at + 1 and isinstance(path[at + 1], int):
        holder[key][path[at + 1]] = {"trigger": "failed", "source": [], "dest": TERMINATED}
        dropped.discard(path[: at + 1])
        dropped.add(path[: at + 2])
    elif below[-1:] and below[-1] in ("states", "contexts") and holder.get(key) is not None and key_is_name(str(key)):
        holder[key] = {}
    elif key in holder:
        del holder[key]
    else:
        return False  # something required is missing, and there is nothing to put there
    return True


def key_is_name(key: str) -> bool:
    """Whether ``key`` may name a state or context."""
    return key.isidentifier() and key.isascii()
