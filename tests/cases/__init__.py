"""Tables of cases: what is given, and what is said of it."""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any, cast

import pytest

from fsm_rollout.agent.yaml.source import SourceMap, read_yaml
from tests.kit import script


@cache
def table(name: str) -> dict[str, Any]:
    """Return the table in the file ``name.yaml`` here; it is read once, and nobody changes it."""
    path = Path(__file__).with_name(f"{name}.yaml")
    data, problems = read_yaml(path.read_text("utf-8"), SourceMap(str(path)))
    assert not problems, problems  # a case that is named like another would be lost
    return cast("dict[str, Any]", data)


def cases(name: str, *more: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Run a test for each line of the list that is named like it, and for ``more``; a line has its first arguments."""

    def decorate(test: Any) -> Any:
        lines = [*table(name)[test.__name__.removeprefix("test_").replace("_", " ")], *more]
        taken = len(lines[0]) if isinstance(lines[0], list) else 1
        return pytest.mark.parametrize(",".join([*inspect.signature(test).parameters][:taken]), lines)(test)

    return decorate


def mistakes(name: str) -> list[tuple[str, int, str]]:
    """Return the cases of a table of broken code: how each is called, the promise that it breaks, and what is said."""
    return [(case, facts["promise"], facts["says"]) for case, facts in table(name).items() if case != "imports"]


def written(name: str, case: str, folder: Path, head: str = "") -> Any:
    """Import the code of a case in a table as a module of a user's, in a folder; return what bears the case's name.

    With a ``head``, of a class or a function, the code is what stands below it, and that is what is returned.
    """
    code = table(name)[case]["code"]
    if head:
        code = f"{head}:\n{indent(code, '    ')}"
    path = folder / case / f"{name}.py"  # of its own: within a second Python takes one text for another of its size
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{table(name)['imports']}\n{code}", "utf-8")
    return getattr(script(path), head.partition("(")[0].rpartition(" ")[2] or case)


FILES: dict[str, str] = table("files")  # what users write, by name
PROGRAMS: dict[str, str] = table("programs")  # what runs in a process of its own, by what it does
SCRIPTS: dict[str, str] = table("browser")  # what pages are asked, by what that finds out


def says(expected: Sequence[str], lines: Sequence[str]) -> bool:
    """Whether the lines are those expected; ``…`` stands for any text, and on its own for any lines."""
    pattern = "".join(r"(.*\n)*" if text == "…" else re.escape(text).replace("…", ".*") + r"\n" for text in expected)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None
