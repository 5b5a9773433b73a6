"""The short spellings of an agent's YAML, written out.

Invariant: what comes out has the shape of :class:`~fsm_rollout.agent.graph.AgentGraph` wherever what went in made
sense, and is passed on untouched elsewhere, for pydantic to complain about. Texts are read in from their files,
sub-agents are loaded into place, predicates become ``{name, argument}``, and a custom handler's own keys move to
``options``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fsm_rollout.agent.graph import State
from fsm_rollout.agent.handlers import load_object, look_in
from fsm_rollout.agent.yaml.overrides import interpolate
from fsm_rollout.agent.yaml.source import SourceMap, read_text, read_yaml
from fsm_rollout.errors import ConfigError, Problem, did_you_mean
from fsm_rollout.trajectory.model_errors import ConfigData, ConfigPath, describe_path, explanations

STATE_KEYS = frozenset(State.model_fields) - {"options"}
"""The YAML keys of every state; a custom handler's options are written beside them."""
TEXT_FILE = re.compile(r"\S+\.(md|txt|jinja|j2)")
"""A text that is one such word names a file."""


class Normaliser:
    """Writes out one YAML and the agents it takes in; adds what it finds wrong to ``problems``."""

    def __init__(self, source: SourceMap, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems

    def agent(self, data: ConfigData, path: ConfigPath, base: Path, inside: tuple[Path, ...]) -> ConfigData:
        """Return the normal form of one agent; ``inside`` are the files being read, outermost first."""

        def each(key: str, change: Callable[[ConfigData, ConfigPath], None]) -> None:
            entries = data.get(key)
            if isinstance(entries, dict):
                for name, entry in entries.items():
                    if entry is None:  # `PENDING:` with nothing after it
                        entries[name] = entry = {}
                    if isinstance(entry, dict):
                        change(entry, (*path, key, name))

        def context(entry: ConfigData, at: ConfigPath) -> None:
            self._text(entry, "system", at, base)

        def state(entry: ConfigData, at: ConfigPath) -> None:
            self._text(entry, "prompt", at, base)
            self._options(entry, at)

        def tool(entry: ConfigData, at: ConfigPath) -> None:
            self._sub_agent(entry, at, base, inside)

        each("contexts", context)
        each("states", state)
        each("tools", tool)
        transitions = data.get("transitions")
        for row in transitions if isinstance(transitions, list) else ():
            if isinstance(row, dict):
                if isinstance(row.get("source"), str):
                    row["source"] = [row["source"]]
                for key in ("conditions", "unless"):
                    if key in row:
                        row[key] = _predicates(row[key])
        return data

    def _report(self, path: ConfigPath, message: str) -> None:
        words = describe_path(path)
        self.problems.append(self.source.problem(path, f"{words}: {message}" if words else message))

    def _text(self, entry: ConfigData, key: str, at: ConfigPath, base: Path) -> None:
        value = entry.get(key)
        if isinstance(value, dict):
            if set(value) == {"text"} and isinstance(value["text"], str):
                entry[key] = value["text"]
            else:
                self._report((*at, key), "must be text, the name of a text file, or {text: …}")
                entry[key] = ""
        elif isinstance(value, str) and TEXT_FILE.fullmatch(value):
            text = read_text(base / value)
            if isinstance(text, Problem):
                folder = (base / value).parent
                near = [p.name for p in folder.iterdir()] if folder.is_dir() else []
                hint = did_you_mean(Path(value).name, (name for name in near if TEXT_FILE.fullmatch(name)))
                self._report((*at, key), f"'{base / value}' {text.message}{hint}")
                text = ""
            source, inner = self.source.within((*at, key))
            source.texts[inner] = (str(base / value), 1)
            entry[key] = text.removesuffix("\n")  # the one that editors end a file with says nothing

    def _options(self, entry: ConfigData, at: ConfigPath) -> None:
        handler = entry.get("handler")
        if not isinstance(handler, str) or ":" not in handler:
            return
        options = {key: entry.pop(key) for key in list(entry) if key not in STATE_KEYS}
        try:
            found = load_object(handler)
        except ConfigError:
            entry["options"] = options  # verification reports the import
            return
        model: Any = getattr(found, "Options", None)
        if model is None:
            for key in options:
                hint = did_you_mean(key, STATE_KEYS)
                message = f"{describe_path(at)}: unknown key '{key}'; '{handler}' takes no keys of its own{hint}"
                self.problems.append(self.source.problem((*at, key), message))
            return
        if options:
            entry["options"] = options
        known = {field.alias or name for name, field in model.model_fields.items()}
        for key in set(options) - known:
            message = f"{describe_path(at)}: unknown key '{key}'{did_you_mean(key, known | STATE_KEYS)}"
            self.problems.append(self.source.problem((*at, key), message))
        try:
            model.model_validate_json(json.dumps({k: v for k, v in options.items() if k in known}), strict=True)
        except ValidationError as error:
            self.problems += [self.source.problem(*explained) for explained in explanations(error, model, at)]

    def _sub_agent(self, entry: ConfigData, at: ConfigPath, base: Path, inside: tuple[Path, ...]) -> None:
        value = entry.get("agent")
        at = (*at, "agent")
        if isinstance(value, str):
            entry["agent"] = self._from_file(value, at, base, inside)
            if entry["agent"] is None:
                del entry["agent"]
        elif isinstance(value, dict):
            self.agent(value, at, base, inside)

    def _from_file(self, value: str, at: ConfigPath, base: Path, inside: tuple[Path, ...]) -> ConfigData | None:
        file = base / value
        if file.resolve() in inside:
            circle = [*inside[inside.index(file.resolve()) :], file]
            self._report(at, f"agents call one another in a circle: {' -> '.join(p.name for p in circle)}")
            return None
        text = read_text(file)
        if isinstance(text, Problem):
            near = [p.name for p in file.parent.glob("*.yaml")] if file.parent.is_dir() else []
            self._report(at, f"'{file}' {text.message}{did_you_mean(file.name, near)}")
            return None
        source = SourceMap(str(file))
        outer, inner = self.source.within(at)
        outer.parts[inner] = source
        data, problems = read_yaml(text, source)
        self.problems += problems
        if not isinstance(data, dict):
            if not problems:
                self._report(at, f"'{file}' holds no agent (a mapping with `agent`, `states` and `transitions`)")
            return None
        self.problems += interpolate(data, source)
        look_in(file.parent)
        return self.agent(data, at, file.parent, (*inside, file.resolve()))


def _predicates(value: object) -> object:
    """Return ``name``, ``{name: argument}`` or a list of those as a list of ``{name, argument}``."""
    items = value if isinstance(value, list) else [value]
    return [_predicate(item) for item in items]


def _predicate(item: object) -> object:
    if isinstance(item, str):
        return {"name": item}
    if isinstance(item, dict) and len(item) == 1:
        ((name, argument),) = item.items()
        return {"name": name, "argument": argument}
    return str(item)  # no predicate: pydantic says so of a string
