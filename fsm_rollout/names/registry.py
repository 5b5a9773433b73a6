"""Words for code: those that ship, those that installed packages bring, and ``module:name`` for any other.

Invariant: a word that ships means what ships, whatever is installed. The entry points of packages are read only for a
word that does not ship, and their code is imported only when it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points

from fsm_rollout.errors import ConfigError, did_you_mean
from fsm_rollout.names.objects import load_object


@dataclass(frozen=True, eq=False)
class Registry:
    """The words of one kind of code.

    ``group`` is that of the entry points by which a package brings words of its own, in its pyproject.toml:
    ``[project.entry-points."fsm_rollout.engines"]``, ``quick = "quick_engine:Engine"``.
    """

    what: str
    """What a word names, for errors: ``engine kind``."""
    group: str
    built_in: Mapping[str, object]
    """The words that ship. Where :meth:`find` is to find them, their values are ``module:name``."""
    form: str = "module:Class"
    """How code without a word is named."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """What people call words that have another name here."""

    def __contains__(self, name: str) -> bool:
        """Say whether a name is a word, or has the form ``module:name`` (whether that can be imported is not known)."""
        return name in self.built_in or ":" in self.expanded(name)

    def words(self) -> list[str]:
        """Return all words that there are here: those that ship, and those of the installed packages."""
        return sorted({*self.built_in, *entry_points(group=self.group).names})

    def expanded(self, name: str) -> str:
        """Return ``module:name`` for a word that a package brings, and any other name as it is.

        Raises:
            ConfigError: several packages bring the word, each for something else.
        """
        if ":" in name or name in self.built_in:
            return name
        brought = {point.value for point in entry_points(group=self.group, name=name)}
        if len(brought) > 1:
            raise ConfigError(f"{self.what} '{name}' is brought by several packages; give one: {', '.join(brought)}")
        return brought.pop() if brought else name

    def path(self, name: str) -> str:
        """Return the ``module:name`` of a name; ConfigError if it is no word that there is."""
        path = self.expanded(name)
        if ":" in path:
            return path
        if path in self.built_in:
            return str(self.built_in[path])
        known_as = self.elsewhere.get(name)
        hint = f"; use '{known_as}', with its keys" if known_as else did_you_mean(name, self.words())
        other = f"{' Or' if hint.endswith('?') else '; or'} give '{self.form}'"
        raise ConfigError(f"{self.what} '{name}' does not exist{hint}{other}")

    def as_setting(self, value: object) -> object:
        """Return :meth:`path` of a text, and anything else as it is: for pydantic, which wants a ValueError."""
        try:
            return self.path(value) if isinstance(value, str) else value
        except ConfigError as error:
            raise ValueError(str(error)) from None

    def find(self, name: str) -> object:
        """Import what a name stands for.

        Raises:
            ConfigError: it is no word that there is, or cannot be imported.
        """
        return load_object(self.path(name))
