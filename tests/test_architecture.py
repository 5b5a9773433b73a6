"""Imports point one way, there is no circle, heavy libraries have one home, modules are short and say what they hold.

Each rule is one test, which lists all that breaks it.
"""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cases import table
from tests.kit import ROOT

pytestmark = pytest.mark.xdist_group("architecture")  # one worker reads all modules
PACKAGE = ROOT / "fsm_rollout"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "stand_ins" not in path.parts)

TABLE = table("architecture")
ORDER: list[list[str]] = TABLE["order"]
"""A folder imports from its own step and earlier ones; the longest name decides."""
DOORS = {"rewards", "interactions", "journal"}
"""Names that users type; they re-export what is in ``environment`` and ``trajectory``."""
HOMES: dict[str, list[str]] = TABLE["homes of libraries"]
MOST_LINES = 450


def name_of(path: Path) -> str:
    """Return a module's name within the package; ``""`` for the package itself."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


NAMES = {name_of(path) for path in MODULES}


def step_of(name: str) -> int:
    """Return the step of :data:`ORDER` on which a module stands."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        for step, rooms in enumerate(ORDER):
            if ".".join(parts[:depth]) in rooms:
                return step
    raise AssertionError(f"fsm_rollout.{name} is in no room; put it into one, or the room into ORDER")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """Return what a file imports anywhere: at the top, inside functions and, so marked, for the type checker alone."""
    nodes = list(ast.walk(tree_of(path)))
    typing_only = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    for_typing = {child for block in typing_only for child in ast.walk(block)}
    found: list[tuple[str, bool]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, node in for_typing) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = (name if name.removeprefix("fsm_rollout.") in NAMES else node.module for name in inside)
            found += [(name, node in for_typing) for name in names]
    return tuple(found)


def own_imports(path: Path) -> list[str]:
    """Return those of them that are this package's, within the package."""
    return [name.removeprefix("fsm_rollout.") for name, _ in imports_of(path) if name.startswith("fsm_rollout.")]


def test_imports_point_one_way() -> None:
    wrong = []
    for path in MODULES:
        name = name_of(path)
        if name and name not in DOORS:
            imported = own_imports(path)
            wrong += [f"{name} imports {door}; take it from where it is" for door in imported if door in DOORS]
            rest = (other for other in imported if other not in DOORS)
            wrong += [f"{name} imports {other}, to its right" for other in rest if step_of(other) > step_of(name)]
    assert not wrong, "\n".join(wrong)


def test_there_is_no_circle() -> None:
    graph = {name_of(path): set(own_imports(path)) - {name_of(path)} for path in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(
            "a circle: " + ", then ".join(f"{b} imports {a}" for a, b in pairwise(error.args[1]))
        ) from None


def test_heavy_libraries_have_one_home() -> None:
    abroad = []
    for path in MODULES:
        name = name_of(path)
        for imported in (library for library, for_typing in imports_of(path) if not for_typing):
            homes = HOMES.get(imported.split(".")[0])
            if homes is not None and not any(name == home or name.startswith(f"{home}.") for home in homes):
                abroad.append(f"{name} imports {imported}")
    assert not abroad, "\n".join(abroad)


def test_modules_open_with_a_docstring_and_have_a_name() -> None:
    unsaid = [name_of(path) for path in MODULES if not ast.get_docstring(tree_of(path))]
    nameless = [name_of(path) for path in MODULES if path.stem in {"utils", "helpers", "common", "manager", "core"}]
    assert not unsaid + nameless


def test_modules_are_short() -> None:
    lines = {name_of(path): len(path.read_text("utf-8").splitlines()) for path in MODULES}
    longer = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert not longer, f"longer than {MOST_LINES} lines: {longer}"


def test_no_class_has_the_name_of_another() -> None:
    classes = [node.name for path in MODULES for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
    twice = {name for name, times in Counter(classes).items() if times > 1}
    assert not twice, f"names of several classes: {sorted(twice)}"


def test_the_root_has_eight_modules() -> None:
    root = sorted(path.stem for path in PACKAGE.glob("*.py"))
    assert root == ["__init__", "__main__", "errors", "files", "interactions", "journal", "rewards", "rollout"]


def test_the_content_of_a_message_is_read_in_one_place() -> None:
    readers: set[str] = set()
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.Subscript(slice=ast.Constant("content"), ctx=ast.Load()):
                    readers.add(name_of(path))
                case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant("content"), *_]):
                    readers.add(name_of(path))
    assert readers == set(TABLE["readers of content"]), "use text_of and media_of of fsm_rollout.trajectory.stream"


def test_unit_tests_start_no_program() -> None:
    programs = ("subprocess", "tests.programs", "multiprocessing", "mark.process")
    texts = {path: path.read_text("utf-8") for path in (ROOT / "tests" / "unit").rglob("*.py")}
    assert [(path.name, name) for path, text in texts.items() for name in programs if name in text] == []
