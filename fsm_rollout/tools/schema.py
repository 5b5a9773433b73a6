"""From a Python function to the schema that a model is shown, and from a model's arguments back to the function's.

Invariant: what is shown and what is accepted come from one TypedDict, built from the signature, so a call that follows
the schema is never refused for its form. Building it runs none of the tool. Arguments are read as JSON is read
leniently ("3" is 3, and so is 3.0); nothing is lost on the way (3.5 is no int), nothing unknown is accepted.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from types import SimpleNamespace
from typing import Annotated, Any, TypeAlias, cast, get_args, get_origin, get_type_hints

import docstring_parser
import typing_extensions
from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError, with_config
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails, PydanticSerializationError, to_jsonable_python

from fsm_rollout.errors import BadArguments, ToolError, did_you_mean
from fsm_rollout.tools.base import Hidden, ToolContext, fresh

Schema: TypeAlias = dict[str, Any]
Function: TypeAlias = Callable[..., object]
Arguments: TypeAlias = dict[str, Any]
"""A call's arguments, by name."""

MOST_PROBLEMS = 5
"""Wrong arguments named in one answer."""
LONGEST_VALUE = 80
"""Characters of a wrong value that are repeated to the model."""

_NO_OBJECT = ("dict_type", "model_type", "model_attributes_type", "dataclass_type")
"""pydantic's errors that speak of Python's types where a model should read "object"."""
_EMPTY = inspect.Parameter.empty


def tool_schema(
    function: Function, *, name: str | None = None, description: str | None = None, hidden: Collection[str] = ()
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
    parameters = parameters_of(function, where=_where(function), hidden=hidden)
    return parameters.tool(name or str(getattr(function, "__name__", type(function).__name__)), description)


def validate_arguments(function: Function, arguments: Mapping[str, object]) -> Arguments:
    """Return a model's ``arguments`` as ``function`` takes them (dicts become dataclasses and so on).

    Raises:
        BadArguments: they do not fit; says which, what was got and what is expected, for the model to read.
        ToolError: the function cannot be a tool.
    """
    return parameters_of(function, where=_where(function)).read(arguments)


def parameters_of(function: Function, *, where: str, hidden: Collection[str] = (), method: bool = False) -> Parameters:
    """Return the parameters of a function, found out once: building a validator takes a millisecond.

    Raises:
        ToolError: as :class:`Parameters`.
    """
    build = _remembered if isinstance(function, Hashable) else Parameters
    return build(function, where, frozenset(hidden), method)


class Parameters:
    """The parameters of ``function``, sorted into those for the model and those for others.

    ``hidden`` names further parameters that the model does not fill in. ``method`` says that the first parameter is
    ``self``. ``where`` begins every message.

    Raises:
        ToolError: the function cannot be shown to a model; says which parameter, why, and what to try.
    """

    def __init__(self, function: Function, where: str, hidden: Collection[str] = (), method: bool = False) -> None:
        self._where = where
        self.contexts: list[str] = []
        """Parameters that get the ToolContext."""
        self.hidden: list[str] = []
        """Parameters that ``kwargs`` and ``tools_kwargs`` fill."""
        self.required: list[str] = []
        """Those of ``hidden`` that have no default."""
        self.takes_any = False
        """Whether there is a ``**kwargs``, which takes any further hidden values."""
        docstring = docstring_parser.parse(inspect.getdoc(_documented(function)) or "")
        self.description = (docstring.description or "").strip()
        described = {p.arg_name.lstrip("*"): " ".join((p.description or "").split()) for p in docstring.params}
        signature = list(_signature(function, where).values())[method:]
        # 1. Each parameter is the model's, the ToolContext, or hidden.
        shown: dict[str, object] = {}
        for parameter in signature:
            name = parameter.name
            match parameter.kind:
                case inspect.Parameter.VAR_KEYWORD:
                    self.takes_any = True
                    continue
                case inspect.Parameter.VAR_POSITIONAL:
                    raise ToolError(f"{where}: *{name}: a model names its arguments; take a list instead")
                case inspect.Parameter.POSITIONAL_ONLY:
                    raise ToolError(
                        f"{where}: '{name}' is positional-only, but arguments are passed by name; remove the '/'"
                    )
            hint = None if name in hidden else self._hint(function, parameter)
            if _is_context(hint):
                self.contexts.append(name)
            elif name in hidden or _is_hidden(hint):
                self.hidden.append(name)
                if parameter.default is _EMPTY:
                    self.required.append(name)
            else:
                shown[name] = _field(hint, parameter.default, described.get(name))
        # 2. What the docstring describes and what `kwargs` give must be there.
        names = [parameter.name for parameter in signature]
        for name in described:
            if name not in names:
                raise ToolError(
                    f"{where}: the docstring describes '{name}', which is no parameter{did_you_mean(name, names)}"
                )
        for name in hidden:
            if name not in self.hidden and not self.takes_any:
                raise ToolError(f"{where}: '{name}' is given by kwargs but is no parameter{did_you_mean(name, names)}")
        # 3. One compiled validator reads the model's arguments; the schema is its own.
        self.names = tuple(shown)
        self._validator, self.schema = self._build(shown)

    def tool(self, name: str, description: str | None = None) -> Schema:
        """Return the schema of a tool with these parameters.

        Raises:
            ToolError: nothing says what the tool does. A model can only guess what such a tool is for.
        """
        description = description or self.description
        if not description:
            raise ToolError(
                f"{self._where}: it has no docstring to tell the model what it does; write one, or a `description`"
            )
        function = {"name": name, "description": description, "parameters": deepcopy(self.schema)}
        return {"type": "function", "function": function}

    def read(self, arguments: Mapping[str, object]) -> Arguments:
        """Return the arguments as the function takes them; defaults are left to the function.

        Raises:
            BadArguments: they do not fit; the message is meant for a model.
        """
        try:
            # A copy: a tool that changes its arguments must not change the record of the call.
            return self._validator.validate_python(fresh(arguments))
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
            raise BadArguments(_explain(problems, arguments, self.names)) from None

    def _hint(self, function: Function, parameter: inspect.Parameter) -> object:
        name, annotation = parameter.name, parameter.annotation
        if annotation is _EMPTY:
            raise ToolError(f"{self._where}: '{name}' has no type; annotate it, as in `{name}: str`")
        try:
            return _type_of(function, parameter)
        except Exception as error:  # evaluating a user's annotation can raise anything
            raise ToolError(
                f"{self._where}: '{name}': the annotation {annotation!r} cannot be resolved "
                f"({type(error).__name__}: {error}); import the type at the top of the module, not under TYPE_CHECKING"
            ) from error

    def _build(self, shown: Mapping[str, object]) -> tuple[TypeAdapter[Arguments], Schema]:
        try:
            validator = _adapter(shown)
            schema = tidy(validator.json_schema(schema_generator=_Generate))
        except Exception as error:  # not only pydantic's: types bring their own hooks
            raise self._blame(shown, error) from error
        schema.pop("additionalProperties")  # true of every tool, and no training data shows it
        return validator, schema

    def _blame(self, shown: Mapping[str, object], error: Exception) -> ToolError:
        """Find the parameter whose type pydantic cannot handle."""
        culprit, name = error, ", ".join(shown)
        for parameter, field in shown.items():
            try:
                _adapter({parameter: field}).json_schema(schema_generator=_Generate)
            except Exception as alone:  # whatever the type's hooks raise
                culprit, name = alone, parameter
                break
        text = culprit.message if isinstance(culprit, PydanticUserError) else str(culprit)
        reason = text.partition("\n")[0].partition(". ")[0].rstrip(".")
        return ToolError(
            f"{self._where}: '{name}': its type cannot be shown to a model: {reason}. "
            "Use JSON's types, Literal, an enum, a dataclass or a pydantic model, or hide it: Annotated[…, Hidden]"
        )


_remembered = functools.lru_cache(maxsize=256)(Parameters)


class _Generate(GenerateJsonSchema):
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # pydantic's own form


def _adapter(fields: Mapping[str, object]) -> TypeAdapter[Arguments]:
    """Compile a validator of these fields. A TypedDict takes any name and returns only what was given."""
    build = cast("Callable[[str, Mapping[str, object]], type[Arguments]]", typing_extensions.TypedDict)
    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(build("Arguments", fields)))


