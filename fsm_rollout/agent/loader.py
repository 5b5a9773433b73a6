"""From YAML to an :class:`~fsm_rollout.agent.graph.AgentGraph`.

Invariant: a graph that comes out of :func:`load_agent` or :func:`loads` has passed every check of form and of
:mod:`fsm_rollout.agent.verify`, holds by content all that its YAML names by file, and survives ``loads(dump(graph))``
unchanged. What is wrong is found all in one go; each problem has the place in which it was written.

The stages: read (strict YAML, lines) → overrides → interpolation → normal form (short spellings written out, files
read in) → pydantic (types, unknown keys) → verification.

Paths and templates are relative to the YAML file, and ``module:name`` finds modules beside it too. A ``system`` or
``prompt`` that is one word ending in ``.md``, ``.txt``, ``.jinja`` or ``.j2`` names a file; anything else, and
``{text: …}`` always, is the text itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ValidationError

from fsm_rollout.agent.graph import STATE_KEYS, TERMINATED, AgentGraph
from fsm_rollout.agent.handlers import load_handler
from fsm_rollout.agent.verify import findings, verify
from fsm_rollout.agent.words import HANDLERS, is_custom
from fsm_rollout.agent.yaml.dump import dump
from fsm_rollout.agent.yaml.overrides import apply_overrides, in_texts, interpolate, unescape_interpolation
from fsm_rollout.agent.yaml.source import TEXT_FILE, SourceMap, check_kind, in_file_order, read_text, read_yaml
from fsm_rollout.errors import FILE_LIKENESS, ConfigError, Problem, close_match, did_you_mean
from fsm_rollout.names.objects import look_in, path_of
from fsm_rollout.trajectory.config_errors import ConfigData, ConfigPath, describe_path, explanations

__all__ = ["Reading", "dump", "load_agent", "loads", "read_agent", "recorded_agent"]

# A transition about which there is nothing to say.
_UNREMARKABLE: ConfigData = {"trigger": "failed", "source": [], "dest": TERMINATED}
_AGENT_FILE = re.compile(r".+\.yaml")


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading a YAML: its graph (if its form is right), the lines of its parts, and every problem."""

    graph: AgentGraph | None
    source: SourceMap
    problems: tuple[Problem, ...]


