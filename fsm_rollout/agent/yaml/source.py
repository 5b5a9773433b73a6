"""YAML, read strictly and with its lines.

Invariant: what comes out is plain data (str, int, float, bool, None, list, dict with str keys) that means the same to
every YAML reader. Where YAML 1.1 has surprises (``on`` is true, ``0123`` is 83, ``1:30`` is 90, the last of two equal
keys wins) there is a problem instead, and all problems of a file are found in one go. PyYAML composes the nodes; they
are turned into data here, because its constructor drops lines and keeps the surprises.

Every config path has a place (:class:`SourceMap`). One that was not written itself (a default, something made by
interpolation) has the place of its nearest ancestor that was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Literal

import yaml

from fsm_rollout.errors import Problem
from fsm_rollout.trajectory.config_errors import ConfigData, ConfigPath

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000  # values in one file after its aliases are followed (an "alias bomb" has billions)

MAX_LINES = 10_000  # of the YAML of an agent or a run: reading takes a second for each ten thousand
MAX_DEPTH = 50  # values within values

TEXT_FILE = re.compile(r"\S+\.(md|txt|jinja|j2)")  # a text that is one such word names a file

_TAG = "tag:yaml.org,2002:"
_SURROGATE = re.compile("[\ud800-\udfff]")
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")

# What some YAML reader takes for something else than text: `y` and `n` (booleans in YAML 1.1, text to PyYAML) and
# `1e3` (a float in YAML 1.2, text to PyYAML). The dumper shares these, so it quotes such text.
STRICTER = (
    ("bool", re.compile(r"^[yYnN]$"), list("yYnN")),
    ("float", re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")),
)


YamlKind = Literal["agent", "run", "script"]
_KEYS_OF: Mapping[YamlKind, Set[str]] = {
    "agent": {"states", "transitions", "limits", "initial", "contexts", "tools"},
    "run": {"prompts", "engine", "out", "n", "reward", "sampling"},
}
_IS = {
    "agent": "is an agent's YAML, which `fsm-rollout check` takes; a run's names it under `agent`",
    "run": "is a run's YAML, which `fsm-rollout run` takes; an agent's is what it names under `agent`",
    "script": "is a script of turns, which a run's YAML names: engine: {kind: scripted, script: FILE}",
}


def kind_of(data: object) -> YamlKind | None:
    """Return what a YAML is of, by most of its keys, or ``None`` where they do not say."""
    if isinstance(data, list):
        return "script"
    if not isinstance(data, dict) or not data:
        return None
    agents, runs = (len(keys & data.keys()) for keys in _KEYS_OF.values())
    if agents == runs:
        return "script" if not agents and all(isinstance(turns, list) for turns in data.values()) else None
    return "agent" if agents > runs else "run"


def check_kind(data: ConfigData, wanted: YamlKind, source: SourceMap) -> Problem | None:
    """Return what is wrong if the mapping in a YAML is of another kind than the one wanted."""
    kind = kind_of(data)
    return None if kind in (None, wanted) else Problem(_IS[kind or wanted], source.file)


class SourceMap:
    """Lines by config path, for one file and the files that it takes in."""

    def __init__(self, file: str | None = None) -> None:
        self.file = file
        self.lines: dict[ConfigPath, int] = {}  # 1-based line of each key and list item
        self.overrides: dict[ConfigPath, str] = {}  # the override on the command line that set a value, by path
        # What has been found wrong already, so that nothing more needs to be said about its value.
        self.wrong: set[ConfigPath] = set()
        # Files taken in as a part (a sub-agent), with paths that begin anew.
        self.parts: dict[ConfigPath, SourceMap] = {}
        # File and line at which a text begins (a template's own file, or a block in the YAML).
        self.texts: dict[ConfigPath, tuple[str | None, int]] = {}

    def within(self, path: ConfigPath) -> tuple[SourceMap, ConfigPath]:
        """Return the map of the file that ``path`` leads into, and the path within that file."""
        for length in range(len(path) + 1):
            if path[:length] in self.parts:
                return self.parts[path[:length]].within(path[length:])
        return self, path

    def locate(self, path: ConfigPath, text_line: int | None = None) -> tuple[str | None, int | None]:
        """Return the file (or the override) and the line that say what is at ``path``.

        With ``text_line`` it is that line (from 1) of the text at ``path``.
        """
        source, path = self.within(path)
        if text_line is not None and path in source.texts and path not in source.overrides:
            file, first = source.texts[path]
            return file, first + text_line - 1
        prefixes = [path[:length] for length in range(len(path), -1, -1)]
        for prefix in prefixes:
            if prefix in source.overrides:  # everything below an overridden path comes from the override
                return source.overrides[prefix], None
        return source.file, next((source.lines[prefix] for prefix in prefixes if prefix in source.lines), None)

    def is_wrong(self, path: ConfigPath) -> bool:
        """Whether a problem with the value at ``path``, or around it, is known."""
        source, path = self.within(path)
        return any(path[:length] in source.wrong for length in range(len(path) + 1))

    def problem(self, path: ConfigPath, message: str, rule: int = 0, text_line: int | None = None) -> Problem:
        """Build the problem that ``message`` says of ``path``, or of a line of the text there."""
        file, line = self.locate(path, text_line)
        return Problem(message, file, line, rule)


def in_file_order(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems sorted by file and line, each once; equal lines keep their order."""
    return sorted(dict.fromkeys(problems), key=lambda problem: (problem.file or "", problem.line or 0))


