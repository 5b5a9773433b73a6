"""What the docstrings under a class's attributes say, as schemas and tables show it.

Invariant: the source is read only where somebody asks, so a docstring costs an import nothing.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap


def attribute_docs(owner: type) -> dict[str, str]:
    """Return the docstrings that stand under the attributes of a class, by the attributes' names, each on one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    found: dict[str, str] = {}
    for attribute, following in itertools.pairwise(definition.body if isinstance(definition, ast.ClassDef) else ()):
        targets = attribute.targets if isinstance(attribute, ast.Assign) else [getattr(attribute, "target", None)]
        match following:
            case ast.Expr(ast.Constant(str() as text)):
                found |= {target.id: " ".join(text.split()) for target in targets if isinstance(target, ast.Name)}
    return found