def _field(hint: object, default: object, description: str | None) -> object:
    """Return the type of one argument; its default is shown, and filled in by the function itself."""
    notes: Schema = {"description": description} if description else {}
    if default is _EMPTY:
        return Annotated[hint, Field(**notes)]
    with suppress(PydanticSerializationError):  # a default without a JSON form is not shown
        notes["json_schema_extra"] = {"default": to_jsonable_python(default)}
    return typing_extensions.NotRequired[Annotated[hint, Field(**notes)]]


def context_parameters(function: Function, where: str) -> list[str]:
    """Return the names of the parameters of any function that are annotated as ToolContext."""

    def asks(parameter: inspect.Parameter) -> bool:
        try:
            return _is_context(_type_of(function, parameter))
        except Exception:  # the other parameters of such a function need no types that can be resolved
            return False

    return [name for name, parameter in _signature(function, where).items() if asks(parameter)]


def _where(function: Function) -> str:
    return f"tool function '{getattr(function, '__qualname__', type(function).__qualname__)}'"


def _is_context(hint: object) -> bool:
    return hint is ToolContext or ToolContext in get_args(hint)


def _is_hidden(hint: object) -> bool:
    return get_origin(hint) is Annotated and any(note is Hidden or isinstance(note, Hidden) for note in get_args(hint))


