"""What no schema can be made of is refused when the tool is built, with its place and advice."""

import dataclasses
import typing
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

import numpy as np
import pytest

from fsm_rollout.agent import graph
from fsm_rollout.errors import ToolError
from fsm_rollout.tools import ToolResult, tool_schema, tool_schema_of
from tests.cases import table
from tests.unit.tools.test_schema import Cat, Options

T = TypeVar("T")


class Opaque:
    pass


class OldTypedDict(typing.TypedDict):
    a: int


def described(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__doc__ = "Do it."
    return function


def untyped(number): ...
def starred(*numbers: int) -> None: ...
def positional(number: int, /) -> None: ...
def opaque(fine: int, odd: Opaque) -> None: ...
def unresolved(fine: int, odd: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def callback(fine: int, odd: Callable[[int], int]) -> None: ...
def typed_dict(odd: OldTypedDict) -> None: ...
def stray(number: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "parameter", "says", "advice"),
    [
        (untyped, "number", "has no type", "annotate it, as in `number: str`"),
        (starred, "numbers", "a model names its arguments", "take a list"),
        (positional, "number", "is positional-only", "remove the '/'"),
        (opaque, "odd", "Unable to generate pydantic-core schema for .*Opaque", "a dataclass or a pydantic model"),
        (unresolved, "odd", "'Missing' cannot be resolved", "import the type at the top"),
        (callback, "odd", "CallableSchema", "or hide it"),
        (typed_dict, "odd", "typing_extensions.TypedDict", "or hide it"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_its_place_and_advice(
    function: Callable[..., Any], parameter: str, says: str, advice: str
):
    with pytest.raises(ToolError, match=rf"'{function.__name__}': .*{parameter}.*{says}") as caught:
        tool_schema(described(function))
    assert advice in str(caught.value)


class Page:
    """What a browser's library might return."""


class Described(Protocol):
    def tolist(self) -> list[int]: ...


@dataclasses.dataclass
class Grid:
    cells: Described
    shape: tuple[int, int]


def page() -> Page: ...
def pages() -> dict[str, list[Page] | None]: ...
def marked() -> Annotated["Page", "the front page"]: ...
def error() -> ValueError | str: ...
async def later() -> Page: ...


@pytest.mark.parametrize("function", [page, pages, marked, error, later])
def test_a_return_type_that_cannot_be_shown_is_refused_when_the_tool_is_built(function: Callable[..., Any]) -> None:
    says = rf"'{function.__name__}': what it returns cannot .*: (Page|ValueError) has no JSON form\. Return text"
    with pytest.raises(ToolError, match=says):
        tool_schema(described(function))


@pytest.mark.parametrize(
    "returned",
    [
        str, None, Any, object, int | None, list[dict[str, float]], Literal["a", 1], date, Path, Grid, Described, Cat,
        Options, ToolResult, np.ndarray, Callable[[int], Page], Iterator[str], "Missing", type, T,
    ],
)  # fmt: skip
def test_any_other_return_type_passes(returned: object) -> None:
    def tool(): ...

    tool.__annotations__["return"] = returned
    assert tool_schema(described(tool))["function"]["name"] == "tool"


def test_a_tool_says_what_it_does():
    def silent(number: int) -> None: ...

    with pytest.raises(ToolError, match="no docstring to tell the model what it does"):
        tool_schema(silent)
    stray.__doc__ = "Do it.\n\nArgs:\n    nmuber: What.\n"
    with pytest.raises(ToolError, match="describes 'nmuber', which is no parameter; did you mean 'number'"):
        tool_schema(stray)
    with pytest.raises(ToolError, match="'max': its signature cannot be read"):
        tool_schema(max)


@pytest.mark.parametrize("case", table("tool_schemas")["tools"], ids=str)
def test_a_tool_that_cannot_be_built_says_why(case: dict[str, Any]):
    with pytest.raises(ToolError, match=f"tool 't'.*{case['says']}"):
        tool_schema_of("t", graph.ToolSpec(**case["tool"]))


def test_a_module_that_exits_when_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "this_module_exits.py").write_text("import sys\nsys.exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ToolError, match=r"tool 't'.*cannot import 'this_module_exits'.*SystemExit: 7"):
        tool_schema_of("t", graph.ToolSpec(use="this_module_exits:f"))