_COLON = "mapping values are not allowed here"  # what the YAML library says of a second `key: ` on a line


class _Loader(yaml.SafeLoader):
    pass


for _kind, _pattern, _first in STRICTER:
    _Loader.add_implicit_resolver(_TAG + _kind, _pattern, _first)


def read_text(path: str | Path) -> str | Problem:
    """Return a file's text (UTF-8, a byte order mark dropped), or what is wrong with the file."""
    shown, path = str(path), Path(path)
    try:
        if path.is_dir():
            return Problem("is a directory; give a file", shown)
        data = path.read_bytes()
    except FileNotFoundError:
        return Problem("no such file", shown)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return Problem(f"cannot be read: {getattr(error, 'strerror', None) or error}", shown)
    if len(data) > MAX_BYTES:
        return Problem(f"has {len(data):,} bytes; at most {MAX_BYTES:,} are read", shown)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return Problem(f"is not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8", shown, line)


def read_yaml(text: str, source: SourceMap, max_lines: int = MAX_LINES) -> tuple[object, list[Problem]]:
    """Turn YAML into plain data and fill ``source`` with its lines; ``None`` when it cannot be parsed or is empty."""
    line = None
    if (count := text.count("\n")) > max_lines:
        return None, [Problem(f"has {count:,} lines; at most {max_lines:,} are read", source.file)]
    try:
        node = yaml.compose(text, Loader=_Loader)
        reader = _Reader(source)
        return None if node is None else reader.value(node, ()), reader.problems
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"YAML does not allow the character U+{ord(text[error.position]):04X}"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        said = ", ".join(part for part in (error.context, error.problem) if part)
        lines = text.splitlines()
        if mark and error.problem == _COLON and re.search(r": +\S", lines[mark.line][: mark.column]):
            said = "a text with a colon and a space in it must be in quotes, or below a `|`"
        else:
            said = _about_indentation(lines, line or 0) or said
        message = f"not YAML: {said}"
    except RecursionError:
        message = "is nested too deeply to be read"
    except _TooManyError:
        message = f"has more than {MAX_VALUES:,} values once its aliases are followed"
    return None, [Problem(message, source.file, line)]


def _about_indentation(lines: Sequence[str], number: int) -> str:
    """Return in plain words what is wrong with the indentation of a line that YAML does not take; ``""`` if nothing is.

    A line may stand at the level of any line that it is still within: going up, each that is indented less than all
    below it.
    """
    line = lines[number - 1] if 0 < number <= len(lines) else ""
    before = line[: len(line) - len(line.lstrip())]
    if "\t" in before:
        return "the line is indented with a tab, and YAML takes spaces only"
    levels: dict[int, int] = {}
    for above in range(number - 1, 0, -1):
        words = lines[above - 1].lstrip(" ")
        if not words or words.startswith("#"):
            continue
        indent = len(lines[above - 1]) - len(words)
        item = re.match(r"(?:- +)+", words)
        for level in ([indent + item.end()] if item else []) + [indent]:
            if not levels or level < min(levels):
                levels[level] = above
    if not line.strip() or not levels:
        return ""
    if len(before) not in levels:
        places = " or ".join(f"{level} as line {above}" for level, above in levels.items())
        return f"the line is indented by {len(before)} space{'s' * (len(before) != 1)}; indent it by {places}"
    level = levels[len(before)]
    if lines[level - 1].lstrip(" ").startswith("- ") and not line.lstrip(" ").startswith("-"):
        return f"the line stands among the items of a list (as line {level}) and is none; indent it otherwise"
    return ""


