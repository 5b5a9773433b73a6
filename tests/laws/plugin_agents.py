"""Agents of a user who makes mistakes, as files: what the plugin's tests write into a folder of their own."""

from __future__ import annotations

from tests.cases import FILES

GOOD = FILES["good"]

UNLOADABLE = GOOD.replace("dest: GENERATING}\n  - {trigger: generated", "dest: GENERATIN}\n  - {trigger: generated", 1)

DEAD_ROW = FILES["has a dead transition"]

# A grader of one's own, between the model's turns: the README shows it with what the plugin says.
GRADED = FILES["graded"]

_HANDLER = FILES["a handler of one visit"]


def grader(*lines: str) -> str:
    """The grader's module, its ``run`` made of ``lines``."""
    return _HANDLER.format(body="\n".join(f"        {line}" for line in lines))


RAISES = ('said = trajectory.text.split("answer is ")[1]', 'return Outcome("right" if "4" in said else "wrong")')
TOOLS = FILES["a tool that looks words up"]
LOOKS_UP = FILES["looks up"]