def load_agent(
    source: str | Path | Mapping[str, object], overrides: Sequence[str] = (), *, base: str | Path = "."
) -> AgentGraph:
    """Load and verify an agent, with ``overrides`` such as ``limits.assistant_turns=4``.

    Args:
        source: the path of a YAML file; or the YAML itself, a text of several lines (or one in braces); or the mapping
            that stands in one, in which functions may stand for their names.
        overrides: laid over it.
        base: what files that a text or a mapping names are relative to.

    Raises:
        ConfigError: the file, an override or the agent is wrong; holds every problem, in file order.
    """
    if isinstance(source, Mapping):
        try:
            text = json.dumps(source, default=path_of)  # JSON is YAML, too
        except (TypeError, ValueError) as error:
            path, value = next(_not_plain(source), ((), error))
            what = f"{describe_path(path)}: {value!r} is a {type(value).__name__}" if path else f"{error}"
            may_be = "give text, a number, true or false, a list, a mapping, or a function"
            raise ConfigError(f"the agent's mapping is not plain data: {what}; {may_be}") from error
        return loads(text, base, overrides, name="the agent's mapping")
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{")):
        return loads(source, base, overrides)
    return _graph(read_agent(source, overrides))


def _not_plain(
    value: object, path: ConfigPath = (), inside: tuple[int, ...] = ()
) -> Iterator[tuple[ConfigPath, object]]:
    """Yield what in a value JSON does not have, with its path; ``inside`` are the ids of what it lies in."""
    if isinstance(value, Mapping | list | tuple):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in entries if id(value) not in inside else ():
            yield from _not_plain(entry, (*path, key), (*inside, id(value)))
    elif not isinstance(path_of(value), str | int | float | None):
        yield path, value


def loads(text: str, base: str | Path = ".", overrides: Sequence[str] = (), name: str = "<text>") -> AgentGraph:
    """Do what :func:`load_agent` does with YAML text; files are relative to ``base``, ``name`` stands in messages."""
    return _graph(_read(text, SourceMap(name), Path(base), overrides, ()))


def recorded_agent(text: str, name: str = "<journal>") -> AgentGraph:
    """Return the agent that a journal records (:func:`dump` wrote it), to be looked at and not to be run.

    Nothing that it names is imported, read or looked up, wherever the journal comes from; so only its form is checked.

    Raises:
        ConfigError: it has not the form of an agent.
    """
    return _graph(_read(text, SourceMap(name), Path(), (), (), recorded=True))


def read_agent(path: str | Path, overrides: Sequence[str] = ()) -> Reading:
    """Read and verify without raising: for reports that want the places, or all problems of several files."""
    text = read_text(path)
    source = SourceMap(str(path))
    if isinstance(text, Problem):
        return Reading(None, source, (text,))
    look_in(Path(path).parent)  # an agent's code may lie beside its YAML, as its prompts do
    return _read(text, source, Path(path).parent, overrides, (Path(path).resolve(),))


def _graph(reading: Reading) -> AgentGraph:
    if reading.graph is None or reading.problems:
        raise ConfigError(reading.problems)
    return reading.graph


def _read(
    text: str, source: SourceMap, base: Path, overrides: Sequence[str], inside: tuple[Path, ...], *,
    recorded: bool = False,
) -> Reading:  # fmt: skip
    # 1. YAML.
    data, problems = read_yaml(text, source)
    if not isinstance(data, dict):
        if data is not None:
            kind = "a list" if isinstance(data, list) else f"a {type(data).__name__}"
            message = f"an agent is a mapping with `agent`, `states` and `transitions`, got {kind}"
            problems.append(Problem(message, source.file, 1))
        elif not problems:
            message = "is empty; an agent needs `agent`, `states` and `transitions` (`fsm-rollout new NAME` writes one)"
            problems.append(Problem(message, source.file))
        return Reading(None, source, tuple(problems))
    if other := check_kind(data, "agent", source):
        return Reading(None, source, (other,))
    # 2. What changes it, and the normal form.
    if recorded:
        data = cast(ConfigData, in_texts(unescape_interpolation, data))
    else:
        problems += apply_overrides(data, overrides, source)
        problems += interpolate(data, source)
    _NormalForm(source, problems, recorded=recorded).agent(data, (), base, inside)
    # 3. The form. Where it is wrong, the wrong pieces are taken out, and the names in the rest are still checked.
    graph = None
    left_out: set[ConfigPath] = set()
    for _ in range(5):  # taking one wrong piece out may uncover another
        try:
            # Through JSON, because pydantic is strict there in the right way: no "8" for 8, but lists for tuples.
            graph = AgentGraph.model_validate_json(json.dumps(data), strict=True)
            break
        except ValidationError as error:
            if not left_out:
                wrong = explanations(error, AgentGraph)
                problems += [source.problem(path, message) for path, message in wrong if not source.is_wrong(path)]
            pieces = error.errors(include_url=False)
            if not all(_leave_out(data, item["loc"], left_out, item["type"] == "missing") for item in pieces):
                break
        except (ValueError, TypeError, RecursionError) as error:  # what JSON cannot say
            problems.append(Problem(f"is not plain data: {error}", source.file))
            break
    # 4. The rules; where something else is wrong, those about names and about one state.
    if graph is not None and not recorded:
        if not problems:
            problems = verify(graph, source)
        else:
            for finding in findings(graph, of_states=True):
                at = finding.path
                below = any(at[: len(path)] == path for path in left_out)
                above = finding.rule > 1 and any(path[: len(at)] == at for path in left_out)
                if not below and not above:
                    problems.append(source.problem(at, finding.message, finding.rule, finding.text_line))
    return Reading(None if left_out else graph, source, tuple(in_file_order(problems)))


def _leave_out(data: ConfigData, path: ConfigPath, left_out: set[ConfigPath], is_missing: bool) -> bool:
    """Take the wrong piece at ``path`` out of ``data``; False when it is required and nothing can stand in for it.

    Named entries and transitions are emptied instead, so that names stay defined and transitions keep their numbers.
    """
    # 1. The smallest piece that can go: something with a key, or a transition.
    while path and (path[-1] == "[key]" or (isinstance(path[-1], int) and path[-2:-1] != ("transitions",))):
        path = path[:-1]
    if not path:
        return False
    left_out.add(path)
    # 2. What holds it; it may have gone with a larger piece.
    holder: ConfigData | list[ConfigData] = data
    for part in path[:-1]:
        if isinstance(holder, dict) and part not in holder:
            return True
        holder = holder[part]  # type: ignore[index]
    # 3. Out with it.
    key = path[-1]
    if isinstance(key, int) or isinstance(holder, list):
        holder[key] = dict(_UNREMARKABLE)  # type: ignore[index]
    elif path[-3:-2] == ("transitions",) and key in _UNREMARKABLE:
        holder[key] = _UNREMARKABLE[key]
    elif is_missing:
        return False
    elif path[-2:-1] in (("states",), ("contexts",)) and holder.get(key):
        holder[key] = {}
    else:
        holder.pop(key, None)
    return True


class _NormalForm:
    """Writes out the short spellings of one YAML and of the agents it takes in; adds what is wrong to ``problems``.

    What comes out has the shape of an AgentGraph wherever what went in made sense, and is untouched elsewhere, for
    pydantic to complain about. In a ``recorded`` one, names of files and of code stay names.
    """

    def __init__(self, source: SourceMap, problems: list[Problem], *, recorded: bool = False) -> None:
        self.source = source
        self.problems = problems
        self.recorded = recorded

    def agent(self, data: ConfigData, path: ConfigPath, base: Path, inside: tuple[Path, ...]) -> None:
        """Bring one agent into normal form, in place; ``inside`` are the files being read, outermost first."""
        for entry, at in _entries(data, path, "contexts"):
            for key in ("system", "chat_template"):
                self._text(entry, key, at, base)
        for entry, at in _entries(data, path, "states"):
            self._text(entry, "prompt", at, base)
            self._options(entry, at)
        for entry, at in _entries(data, path, "tools"):
            if isinstance(entry.get("agent"), str) and not self.recorded:
                self._read_sub_agent(entry, (*at, "agent"), base, inside)
            elif isinstance(entry.get("agent"), dict):
                self.agent(entry["agent"], (*at, "agent"), base, inside)

    def _report(self, path: ConfigPath, message: str) -> None:
        self.problems.append(self.source.problem(path, f"{describe_path(path)}: {message}"))

    def _text(self, entry: ConfigData, key: str, at: ConfigPath, base: Path) -> None:
        value, at = entry.get(key), (*at, key)
        if isinstance(value, dict):
            entry[key] = value.get("text")
            if set(value) != {"text"} or not isinstance(value["text"], str):
                self._report(at, "must be text, the name of a text file, or {text: …}")
                entry[key] = ""
        elif isinstance(value, str) and TEXT_FILE.fullmatch(value) and not self.recorded:
            text = self._file(base / value, at, TEXT_FILE) or ""
            source, inner = self.source.within(at)
            source.texts[inner] = (str(base / value), 1)
            entry[key] = text.removesuffix("\n")  # editors end a file with a line break, which is not part of the text

    def _file(self, file: Path, at: ConfigPath, kind: re.Pattern[str]) -> str | None:
        """Return the text of a file, or report what is wrong with it, with the closest name of its ``kind`` there."""
        text = read_text(file)
        if isinstance(text, str):
            return text
        names = [path.name for path in file.parent.iterdir()] if file.parent.is_dir() else []
        hint = close_match(file.name, filter(kind.fullmatch, names), FILE_LIKENESS)
        self._report(at, f"'{file}' {text.message}{hint}")
        return None

    def _options(self, entry: ConfigData, at: ConfigPath) -> None:
        """Check the keys that a custom handler's class declares, and take out those that it does not."""
        handler = HANDLERS.expanded(entry["handler"]) if isinstance(entry.get("handler"), str) else ""
        if self.recorded or not is_custom(handler):
            return
        try:
            model: type[BaseModel] | None = getattr(load_handler(handler), "Options", None)
        except ConfigError:
            return  # verification reports the import
        options = {key: entry[key] for key in entry if key not in STATE_KEYS}
        option_names = set() if model is None else {field.alias or name for name, field in model.model_fields.items()}
        for key in [key for key in options if key not in option_names]:
            del entry[key], options[key]
            none = f"; '{handler}' takes no keys of its own" if model is None else ""
            message = f"{describe_path(at)}: unknown key '{key}'{none}{did_you_mean(key, option_names | STATE_KEYS)}"
            self.problems.append(self.source.problem((*at, key), message))
        if model is None:
            return
        try:
            model.model_validate_json(json.dumps(options), strict=True)
        except ValidationError as error:
            self.problems += [self.source.problem(*explained) for explained in explanations(error, model, at)]

    def _read_sub_agent(self, entry: ConfigData, at: ConfigPath, base: Path, inside: tuple[Path, ...]) -> None:
        """Put the agent that ``entry`` names by file into its place, or take the name out and report why."""
        file = base / entry.pop("agent")
        text = self._file(file, at, _AGENT_FILE)
        if text is None:
            return
        if file.resolve() in inside:
            circle = [*inside[inside.index(file.resolve()) :], file]
            self._report(at, f"agents call one another in a circle: {' -> '.join(path.name for path in circle)}")
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
