"""``key=value`` overrides and ``${…}`` interpolation: the two things that change a configuration after it is read.

Invariant: after :func:`interpolate` there is no interpolation left, and every value is plain data. Overrides come
first, so what refers to an overridden key sees its new value. OmegaConf resolves; it is imported only where a ``${``
stands in the file, and only the strings that hold one pass through it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from fsm_rollout.agent.yaml.source import SourceMap, read_yaml
from fsm_rollout.errors import Problem, did_you_mean
from fsm_rollout.trajectory.model_errors import ConfigData, ConfigPath

_NAMED = ("states", "contexts", "tools")
"""Mappings whose keys are names made in the file: an override changes what is there and adds nothing."""


def apply_overrides(data: ConfigData, overrides: Sequence[str], source: SourceMap) -> list[Problem]:
    """Set each ``a.b=value`` in ``data``; values are read as YAML, list items are ``rows.0`` or ``rows[0]``."""
    problems: list[Problem] = []
    for override in overrides:
        shown = f"override '{override}'"
        key, equals, text = override.partition("=")
        path: ConfigPath = tuple(
            int(part) if part.isdecimal() else part for part in re.split(r"[.\[]", key.strip().replace("]", ""))
        )
        if not equals or "" in path:
            problems.append(Problem("is not of the form key=value, say limits.assistant_turns=4", shown))
            continue
        value, wrong = read_yaml(text, SourceMap(shown))
        problem = _set(data, path, value)
        if wrong:
            problems.extend(Problem(p.message, shown) for p in wrong)
            source.wrong.add(path)
        if problem is not None:
            problems.append(Problem(problem, shown))
        source.overrides[path] = shown
        for length in range(1, len(path)):  # what it had to create on its way is its own too
            if path[:length] not in source.lines:
                source.overrides.setdefault(path[:length], shown)
    return problems


def _set(data: ConfigData, path: ConfigPath, value: object) -> str | None:
    """Set one value; returns what is wrong instead when there is no such place."""
    here: Any = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        above = ".".join(map(str, path[:depth])) or "the agent"
        if isinstance(here, list):
            if not isinstance(part, int) or part >= len(here):
                return f"'{above}' is a list of {len(here)}; there is no item '{part}' in it"
        elif not isinstance(here, dict):
            return f"'{above}' holds no further keys, so there is no '{part}' in it"
        else:
            part = str(part)
            if path[:depth] in {(name,) for name in _NAMED} and part not in here:
                return f"'{above}' has no '{part}'{did_you_mean(part, here)}"
            if not last and here.get(part) is None:
                here[part] = {}
        if last:
            here[part] = value
        else:
            here = here[part]
    return None


def interpolate(data: ConfigData, source: SourceMap) -> list[Problem]:
    r"""Resolve every ``${…}`` of ``data`` in place; write ``\${`` for the two characters themselves."""
    found = list(_interpolations(data, ()))
    if not found:
        return []
    from omegaconf import Container, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    problems: list[Problem] = []

    def wrong(path: ConfigPath, error: Exception) -> None:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, RecursionError):
            text = "it refers to itself"
        message = f"interpolation failed: {text}; write \\${{ for a literal ${{"
        problems.append(source.problem(path, message))
        source.wrong.add(path)
        _put(data, path, "")

    readable = []
    for path, text in found:
        try:
            OmegaConf.create({"text": text})
            readable.append(path)
        except OmegaConfBaseException as error:
            wrong(path, error)
    config = OmegaConf.create(data)
    resolved: list[tuple[ConfigPath, object]] = []
    for path in readable:
        try:
            value: Any = config
            for part in path:
                value = value[part]
            if isinstance(value, Container):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
            resolved.append((path, value))
        except (OmegaConfBaseException, RecursionError) as error:
            wrong(path, error)
        except Exception as error:  # a resolver is code of the user's
            wrong(path, error)
    for path, value in resolved:
        if isinstance(value, str | int | float | list | dict | None):
            _put(data, path, value)
        else:
            wrong(path, TypeError(f"it gives a {type(value).__name__}, not plain data"))
    return problems


def escape_interpolation(text: str) -> str:
    """Return ``text`` so that :func:`interpolate` gives it back: OmegaConf halves backslashes before ``${``."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)


def _interpolations(data: object, path: ConfigPath) -> Iterator[tuple[ConfigPath, str]]:
    if isinstance(data, str):
        if "${" in data:
            yield path, data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from _interpolations(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _interpolations(value, (*path, index))


def _put(data: Any, path: ConfigPath, value: object) -> None:
    for part in path[:-1]:
        data = data[part]
    data[path[-1]] = value
