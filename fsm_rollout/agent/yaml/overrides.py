"""``key=value`` overrides and ``${…}`` interpolation: the two things that change a configuration after it is read.

Invariant: after :func:`interpolate` there is no interpolation left, and every value is plain data. Overrides come
first, so what refers to an overridden key sees its new value. OmegaConf resolves; it is imported only where a ``${``
stands in the file, and only the strings that hold one pass through it.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fsm_rollout.agent.yaml.source import SourceMap, read_yaml
from fsm_rollout.errors import Problem, did_you_mean
from fsm_rollout.trajectory.config_errors import ConfigData, ConfigPath

MAX_NESTED = 10  # interpolations within one another in one text
MOST_SHOWN = 200  # characters of what OmegaConf says, which may repeat the text
# Mappings whose keys are names made in the file: an override changes what is there and adds nothing.
_NAMED = ("states", "contexts", "tools")
AGENT = "agent."  # how an override begins that a run hands on to its agents


def apply_overrides(data: ConfigData, overrides: Sequence[str], source: SourceMap) -> list[Problem]:
    """Set each ``a.b=value`` (or ``agent.a.b``) in ``data``, read as YAML; list items are ``rows.0`` or ``rows[0]``."""
    problems: list[Problem] = []
    for override in overrides:
        place = f"override '{override}'"
        key, equals, text = override.removeprefix(AGENT).partition("=")
        parts = re.split(r"[.\[]", key.strip().replace("]", ""))
        path: ConfigPath = tuple(int(part) if part.isdecimal() else part for part in parts)
        if not equals or "" in path:
            problems.append(Problem("is not of the form key=value, say agent.limits.tool_calls=4", place))
            continue
        value, wrong = read_yaml(text, SourceMap(place))
        problems += [Problem(problem.message, place) for problem in wrong]
        if wrong:
            source.wrong.add(path)
        no_place = _set(data, path, value)
        if no_place is not None:
            problems.append(Problem(no_place, place))
        source.overrides[path] = place
        for length in range(1, len(path)):  # the mappings that this override had to create belong to it too
            if path[:length] not in source.lines:
                source.overrides.setdefault(path[:length], place)
    return problems


def _set(data: ConfigData, path: ConfigPath, value: object) -> str | None:
    """Set one value; returns what is wrong instead when there is no such place."""
    holder: Any = data
    for depth, part in enumerate(path):
        above = ".".join(map(str, path[:depth])) or "the agent"
        if isinstance(holder, list):
            if not isinstance(part, int) or part >= len(holder):
                return f"'{above}' is a list of {len(holder)}; there is no item '{part}' in it"
        elif not isinstance(holder, dict):
            return f"'{above}' holds no further keys, so there is no '{part}' in it"
        else:
            part = str(part)
            if depth == 1 and path[0] in _NAMED and part not in holder:
                return f"'{above}' has no '{part}'{did_you_mean(part, holder)}"
            if depth < len(path) - 1 and holder.get(part) is None:
                holder[part] = {}
        if depth == len(path) - 1:
            holder[part] = value
        else:
            holder = holder[part]
    return None


def interpolate(data: ConfigData, source: SourceMap) -> list[Problem]:
    r"""Resolve every ``${…}`` of ``data`` in place; write ``\${`` for the two characters themselves."""
    holders = dict(_interpolations(data, ()))
    if not holders:
        return []
    from omegaconf import Container, OmegaConf

    failures: dict[ConfigPath, str] = {}
    # 1. A text that cannot even be read would spoil all others.
    for path, holder in holders.items():
        try:
            if _depth(holder[path[-1]]) > MAX_NESTED:
                raise ValueError(f"more than {MAX_NESTED} of them stand within one another")
            OmegaConf.create({"text": holder[path[-1]]})
        except Exception as error:  # a resolver is code of the user's, here and below
            failures[path], holder[path[-1]] = _reason(error), ""
    # 2. All are resolved before any is put into its place, because they refer to one another.
    config = OmegaConf.create(data)
    values: dict[ConfigPath, object] = {}
    for path in holders.keys() - failures.keys():
        try:
            value: object = functools.reduce(operator.getitem, path, config)
            if isinstance(value, Container):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
            if not isinstance(value, str | int | float | list | dict | None):
                raise TypeError(f"it gives a {type(value).__name__}, not plain data")
            values[path] = value
        except Exception as error:
            failures[path], values[path] = _reason(error), ""
    for path, value in values.items():
        holders[path][path[-1]] = value
    source.wrong.update(failures)
    hint = "write \\${ for a literal ${"
    return [
        source.problem(path, f"interpolation failed: {failures[path]}; {hint}") for path in holders if path in failures
    ]


def _interpolations(holder: Any, path: ConfigPath) -> Iterator[tuple[ConfigPath, Any]]:
    """Yield the path of every text with an interpolation, and the mapping or list that holds it."""
    for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
        if isinstance(value, str) and "${" in value:
            yield (*path, key), holder
        elif isinstance(value, dict | list):
            yield from _interpolations(value, (*path, key))


def _depth(text: str) -> int:
    """Return how many interpolations stand within one another, or more where some are never closed."""
    depth = deepest = 0
    for mark in re.findall(r"\$\{|\}", text):
        depth = depth + 1 if mark == "${" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it refers to itself"
    return str(error).splitlines()[0][:MOST_SHOWN] if str(error) else type(error).__name__


def in_texts(change: Callable[[str], str], value: object) -> object:
    """Return plain data with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: in_texts(change, item) for key, item in value.items()}
    return [in_texts(change, item) for item in value] if isinstance(value, list | tuple) else value


def escape_interpolation(text: str) -> str:
    """Return ``text`` so that :func:`interpolate` gives it back: OmegaConf halves backslashes before ``${``."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)


def unescape_interpolation(text: str) -> str:
    """Return what :func:`escape_interpolation` was given; nothing is looked up, whatever ``text`` holds."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1][: len(match[1]) // 2] + "${", text)
