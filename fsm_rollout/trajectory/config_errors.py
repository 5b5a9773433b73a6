"""What pydantic finds wrong with an agent, a run or a prompt, in the user's words.

Invariant: nothing here judges; pydantic does. Each of its errors becomes one message that says what stands at a place
and what may stand there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fsm_rollout.errors import did_you_mean
from fsm_rollout.trajectory.events import PlainData

ConfigData = PlainData  # a configuration as plain data, not checked yet
MOST = 100  # problems of one file that are told: each is compared with what may stand in its place
# Keys and list positions from the top of a configuration, say `("transitions", 3, "dest")`.
ConfigPath = tuple[str | int, ...]
MISSPELT = 0.8  # how alike an unknown key and a missing one are, so that they are one mistake


def describe_path(path: ConfigPath) -> str:
    """Return the words for a config path: ``state 'A': sampling.top_p``; empty for the whole."""
    match path:
        case ("tools", tool, "agent", *rest):
            inner = describe_path(tuple(rest))
            return f"tool '{tool}': agent" + (f": {inner}" if inner else "")
        case ("states" | "contexts" | "tools" as kind, name, *rest):
            head = f"{kind[:-1]} '{name}'"
        case ("transitions", int(row), *rest):
            head = f"transition {row + 1}"
        case _:
            head, rest = "", list(path)
    tail = ".".join(str(part) for part in rest)
    return ": ".join(part for part in (head, tail) if part)


def explanations(error: ValidationError, root: object, below: ConfigPath = ()) -> Iterator[tuple[ConfigPath, str]]:
    """Yield the path and the message of everything in ``error``, which came of validating a ``root`` at ``below``.

    Every wrong place is named once, by the first thing that is wrong with it. ``root`` is a model, or another type; a
    part of a path in angle brackets is the tag of a union, and no key.
    """
    first: dict[ConfigPath, ErrorDetails] = {}
    for item in error.errors(include_url=False):
        first.setdefault(tuple(part for part in item["loc"] if not str(part).startswith("<")), item)
    unknown = [path for path, item in first.items() if item["type"] == "extra_forbidden"]
    for path, item in islice(first.items(), MOST):
        # A key that is missing because it is misspelt is told once, where it stands.
        beside = [str(other[-1]).partition(":")[0] for other in unknown if other[:-1] == path[:-1]]
        if item["type"] != "missing" or not get_close_matches(str(path[-1]), beside, cutoff=MISSPELT):
            yield _explained((*below, *path), item, _model_at(root, path[:-1]))
    if len(first) > MOST:
        yield below, f"and {len(first) - MOST:,} more problems"


def _explained(path: ConfigPath, item: ErrorDetails, model: type[BaseModel] | None) -> tuple[ConfigPath, str]:
    got, context = _shown(item["input"]), item.get("ctx", {})
    above, key = path[:-1], path[-1] if path else ""
    words = describe_path(path)
    where = f"{describe_path(above)}: " if describe_path(above) else ""
    if key == "[key]":
        place = f"{describe_path(above[:-1])}: " if describe_path(above[:-1]) else ""
        return above, f"{place}'{above[-1]}' is not a name; use letters, digits and _"
    match item["type"]:
        case "extra_forbidden":
            field_names = {field.alias or name for name, field in model.model_fields.items()} if model else set()
            # a custom handler's `options` are written beside the state's other keys, never under that name
            known = field_names - {"options"}
            no_space = str(key).partition(":")[0] in known
            hint = "; put a space behind its colon" if no_space else did_you_mean(str(key), known)
            return path, f"{where}unknown key '{key}'{hint}"
        case "missing":
            return above, f"{where}'{key}' is missing"
        case "value_error":
            what, wrong = str(context["error"]), item["input"]
            shown = "got" in what or got in what  # a check of a user's own class may not say it
            if not shown and isinstance(wrong, str | int | float):
                what += f", got {got}"
            return path, ": ".join(part for part in (words, what) if part)
        case "literal_error":
            expected = str(context["expected"])
            hint = did_you_mean(str(item["input"]), expected.replace("'", "").replace(" or ", ", ").split(", "))
            return path, f"{where}{key} must be {expected}, got {got}{hint}"
        case "string_pattern_mismatch" if key != "stop_reason":
            kind = "'module:name'" if ":" in str(context["pattern"]) else "a name (letters, digits and _)"
            return path, f"{where}{key} must be {kind}, got {got}"
        case "model_type" | "dict_type" | "mapping_type":
            return path, f"{words or 'the agent'} must be a mapping, got {got}"
        case "tuple_type":
            return path, f"{where}{key} must be a list, got {got}"
    what = item["msg"].removeprefix("Input ").replace("String", "text", 1)
    return path, f"{words}{' ' if what.startswith('should') else ': '}{what}, got {got}"


def _shown(value: object) -> str:
    if isinstance(value, Mapping | list):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…'"


def _model_at(kind: object, path: ConfigPath) -> type[BaseModel] | None:
    """Return the model whose keys stand at ``path`` below a value of the type ``kind``; ``None`` beyond the models."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(str(path[0])) if path else None
        return _model_at(field.annotation, path[1:]) if field else None if path else kind
    arguments = get_args(kind)
    if get_origin(kind) in (Mapping, tuple):
        values = arguments[1 if get_origin(kind) is Mapping else 0]
        return _model_at(values, path[1:]) if path else None
    return next((model for argument in arguments if (model := _model_at(argument, path))), None)
