"""Imports point one way, heavy libraries have one home, modules open with their docstring."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fsm_rollout"
MODULES = sorted(PACKAGE.rglob("*.py"))

LAYERS: list[set[str]] = [
    {"errors", "seeds", "frozen", "answers", "plain_calls", "daemon_threads"},
    {"handlers", "tokens"},
    {"graph", "events"},
    {"trajectory"},
    {"predicates", "limits", "prompts", "deadlines", "waiting", "ray_session", "reading"},
    {"chat", "tool_formats", "tools", "machine", "model"},
    {"interactions", "rewards"},
    {"rules", "proof_search", "proof", "verify", "reading.normal_form", "reading.dumping", "run_config"},
    {"loader", "agent_schema", "scaffold"},
    {"engines.base", "engines.answers", "engines.script"},
    {"dispatch", "done", "states", "program", "turn", "visit", "driving", "journal"},
    {"live", "open_groups", "reopening", "staleness", "runs", "scheduler", "rows"},
    {"padding", "batch", "summary"},
    {"engines", "testing"},
    {"rollout"},
    {"execute", "progress", "diagrams"},
    {"cli"},
    {"__main__"},
]
HOMES: dict[str, set[str]] = {
    "torch": {
        "batch",
        "padding",
        "engines.transformers",
        "engines.decoding",
        "engines.sampling",
        "engines.checkpoints",
        "engines.sglang_cpu",
        "engines.sglang_weights",
    },
    "tensordict": {"batch"},
    "ray": {"ray_session", "engines.ray_pool"},
    "sglang": {"engines.sglang_host"},  # a process of its own
    "transitions": {"machine"},
    "typer": {"cli"},
    "sqlite3": {"journal"},
    "graphviz": {"diagrams.dot"},
    "pygraphviz": set(),  # in a process of its own, see diagrams.renderer
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def layer_of(name: str) -> int:
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        for index, layer in enumerate(LAYERS):
            if ".".join(parts[:depth]) in layer:
                return index
    raise AssertionError(f"fsm_rollout.{name} is in no layer; put it into LAYERS")


def imports(path: Path, *, lazy: bool) -> list[str]:
    """The modules that a file imports at run time; those inside functions only when ``lazy``."""
    found: list[str] = []

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import) and (lazy or not inside):
                found.extend(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module and (lazy or not inside):
                found.append(child.module)
            visit(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    visit(ast.parse(path.read_text("utf-8")), inside=False)
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    name = name_of(path)
    if name == "__init__":
        return
    own = layer_of(name)
    for imported in imports(path, lazy=False):
        if imported.startswith("fsm_rollout."):
            other = imported.removeprefix("fsm_rollout.")
            assert layer_of(other) <= own, f"{name} (layer {own}) imports {other} (layer {layer_of(other)})"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_heavy_libraries_have_one_home(path: Path) -> None:
    for imported in imports(path, lazy=True):
        home = HOMES.get(imported.split(".")[0])
        assert home is None or name_of(path) in home, f"{name_of(path)} imports {imported}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_open_with_a_docstring_and_have_one_room(path: Path) -> None:
    text = path.read_text("utf-8")
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= 500, "more than one room in it"
    assert path.stem not in {"utils", "helpers", "common", "manager", "core"}
