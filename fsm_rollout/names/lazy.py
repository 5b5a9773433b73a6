"""Packages whose names are imported when they are first used, so that importing the package loads nothing heavy.

Invariant: what the table does not name, and is no module of the package either, is an AttributeError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_names(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package, from its modules to the names in each, in one text."""
    homes = {name: module for module, held in names.items() for name in held.split()}

    def get(name: str) -> Any:
        if name in homes:
            value = getattr(import_module(f"{package}.{homes[name]}"), name)
            setattr(sys.modules[package], name, value)
            return value
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    return get, lambda: sorted(homes)
