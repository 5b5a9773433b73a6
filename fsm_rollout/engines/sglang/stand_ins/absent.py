"""Modules that have every name and do nothing: what SGLang imports on a machine without CUDA and never calls.

Invariant: any name can be imported from such a module, also from a submodule of any name; calling one raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class Absent:
    """A name of a module that is not there."""

    def __init__(self, name: str, why: str) -> None:
        self._name, self._why = name, why

    def __getattr__(self, name: str) -> Absent:
        return stand_in(self._name, self._why)(name)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Say that it cannot be called."""
        raise NotImplementedError(f"{self._name}: {self._why}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every dotted name below a package a module like it."""

    def __init__(self, package: str, why: str) -> None:
        self._package, self._why = package, why

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        below = fullname.startswith(f"{self._package}.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if below else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = stand_in(module.__name__, self._why)


def stand_in(name: str, why: str) -> Callable[[str], Absent]:
    """Return the ``__getattr__`` of an absent module ``name``."""

    def attribute(attribute: str) -> Absent:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{name}.{attribute}", why)

    return attribute


def submodules(package: str, why: str) -> None:
    """Let every submodule of ``package`` be imported, too."""
    sys.meta_path.append(_Submodules(package, why))