def _type_of(function: Function, parameter: inspect.Parameter) -> object:
    """Return a parameter's type, looked up where the function was written; raises what looking it up raises."""
    holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    target = _plain(function)
    source = target if inspect.isroutine(target) else type(target).__call__
    scope = getattr(inspect.unwrap(source), "__globals__", {})
    hint: object = get_type_hints(holder, scope, include_extras=True)[parameter.name]
    return hint


def _signature(function: Function, where: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ToolError(f"{where}: its signature cannot be read ({error}); wrap it in a typed function") from error


def _plain(function: Function) -> Function:
    """Return what a partial calls in the end."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _documented(function: Function) -> object:
    """Return what holds a callable's docstring; an object with ``__call__`` may have it on either."""
    function = _plain(function)
    if inspect.isroutine(function):
        return function
    own_call = inspect.getdoc(type(function).__call__) != object.__call__.__doc__
    return type(function).__call__ if own_call else type(function)


# A model's wrong arguments, in words.


def _explain(problems: Sequence[ErrorDetails], arguments: Mapping[str, object], names: Collection[str]) -> str:
    """Say in one line which arguments are wrong, what was got and what is expected."""
    messages: dict[str, list[str]] = {}
    got: dict[str, str] = {}
    for problem in problems:
        path, value = _follow(problem["loc"], arguments)
        message = problem["msg"].removeprefix("Input ").removeprefix("Value error, ")
        match problem["type"]:
            case "missing":
                path = f"{path}.{problem['loc'][-1]}" if path else str(problem["loc"][-1])
                message = "is missing"
            case "extra_forbidden" | "unexpected_keyword_argument":
                message = "is not a parameter"
                if len(problem["loc"]) == 1:
                    message += did_you_mean(path, names) if names else "; there are none"
            case kind:
                message = "should be an object" if kind in _NO_OBJECT else message
                text = json.dumps(value, ensure_ascii=False, default=repr)
                got[path] = f" (got {text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + '…'})"
        if message not in messages.setdefault(path, []):
            messages[path].append(message)
    lines = [f"argument '{path}' {' or '.join(texts)}{got.get(path, '')}" for path, texts in messages.items()]
    more = f"; and {len(lines) - MOST_PROBLEMS} more" if len(lines) > MOST_PROBLEMS else ""
    return "; ".join(lines[:MOST_PROBLEMS]) + more


def _follow(location: Sequence[int | str], arguments: Mapping[str, object]) -> tuple[str, object]:
    """Follow an error's location into what the model wrote, past pydantic's names for branches of a union."""
    path, value = "", cast(object, arguments)
    for part in location:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
            path += f".{part}" if path else str(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
            path += f"[{part}]"
    return path, value


# From pydantic's JSON schemas to those that models are shown.

_FIRST = ("$ref", "type", "enum", "items", "properties", "required")
_LAST = ("description", "default", "$defs")
_RANK = {key: rank for rank, key in enumerate((*_FIRST, None, *_LAST))}

# Where schemas stand in schemas. Everything under other keys (default, enum, const, examples) is data.
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
# `discriminator` is OpenAPI's, with references that inlining leaves dangling; oneOf says it too.
_DROPPED = ("title", "$defs", "discriminator")
_REFERENCE = re.compile(r'"\$ref": "#/\$defs/([^"]+)"')


def tidy(schema: Schema) -> Schema:
    """Return pydantic's ``schema`` as a model should see it. The input is not changed.

    References are inlined (a type that holds itself keeps its ``$ref`` and ``$defs``), the ``title`` that pydantic
    makes of every name goes, and keys stand in one order: what a value is, then what it is for. The meaning stays.
    """
    definitions: dict[str, Schema] = schema.get("$defs", {})
    reached = {name: set(_REFERENCE.findall(json.dumps(node))) for name, node in definitions.items()}
    for _ in definitions:  # each step reaches one reference further
        reached = {name: names.union(*(reached[other] for other in names)) for name, names in reached.items()}
    recursive = {name for name, names in reached.items() if name in names}
    kept: dict[str, object] = {}

    def clean(node: object) -> object:
        if not isinstance(node, dict):  # true and false are schemas too
            return node
        name = str(node["$ref"]).removeprefix("#/$defs/") if "$ref" in node else None
        if name is not None and name not in recursive:
            return clean(definitions[name] | {key: value for key, value in node.items() if key != "$ref"})
        if name is not None and name not in kept:
            kept[name] = {}  # before going in, where it is referred to again
            kept[name] = clean(definitions[name])
        cleaned: Schema = {}
        for key in sorted(node, key=lambda key: _RANK.get(key, _RANK[None])):
            value = node[key]
            if key in _DROPPED or (key == "additionalProperties" and value is True):  # true is the default
                continue
            if key in _MAPS:
                value = {name: clean(item) for name, item in value.items()}
            elif key in _LISTS:
                value = [clean(item) for item in value]
            elif key in _SINGLE:
                value = clean(value)
            cleaned[key] = value
        return cleaned

    result = cast(Schema, clean(schema))
    return result | {"$defs": kept} if kept else result
