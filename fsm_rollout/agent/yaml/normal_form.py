"""The short spellings of an agent's YAML, written out.

Invariant: what comes out has the shape of :class:`~fsm_rollout.agent.graph.AgentGraph` wherever what went in made
sense, and is passed on untouched elsewhere, for pydantic to complain about. Texts are read in from their files,
sub-agents are loaded into place, predicates become ``{name, argument}``, and a custom handler's own keys move to
``options``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

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

_AGENT_FILE = re.compile(r".+\.yaml")


class Normaliser:
    """Writes out one YAML and the agents it takes in; adds what it finds wrong to ``problems``."""

    def __init__(self, source: SourceMap, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems

    def agent(self, data: ConfigData, path: ConfigPath, base: Path, inside: tuple[Path, ...]) -> None:
        """Bring one agent into normal form, in place; ``inside`` are the files being read, outermost first."""
        for entry, at in _entries(data, path, "contexts"):
            self._text(entry, "system", at, base)
        for entry, at in _entries(data, path, "states"):
            self._text(entry, "prompt", at, base)
            self._options(entry, at)
        for entry, at in _entries(data, path, "tools"):
            if isinstance(entry.get("agent"), str):
                self._read_sub_agent(entry, (*at, "agent"), base, inside)
            elif isinstance(entry.get("agent"), dict):
                self.agent(entry["agent"], (*at, "agent"), base, inside)
        rows = data.get("transitions")
        for row in rows if isinstance(rows, list) else ():
            for key in ("conditions", "unless"):
                if isinstance(row, dict) and key in row:
                    row[key] = [_predicate(item) for item in (row[key] if isinstance(row[key], list) else [row[key]])]

    def _report(self, path: ConfigPath, message: str) -> None:
        self.problems.append(self.source.problem(path, f"{describe_path(path)}: {message}"))

    def _text(self, entry: ConfigData, key: str, at: ConfigPath, base: Path) -> None:
        value, at = entry.get(key), (*at, key)
        if isinstance(value, dict):
            entry[key] = value.get("text")
            if set(value) != {"text"} or not isinstance(value["text"], str):
                self._report(at, "must be text, the name of a text file, or {text: …}")
                entry[key] = ""
        elif isinstance(value, str) and TEXT_FILE.fullmatch(value):
            text = self._file(base / value, at, TEXT_FILE) or ""
            source, inner = self.source.within(at)
            source.texts[inner] = (str(base / value), 1)
            entry[key] = text.removesuffix("\n")  # the one that editors end a file with says nothing

    def _file(self, file: Path, at: ConfigPath, kind: re.Pattern[str]) -> str | None:
        """Return the text of a file, or report what is wrong with it, with the closest name of its ``kind`` there."""
        text = read_text(file)
        if isinstance(text, str):
            return text
        names = [path.name for path in file.parent.iterdir()] if file.parent.is_dir() else []
        hint = did_you_mean(file.name, filter(kind.fullmatch, names))
        self._report(at, f"'{file}' {text.message}{hint}")
        return None

    def _options(self, entry: ConfigData, at: ConfigPath) -> None:
        """Move the keys that a custom handler's class declares to ``options``, and check them."""
        handler = entry.get("handler")
        if not isinstance(handler, str) or ":" not in handler:
            return
        options = {key: entry.pop(key) for key in list(entry) if key not in STATE_KEYS}
        if options:
            entry["options"] = options
        try:
            model: type[BaseModel] | None = getattr(load_object(handler), "Options", None)
        except ConfigError:
            return  # verification reports the import
        known = set() if model is None else {field.alias or name for name, field in model.model_fields.items()}
        unknown = [key for key in options if key not in known]
        for key in unknown:
            none = f"; '{handler}' takes no keys of its own" if model is None else ""
            message = f"{describe_path(at)}: unknown key '{key}'{none}{did_you_mean(key, known | STATE_KEYS)}"
            self.problems.append(self.source.problem((*at, key), message))
        if model is None:
            entry.pop("options", None)
            return
        try:
            model.model_validate_json(json.dumps({k: options[k] for k in options if k in known}), strict=True)
        except ValidationError as error:
            self.problems += [self.source.problem(*explained) for explained in explanations(error, model, at)]

    def _read_sub_agent(self, entry: ConfigData, at: ConfigPath, base: Path, inside: tuple[Path, ...]) -> None:
        """Put the agent that ``entry`` names by file into its place, or take the name out and report why."""
        file = base / entry.pop("agent")
        if file.resolve() in inside:
            circle = [*inside[inside.index(file.resolve()) :], file]
            self._report(at, f"agents call one another in a circle: {' -> '.join(path.name for path in circle)}")
            return
        text = self._file(file, at, _AGENT_FILE)
        if text is None:
            return
        source = SourceMap(str(file))
        outer, inner = self.source.within(at)
        outer.parts[inner] = source
        data, problems = read_yaml(text, source)
        self.problems += problems
        if isinstance(data, dict):
            self.problems += interpolate(data, source)
            look_in(file.parent)
            self.agent(data, at, file.parent, (*inside, file.resolve()))
            entry["agent"] = data
        elif not problems:
            self._report(at, f"'{file}' holds no agent (a mapping with `agent`, `states` and `transitions`)")


def _entries(data: ConfigData, path: ConfigPath, key: str) -> Iterator[tuple[ConfigData, ConfigPath]]:
    """Yield the entries of a mapping by names, each with its path."""
    entries = data.get(key)
    if isinstance(entries, dict):
        for name, entry in entries.items():
            if entry is None:  # `PENDING:` with nothing after it
                entries[name] = entry = {}
            if isinstance(entry, dict):
                yield entry, (*path, key, name)


def _predicate(item: object) -> object:
    """Return ``name`` or ``{name: argument}`` as ``{name, argument}``."""
    if isinstance(item, str):
        return {"name": item}
    if isinstance(item, dict) and len(item) == 1:
        ((name, argument),) = item.items()
        return {"name": name, "argument": argument}
    return str(item)  # no predicate: pydantic says so of a string
