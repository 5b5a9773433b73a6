"""Where the core can be changed, and how: by the operators of cosmic-ray, one change at a time.

Invariant: what a seed draws of some code does not depend on the code beside it: places are ordered by a digest of the
seed and of the line they stand in, so a mutant that has a test once is not exchanged for another when something else
changes. A mutant differs from its original in what runs: annotations, docstrings and what is there for the type
checker alone are left as they are. So are sizes and times that somebody chose (numbers other than 0 and 1, as constants
and defaults), as tests hold what is done with them; and guards against mistakes that the code does not make (`frozen`,
`slots`, `strict`, `kw_only`, `abstractmethod`).
"""

from __future__ import annotations

import ast
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

from tests.mutants.runner import ROOT

CORE = ("trajectory", "states", "scheduler", "batch", "chat", "tools", "agent", "jobs", "adapters")
"""Folders; and what stands in `engines` itself, the client and the pool, but for Ray's part."""
Position = tuple[int, int]


@dataclass(frozen=True)
class Site:
    """A place in a file, and every change that some operator makes there."""

    file: str
    """Within ``fsm_rollout/``."""
    start: Position
    changes: tuple[tuple[str, int], ...]
    """Operators and the number of the occurrence."""
    lines: range | None
    """Which run where this has an effect, of a loop its first alone; None where it runs on import."""
    name: str
    """What stays when other lines change: the file, the line's text, the place in it, and which of several such."""

    def dice(self, seed: int) -> random.Random:
        """Return what is drawn from for this place."""
        return random.Random(f"{seed}/{self.name}")


def core_files() -> list[str]:
    """Return the files of the core, within the package."""
    package = ROOT / "fsm_rollout"
    found = [path for name in CORE for path in (package / name).rglob("*.py")]
    found += [path for path in (package / "engines").glob("*.py") if path.name != "ray.py"]
    return sorted(str(path.relative_to(package)) for path in found)


def sites(file: str) -> Iterator[Site]:
    """Yield the places of a file."""
    text = (ROOT / "fsm_rollout" / file).read_text("utf-8")
    tree, found = ast.parse(text), defaultdict(list)
    silent = [(_start(node, 1), _end(node)) for node in _without_effect(tree)]  # a decorator with its @
    provider, nodes = OperatorProvider(), list(ast_nodes(get_ast(text)))
    for name in provider:
        operator = provider[name]
        if operator.arguments():
            continue  # they are for names that somebody chose
        positions = (start for node in nodes for start, _ in operator().mutation_positions(node))
        for occurrence, start in enumerate(positions):
            if not any(first <= start < last for first, last in silent):
                found[start].append((name, occurrence))
    lines, alike = text.splitlines(), Counter[str]()
    for start, changes in sorted(found.items()):
        line = lines[start[0] - 1]
        name = f"{file}/{line.strip()}/{start[1] - len(line) + len(line.lstrip())}"
        alike[name] += 1
        yield Site(file, start, tuple(changes), _lines(tree, start), f"{name}/{alike[name]}")


def draw(count: int, seed: int) -> list[tuple[Site, str, str]]:
    """Draw mutants of the core: a place each, the name of the operator, and the file's new text."""
    places = [(dice := site.dice(seed), dice.random(), site) for file in core_files() for site in sites(file)]
    mutants: list[tuple[Site, str, str]] = []
    for dice, _, site in sorted(places, key=lambda place: place[1]):
        name, occurrence = dice.choice(site.changes)
        old = (ROOT / "fsm_rollout" / site.file).read_text("utf-8")
        try:
            new = mutate_code(old, OperatorProvider()[name](), occurrence)
        except AttributeError:  # cosmic-ray replaces no exception that has a dot in its name
            continue
        if new is not None and _meaning(new) not in (None, _meaning(old)):
            mutants.append((site, name, new))
        if len(mutants) == count:
            break
    return mutants


def _meaning(text: str) -> str | None:
    try:
        return ast.dump(ast.parse(text))
    except SyntaxError:
        return None


def _start(node: Any, before: int = 0) -> Position:
    return node.lineno, node.col_offset - before


def _end(node: Any) -> Position:
    return node.end_lineno, node.end_col_offset


def _without_effect(tree: ast.Module) -> Iterator[Any]:
    """Yield annotations, strings that stand alone, and what only the type checker reads."""
    for node in ast.walk(tree):
        yield from filter(None, (getattr(node, name, None) for name in ("annotation", "returns")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield node
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_type(node):
            yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (one for one in node.decorator_list if ast.unparse(one) == "abstractmethod")
        if isinstance(node, ast.keyword) and node.arg in ("frozen", "slots", "strict", "kw_only"):
            yield node.value
        yield from filter(_is_chosen, _defaults(node))


def _defaults(node: ast.AST) -> Iterator[Any]:
    """Yield what a constant is, or a field or a parameter where nobody says otherwise."""
    if isinstance(node, ast.Module | ast.ClassDef):
        for line in node.body:
            value = getattr(line, "value", None)
            is_field = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Field"
            yield from value.args[:1] if is_field else filter(None, [value])
    elif isinstance(node, ast.arguments):
        yield from filter(None, [*node.defaults, *node.kw_defaults])


def _is_chosen(node: ast.AST) -> bool:
    numbers = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    only = all(
        isinstance(part, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop) for part in ast.walk(node)
    )
    return only and all(type(number) in (int, float) for number in numbers) and not {*numbers} <= {0, 1}


def _is_type(node: ast.Assign | ast.AnnAssign) -> bool:
    return "TypeAlias" in ast.unparse(node) or "TypeVar(" in ast.unparse(node)


def _lines(tree: ast.Module, start: Position) -> range | None:
    """Return the lines that run where the innermost statement at a place has an effect; None: on import."""
    around = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.excepthandler)
        and min(map(_start, [node, *getattr(node, "decorator_list", ())])) <= start < _end(node)
    ]  # fmt: skip
    functions = [node for node in around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    innermost: Any = min(around, key=lambda node: (_end(node)[0] - node.lineno, node not in functions), default=None)
    if not functions:
        return None
    if innermost in functions:  # its defaults, or a decorator: they have an effect when it runs
        return range(innermost.body[0].lineno, _end(innermost)[0] + 1)
    body = getattr(innermost, "body", None)
    return range(innermost.lineno, (max(innermost.lineno, body[0].lineno - 1) if body else _end(innermost)[0]) + 1)
