"""Agents of a user who makes mistakes, as files: what the plugin's tests write into a folder of their own."""

from textwrap import indent

from tests.cases import FILES, table

GOOD = FILES["good"]

UNLOADABLE = GOOD.replace("dest: GENERATING}\n  - {trigger: generated", "dest: GENERATIN}\n  - {trigger: generated", 1)

DEAD_ROW = FILES["has a dead transition"]

# A grader of one's own, between the model's turns: the README shows it with what the plugin says.
GRADED = FILES["graded"]

_HANDLER = FILES["a handler of one visit"]


def grader(code: str) -> str:
    """The grader's module, whose ``run`` does this."""
    return _HANDLER.format(body=indent(code, " " * 8))


RAISES = table("plugin")["at fault"]["raises"][0]
TOOLS = FILES["a tool that looks words up"]
LOOKS_UP = FILES["looks up"]
