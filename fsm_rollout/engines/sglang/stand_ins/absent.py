"""Modules that have every name and do nothing: what SGLang imports on a machine without CUDA and never calls.

Invariant: any name can be imported from such a module, also from a submodule of any name; calling one raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn


class _Absent:
    """A name of a module that is not installed."""

    def __init__(self, name: str, why: str) -> None:
        self._name, self._why = name, why

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}", self._why)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
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
        vars(module)["__getattr__"] = _Absent(module.__name__, self._why).__getattr__


def stand_in(name: str, why: str) -> None:
    """Give the module ``name`` every name and submodule; calling anything of it says ``why`` it is absent."""
    vars(sys.modules[name]).update(__version__="0.0.0", __path__=[], __getattr__=_Absent(name, why).__getattr__)
    sys.meta_path.append(_Submodules(name, why))
