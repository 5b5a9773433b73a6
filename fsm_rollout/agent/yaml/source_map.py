"""Where each piece of a configuration was written.

Invariant: every config path has a place. One that was not written itself (a default, something made by interpolation)
has the place of its nearest ancestor that was.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsm_rollout.errors import Problem
from fsm_rollout.trajectory.model_errors import ConfigPath


class SourceMap:
    """Lines by config path, for one file and the files that it takes in."""

    def __init__(self, file: str | None = None) -> None:
        self.file = file
        self.lines: dict[ConfigPath, int] = {}
        """1-based line of each key and list item."""
        self.overrides: dict[ConfigPath, str] = {}
        """What was said on the command line instead, by path."""
        self.wrong: set[ConfigPath] = set()
        """What has been found wrong already, so that nothing more needs to be said about its value."""
        self.parts: dict[ConfigPath, SourceMap] = {}
        """Files taken in as a part (a sub-agent), with paths that begin anew."""
        self.texts: dict[ConfigPath, tuple[str | None, int]] = {}
        """File and line at which a text begins (a template's own file, or a block in the YAML)."""

    def within(self, path: ConfigPath) -> tuple[SourceMap, ConfigPath]:
        """Return the map of the file that ``path`` leads into, and the path within that file."""
        for length in range(len(path) + 1):
            if path[:length] in self.parts:
                return self.parts[path[:length]].within(path[length:])
        return self, path

    def locate(self, path: ConfigPath) -> tuple[str | None, int | None]:
        """Return the file (or the override) and the line that say what is at ``path``."""
        source, path = self.within(path)
        prefixes = [path[:length] for length in range(len(path), -1, -1)]
        for prefix in prefixes:
            if prefix in source.overrides:  # everything below it was said there
                return source.overrides[prefix], None
        return source.file, next((source.lines[prefix] for prefix in prefixes if prefix in source.lines), None)

    def locate_text(self, path: ConfigPath, line: int) -> tuple[str | None, int | None]:
        """Return the file and the line of the ``line``-th line (from 1) of the text at ``path``."""
        source, inner = self.within(path)
        if inner not in source.texts or inner in source.overrides:
            return self.locate(path)
        file, first = source.texts[inner]
        return file, first + line - 1

    def is_wrong(self, path: ConfigPath) -> bool:
        """Whether a problem with the value at ``path``, or around it, is known."""
        source, path = self.within(path)
        return any(path[:length] in source.wrong for length in range(len(path) + 1))

    def problem(self, path: ConfigPath, message: str, rule: int = 0) -> Problem:
        """Build the problem that ``message`` says of ``path``."""
        file, line = self.locate(path)
        return Problem(message, file, line, rule)


def in_file_order(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems sorted by file and line, each once; equal lines keep their order."""
    return sorted(dict.fromkeys(problems), key=lambda problem: (problem.file or "", problem.line or 0))
