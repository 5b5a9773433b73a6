"""What pydantic finds wrong with a prompt or a run, in the user's words.

Invariant: nothing here judges; pydantic does. (Agents have words of their own: :mod:`fsm_rollout.agent.yaml.form`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from fsm_rollout.agent.yaml.form import explain
from fsm_rollout.agent.yaml.source_map import ConfigPath, describe
from fsm_rollout.errors import did_you_mean


def explanations(error: ValidationError, root: type[BaseModel]) -> Iterator[tuple[ConfigPath, str]]:
    """Yield the path and the message of everything in ``error``, which came of validating a ``root``.

    Every wrong place is named once, by the first thing that is wrong with it.
    """
    seen: set[ConfigPath] = set()
    for item in error.errors(include_url=False):
        path: ConfigPath = tuple(item["loc"])
        if path not in seen:
            seen.add(path)
            yield _explained(path, dict(item), root)


def _explained(path: ConfigPath, item: dict[str, Any], root: type[BaseModel]) -> tuple[ConfigPath, str]:
    match item["type"]:
        case "extra_forbidden":
            above = describe(path[:-1])
            model = _model_at(root, path[:-1])
            fields = model.model_fields.items() if model else ()
            hint = did_you_mean(str(path[-1]), (field.alias or name for name, field in fields))
            return path, f"{above}: unknown key '{path[-1]}'{hint}".lstrip(": ")
        case "value_error":
            return path, ": ".join(part for part in (describe(path), str(item["ctx"]["error"])) if part)
        case "dict_type" | "mapping_type":
            return path, f"{describe(path)} must be a mapping, got {item['input']!r}"
        case "string_pattern_mismatch" if ":" in item["ctx"]["pattern"]:
            return path, f"{describe(path)} must be 'module:name', got {item['input']!r}"
    return explain(path, item)


def _model_at(root: type[BaseModel], path: ConfigPath) -> type[BaseModel] | None:
    """Follow ``path`` down the fields of ``root``; ``None`` where it leaves the models."""
    model: type[BaseModel] | None = root
    for part in path:
        field = model.model_fields.get(str(part)) if model else None
        candidates = (field.annotation, *get_args(field.annotation)) if field else ()
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return model
