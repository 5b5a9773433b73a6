"""What a model is shown of a tool: the OpenAI form of its name, description and parameters.

Invariant: a schema is a function of the tool's code and configuration alone, and building one runs none of the tool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fsm_rollout.agent import graph
from fsm_rollout.tools.binding import bind, function_schema
from fsm_rollout.tools.json_schema import Schema
from fsm_rollout.tools.parameters import parameters_of


def tool_schema(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    hidden: Collection[str] = (),
) -> Schema:
    """Return the schema of a typed function: ``{"type": "function", "function": {name, description, parameters}}``.

    Types may be all that pydantic can put into JSON schema; descriptions come from the docstring (Google, NumPy or
    ``:param`` style) or from ``Annotated[…, Field(description=…)]``. Nested types are written out where they are used.

    Args:
        function: the tool; it is not called.
        name: what the model calls it; the function's name by default.
        description: instead of the docstring's text before its parameters.
        hidden: parameters that the model does not fill in, besides those marked ``Hidden`` or ``ToolContext``.

    Raises:
        ToolError: a parameter without a type, ``*args``, a positional-only parameter, a type without a JSON form, a
            description of a parameter that does not exist, or no description at all.
    """
    where = _where(function)
    parameters = parameters_of(function, where=where, hidden=hidden)
    name = name or str(getattr(function, "__name__", type(function).__name__))
    return function_schema(name, description, parameters, where)


def tool_schema_of(name: str, tool: graph.Tool) -> Schema:
    """Return the schema of a tool of an agent, whichever kind it is; its code is imported, and not run.

    Raises:
        ToolError: as :func:`tool_schema`; or the import fails, a class lacks ``execute``, ``kwargs`` do not fit.
    """
    return bind(name, tool).schema


def validate_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's ``arguments`` as ``function`` takes them (dicts become dataclasses and so on).

    Raises:
        BadArguments: they do not fit; says which, what was got and what is expected, for the model to read.
        ToolError: the function cannot be a tool.
    """
    return parameters_of(function, where=_where(function)).read(arguments)


def _where(function: Callable[..., Any]) -> str:
    return f"tool function '{getattr(function, '__qualname__', type(function).__qualname__)}'"
