"""Schemas: what models are shown follows from the signature, and is what calls are checked by."""

import dataclasses
import enum
import functools
import json
from abc import ABC, abstractmethod
from datetime import date
from typing import Annotated, Any, Literal, Optional

import pytest
import typing_extensions
from hypothesis import event, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from benchmarks.arithmetic import TOOL_SCHEMA
from fsm_rollout.agent import graph
from fsm_rollout.errors import BadArguments
from fsm_rollout.tools import Hidden, ToolContext, tool_schema, tool_schema_of, validate_arguments
from fsm_rollout.tools.calculator import calculate
from fsm_rollout.tools.schema import Parameters
from tests.cases import table


class Unit(enum.Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


@dataclasses.dataclass
class Place:
    """Somewhere on Earth."""

    city: str
    country: str | None = None


class Options(typing_extensions.TypedDict, total=False):
    title: typing_extensions.Required[str]
    limit: int


class Node(BaseModel):
    value: int
    children: list["Node"] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    title: str


def forecast(  # descriptions are optional
    place: Place,
    unit: Unit = Unit.CELSIUS,
    days: Annotated[int, Field(ge=1, description="How many days.")] = 1,
    options: Options | None = None,
    tags: list[str] = [],  # noqa: B006  # what users write
    by_city: dict[str, list[Place]] = {},  # noqa: B006
    tree: Node | None = None,
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None,
    around: tuple[int, str] | None = None,
    on: date | None = None,
    either: int | Place | list[int] | None = None,
    extra: dict = {"title": "kept"},  # noqa: B006
) -> str:
    """Tell the weather.

    As far as it can be told.

    Args:
        place: Where you are,
            or want to be.
        unit: The scale.
    """
    return ""


def properties(schema: dict[str, Any]) -> dict[str, Any]:
    return schema["function"]["parameters"]["properties"]


def every_key(node: Any) -> set[str]:
    if isinstance(node, dict):
        return set(node) | {key for value in node.values() for key in every_key(value)}
    return {key for item in node for key in every_key(item)} if isinstance(node, list) else set()


def test_the_calculator_is_shown_as_the_embedded_model_was_trained_on_it():
    shown = tool_schema_of("calculate", graph.ToolSpec(use="fsm_rollout.tools.calculator:calculate"))
    assert json.dumps(shown) == json.dumps(tool_schema(calculate)) == json.dumps(TOOL_SCHEMA)


def test_nested_types_are_written_out_where_they_are_used():
    shown = properties(tool_schema(forecast))
    place = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "country": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert shown["place"] == place | {"description": "Where you are, or want to be."}
    assert shown["by_city"]["additionalProperties"]["items"] == place | {"description": "Somewhere on Earth."}
    unit = {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "The scale.", "default": "celsius"}
    assert list(shown["unit"].items()) == list(unit.items())
    assert shown["days"] == {"type": "integer", "minimum": 1, "description": "How many days.", "default": 1}
    assert shown["options"]["anyOf"][0]["properties"] == {"title": {"type": "string"}, "limit": {"type": "integer"}}
    assert [pet["properties"]["kind"]["const"] for pet in shown["pet"]["anyOf"][0]["oneOf"]] == ["cat", "dog"]
    assert shown["around"]["anyOf"][0]["prefixItems"] == [{"type": "integer"}, {"type": "string"}]
    assert shown["on"]["anyOf"][0] == {"type": "string", "format": "date"}
    assert shown["extra"] == {"type": "object", "default": {"title": "kept"}}


def test_only_a_type_that_holds_itself_keeps_its_reference():
    parameters = tool_schema(forecast)["function"]["parameters"]
    assert list(parameters["$defs"]) == ["Node"]
    assert properties(tool_schema(forecast))["tree"]["anyOf"][0] == {"$ref": "#/$defs/Node"}
    assert parameters["$defs"]["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}
    assert "discriminator" not in every_key(parameters)


def test_titles_are_dropped_but_not_what_is_called_title():
    schema = tool_schema(forecast)
    shown = properties(schema)
    assert shown["extra"].pop("default")["title"] == "kept"
    called_title = [shown["options"]["anyOf"][0], shown["pet"]["anyOf"][0]["oneOf"][1]]
    assert [holder["properties"].pop("title") for holder in called_title] == [{"type": "string"}] * 2
    assert "title" not in every_key(schema)


def test_a_schema_is_valid_json_schema():
    Draft202012Validator.check_schema(tool_schema(forecast)["function"]["parameters"])


def simple(
    word: str, count: int, ratio: float, sure: bool, words: list[str], table: dict[str, int],
    rows: list[dict[str, int]], choice: Literal["x", "y"], maybe: int = 3, anything: Any = None
) -> None:  # fmt: skip
    """Do what it says.

    And more.

    Args:
        word: A word
            or two.
        count: How many.
        ratio: How much.
        sure: Whether.
        words: Several.
        table: By name.
        rows: Many of those.
        choice: One of two.
        maybe: Perhaps.
        anything: Whatever.
    """


def test_agreement_with_transformers():
    """What both can say is the same. Theirs has no defaults, ours says nothing of the result."""
    from transformers.utils import get_json_schema

    for function in (simple, calculate):
        ours, theirs = tool_schema(function), get_json_schema(function)
        for about in properties(ours).values():
            about.pop("default", None)
        del theirs["function"]["return"]
        assert ours == theirs


@pytest.mark.parametrize("docstring", table("tool_schemas")["docstrings"].values())
def test_the_usual_docstrings_are_read(docstring: str):
    def find(what: str, where: str) -> None: ...

    find.__doc__ = docstring
    function = tool_schema(find)["function"]
    assert function["description"] == "Find it."
    assert [p["description"] for p in function["parameters"]["properties"].values()] == [
        "The thing.",
        "The place to look at.",
    ]


def test_a_name_and_a_description_can_be_given():
    assert tool_schema(lambda: 1, name="one", description="Give one.") == {
        "type": "function",
        "function": {"name": "one", "description": "Give one.", "parameters": {"type": "object", "properties": {}}},
    }


def test_any_parameter_name_will_do():
    def odd(_x: int, schema: str, copy: int, model_config: list[int], p1: int, json: str = "") -> None:
        """Be odd."""

    values = {"_x": 1, "schema": "s", "copy": 2, "model_config": [1], "p1": 7}
    assert list(properties(tool_schema(odd))) == ["_x", "schema", "copy", "model_config", "p1", "json"]
    assert validate_arguments(odd, values) == values
    with pytest.raises(BadArguments, match="'p0' is not a parameter"):
        validate_arguments(odd, values | {"p0": 1})


def test_what_is_not_for_the_model_is_not_shown():
    def lookup(
        word: str, context: ToolContext, table: Annotated[str, Hidden], database: object = None, **more: Any
    ) -> None:
        """Look it up."""

    assert list(properties(tool_schema(lookup, hidden=["database"]))) == ["word"]
    with pytest.raises(BadArguments, match="'table' is not a parameter"):
        validate_arguments(functools.partial(lookup, database=1), {"word": "x", "table": "y"})


class Adder:
    """Adds."""

    def __init__(self, to: int) -> None:
        self.to = to

    def __call__(self, number: int) -> int:
        """Add to a fixed number."""
        return self.to + number


def test_callable_objects_and_partials_and_wrapped_functions_are_functions_too():
    assert tool_schema(Adder(1), name="add")["function"]["description"] == "Add to a fixed number."

    @functools.wraps(calculate)
    def wrapped(*args: Any, **kwargs: Any) -> int:
        return calculate(*args, **kwargs)

    assert tool_schema(wrapped) == tool_schema(calculate)
    halved = functools.partial(calculate, left=1)
    assert list(properties(tool_schema(halved, name="from_one", hidden=["left"]))) == ["operator", "right"]


class Configured:
    """Look around in a room."""

    def __init__(self, size: int = 1) -> None: ...

    async def execute(self, direction: Literal["left", "right"], context: ToolContext) -> str:
        return direction


class Half(Configured, ABC):
    @abstractmethod
    def finish(self) -> None: ...


def test_a_class_is_shown_by_its_execute():
    shown = tool_schema_of("look", graph.ToolSpec(use=f"{__name__}:Configured", kwargs={"size": 2}))
    assert shown["function"]["description"] == "Look around in a room."
    assert properties(shown) == {"direction": {"type": "string", "enum": ["left", "right"]}}


def test_an_agent_takes_a_task():
    agent = graph.AgentGraph(agent="helper", description="Helps.", states={"PENDING": {}}, transitions=())
    shown = tool_schema_of("delegate", graph.ToolSpec(agent=agent))
    assert shown["function"]["description"] == "Helps."
    assert shown["function"]["parameters"]["required"] == ["task"]
    assert properties(shown)["task"]["type"] == "string"
    silent = tool_schema_of("delegate", graph.ToolSpec(agent=agent.model_copy(update={"description": ""})))
    assert silent["function"]["description"] == "Hand a task to the agent 'helper'."


@pytest.mark.parametrize("case", table("tool_schemas")["arguments"], ids=str)
def test_a_model_is_told_which_argument_what_was_got_and_what_is_expected(case: dict[str, Any]):
    with pytest.raises(BadArguments) as caught:
        validate_arguments(forecast, case["given"])
    assert str(caught.value).startswith(case["says"])
    assert len(str(caught.value)) < 250


def test_many_wrong_arguments_are_not_all_listed():
    with pytest.raises(BadArguments, match=r"; and 7 more$"):
        validate_arguments(forecast, {f"z{i}": 1 for i in range(11)})


def test_arguments_arrive_as_the_function_takes_them():
    values = {"place": {"city": "Rome"}, "unit": "fahrenheit", "days": "3", "on": "2026-01-02", "around": [1, "km"]}
    assert validate_arguments(forecast, values) == {
        "place": Place("Rome"),
        "unit": Unit.FAHRENHEIT,
        "days": 3,
        "on": date(2026, 1, 2),
        "around": (1, "km"),
    }, "defaults are left to the function"


KEYS = st.sampled_from(["city", "country", "title", "limit", "value", "children", "kind", "a"])
WORDS = st.sampled_from(["", "3", "celsius", "2026-01-02"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-5, 5) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
FORECAST = Parameters(forecast, where="forecast")
VALIDATOR = Draft202012Validator(FORECAST.schema | {"additionalProperties": False})
NAMES = st.sampled_from(["unit", "days", "options", "tags", "by_city", "tree", "around", "either", "extra", "other"])


@given(st.dictionaries(NAMES, JSON, max_size=4), st.just({"city": "x"}) | JSON)
def test_what_follows_the_schema_is_accepted(arguments: dict[str, Any], place: Any):
    """Oracle: the jsonschema package. The reverse does not hold: "3" is taken for 3, which no schema promises."""
    arguments = {**arguments, "place": place}
    try:
        read = FORECAST.read(arguments)
    except BadArguments as error:
        event(str(error)[:20])
        assert not VALIDATOR.is_valid(arguments)
    else:
        assert read.keys() == arguments.keys(), "nothing is dropped, nothing is added"


def test_arguments_are_a_copy():
    def note(lines: list[Any], options: dict) -> None:
        """Note it."""

    values = {"lines": [["a"]], "options": {"deep": ["b"]}}
    read = validate_arguments(note, values)
    read["lines"][0].append("changed")
    read["options"]["deep"].append("changed")
    assert values == {"lines": [["a"]], "options": {"deep": ["b"]}}


def test_optional_in_its_old_spelling():
    def old(number: Optional[int] = None) -> None:  # noqa: UP045
        """Be old."""

    assert properties(tool_schema(old))["number"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert validate_arguments(old, {"number": None}) == {"number": None}
