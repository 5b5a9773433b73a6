"""Shows the docstrings' reST (roles, literal blocks, simple tables) as Markdown, which the site is written in."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc):`~?([^`]+)`")
LITERAL = re.compile(r"::(?=\n\n[ ]{4})")
RULE = re.compile(r"^=+(?: +=+)+$")


def as_markdown(text: str) -> str:
    """Return a docstring's text as Markdown."""
    text = LITERAL.sub(":", ROLE.sub(lambda found: f"`{found[1].removeprefix('fsm_rollout.')}`", text))
    lines: list[str] = []
    inside = False
    for line in text.split("\n"):
        if RULE.match(line.strip()):
            lines.append("```text" if not inside else "```")
            inside = not inside
        else:
            lines.append(line)
    return "\n".join(lines)


class RestRoles(griffe.Extension):
    """Rewrites each docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
