"""What pydantic finds wrong with an agent, in the user's words.

Invariant: nothing here judges; pydantic does. Each of its errors becomes one message that says what stands there and
what may, and an error can be cut out of the data, so that the rest can still be looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from fsm_rollout.agent.graph import (
    TERMINATED,
    AgentGraph,
    Context,
    Interaction,
    Limits,
    Retry,
    Sampling,
    State,
    Tool,
    TransitionRow,
)
from fsm_rollout.agent.yaml.source_map import ConfigPath, describe
from fsm_rollout.errors import did_you_mean

STATE_KEYS = frozenset(State.model_fields) - {"options"}
"""The YAML keys of every state; a custom handler's options are written beside them."""


def model_at(path: ConfigPath) -> type[BaseModel] | None:
    """Return the model whose keys stand at a config path."""
    while path[:1] == ("tools",) and path[2:3] == ("agent",):
        path = path[3:]
    match path:
        case ():
            return AgentGraph
        case ("limits",):
            return Limits
        case ("interaction",) | ("states", _, "interaction"):
            return Interaction
        case ("contexts", _):
            return Context
        case ("tools", _):
            return Tool
        case ("tools", _, "retry"):
            return Retry
        case ("states", _):
            return State
        case ("states", _, "sampling"):
            return Sampling
        case ("transitions", _):
            return TransitionRow
    return None


def explain(path: ConfigPath, item: Mapping[str, Any]) -> tuple[ConfigPath, str]:
    """Return the path and the message for one item of pydantic's ``errors()``, whose place is ``path``."""
    got, kind, above = item["input"], item["type"], path[:-1]
    where = f"{describe(above)}: " if describe(above) else ""
    key = path[-1] if path else ""
    if key == "[key]":
        return above, f"{describe(above[:-1])}: '{above[-1]}' is not a name; use letters, digits and _".lstrip(": ")
    match kind:
        case "extra_forbidden":
            model = model_at(above)
            known = set(model.model_fields) if model else set()
            return path, f"{where}unknown key '{key}'{did_you_mean(str(key), known - {'options'})}"
        case "missing":
            return above, f"{where}'{key}' is missing"
        case "literal_error":
            expected = item["ctx"]["expected"]
            hint = did_you_mean(str(got), str(expected).replace("'", "").replace(" or ", ", ").split(", "))
            return path, f"{where}{key} must be {expected}, got {_shown(got)}{hint}"
        case "string_pattern_mismatch" if ":" in str(item["ctx"]["pattern"]) and key in ("use", "handler"):
            return path, f"{where}{key} must be 'module:name', got {_shown(got)}"
        case "string_pattern_mismatch" if key != "stop_reason":
            return path, f"{where}{key} must be a name (letters, digits and _), got {_shown(got)}"
        case "model_type":
            return path, f"{describe(path) or 'the agent'} must be a mapping, got {_shown(got)}"
        case "tuple_type":
            return path, f"{where}{key} must be a list, got {_shown(got)}"
    what = str(item["msg"]).removeprefix("Input ").removeprefix("Value error, ").replace("String", "text", 1)
    words = describe(path)
    return path, f"{words}{' ' if what.startswith('should') else ': '}{what}, got {_shown(got)}"


def _shown(value: object) -> str:
    if isinstance(value, Mapping | list):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…'"


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