class _TooManyError(Exception):
    pass


class _Reader:
    """Nodes to data, one file."""

    def __init__(self, source: SourceMap) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self._open: set[int] = set()
        self._count = 0

    def _report(self, node: yaml.Node, message: str) -> None:
        self.problems.append(Problem(message, self.source.file, node.start_mark.line + 1))

    def value(self, node: yaml.Node, path: ConfigPath) -> object:
        self._count += 1
        if self._count > MAX_VALUES:
            raise _TooManyError
        if len(path) > MAX_DEPTH:
            raise RecursionError
        line = node.start_mark.line + 1
        self.source.lines.setdefault(path, line)
        if isinstance(node, yaml.ScalarNode):
            if node.style == "|":
                self.source.texts[path] = (self.source.file, line + 1)
            problems = len(self.problems)
            scalar = self._scalar(node)
            if len(self.problems) > problems:
                self.source.wrong.add(path)
            return scalar
        if id(node) in self._open:
            self._report(node, "an alias stands inside the very value that it names")
            return None
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self._report(node, f"the tag {node.tag.replace(_TAG, '!!')} is not supported; write plain values")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [self.value(child, (*path, index)) for index, child in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: ConfigPath) -> dict[str, object]:
        merged: dict[str, object] = {}
        data: dict[str, object] = {}
        written: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":  # `<<: *one` or `<<: [*one, *other]`; the first that has a key wins
                for part in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    value = self.value(part, path)
                    if isinstance(value, dict):
                        merged = {**value, **merged}
                    else:
                        self._report(part, "`<<` takes a mapping (or a list of them) to merge in")
                continue
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key in written:
                self._report(key_node, f"key '{key}' is written twice in one mapping (before in line {written[key]})")
            written[key] = self.source.lines[(*path, key)] = line
            data[key] = self.value(value_node, (*path, key))
        return {**merged, **data}

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            self._report(node, "a key must be one word; text that begins with `{` or `[` needs quotes")
            return f"?{len(self.problems)}"
        is_boolean = node.tag == _TAG + "bool"
        if is_boolean and node.value in STRICTER[0][2]:
            return str(node.value)  # `n` is a run's own key; text to PyYAML and to YAML 1.2
        value = self._scalar(node)
        if not isinstance(value, str) and not is_boolean:
            self._report(node, f'the key `{node.value}` is not text in YAML; write "{node.value}"')
        return value if isinstance(value, str) else str(node.value)

    def _scalar(self, node: yaml.ScalarNode) -> object:
        text = str(node.value)
        match node.tag.removeprefix(_TAG):
            case "null":
                return None
            case "bool":
                if text.lower() not in ("true", "false"):
                    self._report(node, f'`{text}` is a boolean in YAML 1.1; write true or false, or "{text}" for text')
                return text.lower() in ("true", "on", "yes", "y")
            case "int" | "float" as kind:
                return self._number(node, kind)
            case "str" | "timestamp" | "value":
                try:  # JSON writes what is beyond U+FFFF as a pair of surrogates
                    return text.encode("utf-16", "surrogatepass").decode("utf-16") if _SURROGATE.search(text) else text
                except UnicodeDecodeError:
                    self._report(node, "half of a surrogate pair is not a character")
                    return ""
        self._report(node, f"the tag {node.tag.replace(_TAG, '!!')} is not supported; write plain values")
        return text

    def _number(self, node: yaml.ScalarNode, kind: str) -> int | float:
        text = str(node.value)
        try:
            if kind == "float" and ":" not in text:
                return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
            if _DECIMAL.fullmatch(text):
                return int(text.replace("_", ""))
            parsed = yaml.safe_load(text)
            self._report(node, f'`{text}` means {parsed} in YAML 1.1; write {parsed}, or "{text}" for text')
        except ValueError:
            self._report(node, f"`{text[:40]}` is not a number that can be read")
        return 0
