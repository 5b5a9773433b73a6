"""What text a template looks for in messages: the literals that can make it treat one text unlike another.

Invariant: if a message's text holds none of a template's literals, the template's own string tests
(``in``, ``startswith``, ``split``, ``replace``, …) cannot tell it from any other ordinary text. Tests written
in ways not seen here are what the audit is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jinja2 import nodes

_METHODS = frozenset(
    {"startswith", "endswith", "split", "rsplit", "replace", "find", "rfind", "index", "count", "partition"}
    | {"rpartition", "removeprefix", "removesuffix"}
)


class TestedText:
    """Answers whether a text must take the slow path."""

    def __init__(self, trees: Iterable[nodes.Template]) -> None:
        whole: set[str] = set()
        inside: set[str] = set()
        for tree in trees:
            assigned: dict[str, set[str]] = {}
            for assign in tree.find_all(nodes.Assign):
                if isinstance(assign.target, nodes.Name):
                    assigned.setdefault(assign.target.name, set()).update(_strings(assign.node, {}))
            for compare in tree.find_all(nodes.Compare):
                for operand in compare.ops:
                    if operand.op in ("in", "notin"):
                        inside.update(_strings(compare.expr, assigned))
                    else:
                        whole.update(_strings(operand.expr, assigned), _strings(compare.expr, assigned))
            for call in tree.find_all(nodes.Call):
                if isinstance(call.node, nodes.Getattr) and call.node.attr in _METHODS:
                    inside.update(text for argument in call.args for text in _strings(argument, assigned))
            for applied in tree.find_all(nodes.Filter):
                if applied.name in ("replace", "split"):
                    inside.update(text for argument in applied.args for text in _strings(argument, assigned))
        self.whole = frozenset(whole)
        # White space is left to the probes of a scaffold: every text has some.
        self.inside = tuple(sorted({text for text in inside if text.strip()}))

    def may_matter(self, text: str) -> bool:
        """Return whether the template may treat ``text`` unlike other texts."""
        if text in self.whole:
            return True
        return True in [literal in text for literal in self.inside]  # a generator costs more than the searches


def _strings(node: nodes.Node | None, assigned: dict[str, set[str]]) -> Iterator[str]:
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, nodes.Name):
        yield from assigned.get(node.name, ())
    elif isinstance(node, (nodes.List, nodes.Tuple)):
        for item in node.items:
            yield from _strings(item, assigned)
    elif isinstance(node, nodes.CondExpr):
        yield from _strings(node.expr1, assigned)
        yield from _strings(node.expr2, assigned)
