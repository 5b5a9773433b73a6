"""Functions and classes by name: a configuration is plain data, and names code as ``module:name``.

Invariant: a name stands for the same object as long as this process runs. What can be imported has its own name; what
cannot (a lambda, a function within a function) is given one here, which no other process knows.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
import re
import sys

from fsm_rollout.errors import ConfigError, close_match, describe, did_you_mean


class _Given:
    """Holds objects that were given a name, as its attributes."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            f"'{name}' was given as an object to the process that began with it, and no other knows it; "
            "write it into a module, and name it as `module:name`"
        )


given = _Given()
_names: dict[int, str] = {}
_numbers = itertools.count(1)
HERE_ALONE = f"{__name__}:given."  # how the names begin that only this process knows


def path_of(code: object) -> object:
    """Return ``module:name`` of a function or class; anything else (such as a name) as it is."""
    if isinstance(code, str) or not callable(code):
        return code
    # 1. Its own name, if that leads to it.
    module, name = getattr(code, "__module__", None), getattr(code, "__qualname__", "<unnamed>")
    if "<" not in name and module in sys.modules:
        try:
            found: object = sys.modules[module]
            for part in name.split("."):
                found = getattr(found, part)
            if found is code:
                return f"{module}:{name}"
        except AttributeError:
            pass
    # 2. Else one that is made for it, once.
    if id(code) not in _names:
        word = re.sub(r"\W", "", name.rpartition(".")[2]) or "object"
        _names[id(code)] = f"{word}_{next(_numbers)}"
        setattr(given, _names[id(code)], code)
    return HERE_ALONE + _names[id(code)]


_folders: list[str] = []


def look_in(folder: str | os.PathLike[str]) -> None:
    """Let ``module:name`` find modules in a folder too, after all that is installed."""
    entry = os.path.abspath(folder)
    if entry not in sys.path and os.path.isdir(entry):
        sys.path.append(entry)
        importlib.invalidate_caches()
    if entry not in _folders:
        _folders.append(entry)


def looked_in() -> list[str]:
    """Return the folders given to :func:`look_in`."""
    return list(_folders)


def _where_looked_for(module: str) -> str:
    """Say that there is no such module, what may have been meant, and where it was looked for."""
    package, _, name = module.rpartition(".")
    folders = list(getattr(sys.modules.get(package), "__path__", ())) if package else None
    hint = close_match(name, (found.name for found in pkgutil.iter_modules(folders)))
    if package:
        return f"there is no module '{name}' in {', '.join(folders or [f'{package}, which is no package'])}{hint}"
    places = " or ".join([*_folders, "the installed packages"])
    return f"there is no module '{module}' in {places}{hint}"


def load_object(path: str) -> object:
    """Import ``module:attribute`` (dots allowed in both); ConfigError says what is missing, and names a close match."""
    module_name, _, attribute = path.partition(":")
    try:
        target: object = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's module does at import, sys.exit too, is their mistake to see
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        reason = describe(error)
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            reason = _where_looked_for(missing)
        raise ConfigError(f"cannot import '{module_name}' (from '{path}'): {reason}") from error
    for part in attribute.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            hint = did_you_mean(part, (n for n in dir(target) if not n.startswith("_")))
            raise ConfigError(f"'{module_name}' has no '{part}' (from '{path}'){hint}") from None
    return target
