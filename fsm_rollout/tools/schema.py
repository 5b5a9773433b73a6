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
from inspect import Parameter
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args, get_origin, get_type_hints

import docstring_parser
import typing_extensions
from pydantic import (
    ConfigDict,
    Field,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    with_config,
)
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails, PydanticSerializationError, to_jsonable_python

from fsm_rollout.errors import BadArguments, ToolError, did_you_mean
from fsm_rollout.tools.base import Hidden, ToolContext, ToolResult, fresh

Schema: TypeAlias = dict[str, Any]
Function: TypeAlias = Callable[..., object]
Arguments: TypeAlias = dict[str, Any]  # a call's arguments, by name

MOST_PROBLEMS = 5  # wrong arguments named in one answer
LONGEST_VALUE = 80  # characters of a wrong value that are repeated to the model


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
    """Return the parameters of a function, found out once: building a validator takes a millisecond."""
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
        self.contexts: list[str] = []  # parameters that get the ToolContext
        self.hidden: list[str] = []  # parameters that `kwargs` and `tools_kwargs` fill
        self.required: list[str] = []  # those of `hidden` that have no default
        self.takes_any = False  # whether there is a `**kwargs`, which takes any further hidden values
        docstring = docstring_parser.parse(inspect.getdoc(_documented(function)) or "")
        self.description = (docstring.description or "").strip()
        described = {p.arg_name.lstrip("*"): " ".join((p.description or "").split()) for p in docstring.params}
        signature = list(_signature(function, where).values())[method:]
        _check_returned(function, where)
        # 1. Each parameter is the model's, the ToolContext, or hidden.
        shown: dict[str, object] = {}
        for parameter in signature:
            name = parameter.name
            if parameter.kind is Parameter.VAR_KEYWORD:
                self.takes_any = True
                continue
            if parameter.kind is Parameter.VAR_POSITIONAL:
                raise ToolError(f"{where}: *{name}: a model names its arguments; take a list instead")
            if parameter.kind is Parameter.POSITIONAL_ONLY:
                raise ToolError(
                    f"{where}: '{name}' is positional-only, but arguments are passed by name; remove the '/'"
                )
            hint = None if name in hidden else _hint(function, parameter, where)
            if _is_context(hint):
                self.contexts.append(name)
            elif name in hidden or (get_origin(hint) is Annotated and any(map(_hides, get_args(hint)))):
                self.hidden.append(name)
                if parameter.default is Parameter.empty:
                    self.required.append(name)
            else:
                shown[name] = _field(hint, parameter.default, described.get(name))
        # 2. What the docstring describes and what `kwargs` give must be there.
        names = [parameter.name for parameter in signature]
        for name in described:
            if name not in names:
                hint = did_you_mean(name, names)
                raise ToolError(f"{where}: the docstring describes '{name}', which is no parameter{hint}")
        for name in hidden:
            if name not in self.hidden and not self.takes_any:
                raise ToolError(f"{where}: '{name}' is given by kwargs but is no parameter{did_you_mean(name, names)}")
        # 3. One compiled validator reads the model's arguments; the schema is its own.
        self.names = tuple(shown)
        try:
            self._validator = _adapter(shown)
            self.schema = tidy(self._validator.json_schema(schema_generator=_Generate))
        except Exception as error:  # not only pydantic's: types bring their own hooks
            raise _unshowable(shown, error, where) from error
        self.schema.pop("additionalProperties")  # true of every tool, and no training data shows it

    def tool(self, name: str, description: str | None = None) -> Schema:
        """Return the schema of a tool with these parameters; raise ToolError where nothing says what the tool does."""
        description = description or self.description
        if not description:
            raise ToolError(
                f"{self._where}: it has no docstring to tell the model what it does; write one, or a `description`"
            )
        function = {"name": name, "description": description, "parameters": deepcopy(self.schema)}
        return {"type": "function", "function": function}

    def read(self, arguments: Mapping[str, object]) -> Arguments:
        """Return the arguments as the function takes them (defaults are left to it), or raise BadArguments."""
        try:
            # A copy: a tool that changes its arguments must not change the record of the call.
            return self._validator.validate_python(fresh(arguments))
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
            raise BadArguments(_explain(problems, arguments, self.names)) from None


_remembered = functools.lru_cache(maxsize=256)(Parameters)


class _Generate(GenerateJsonSchema):
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # pydantic's own form


def _adapter(fields: Mapping[str, object]) -> TypeAdapter[Arguments]:
    """Compile a validator of these fields. A TypedDict takes any name and returns only what was given."""
    build = cast("Callable[[str, Mapping[str, object]], type[Arguments]]", typing_extensions.TypedDict)
    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(build("Arguments", fields)))


def _unshowable(shown: Mapping[str, object], error: Exception, where: str) -> ToolError:
    """Return an error that names the parameter whose type pydantic cannot handle."""
    name = ", ".join(shown)
    for parameter, field in shown.items():
        try:
            _adapter({parameter: field}).json_schema(schema_generator=_Generate)
        except Exception as alone:  # whatever the type's hooks raise
            error, name = alone, parameter
            break
    text = error.message if isinstance(error, PydanticUserError) else str(error)
    reason = text.partition("\n")[0].partition(". ")[0].rstrip(".")
    return ToolError(
        f"{where}: '{name}': its type cannot be shown to a model: {reason}. "
        "Use JSON's types, Literal, an enum, a dataclass or a pydantic model, or hide it: Annotated[…, Hidden]"
    )


def _field(hint: object, default: object, description: str | None) -> object:
    """Return the type of one argument; its default is shown, and filled in by the function itself."""
    notes: Schema = {"description": description} if description else {}
    if default is Parameter.empty:
        return Annotated[hint, Field(**notes)]
    with suppress(PydanticSerializationError):  # a default without a JSON form is not shown
        notes["json_schema_extra"] = {"default": to_jsonable_python(default)}
    return typing_extensions.NotRequired[Annotated[hint, Field(**notes)]]


# -- looking at functions -----------------------------------------------------------------------------------------


def context_parameters(function: Function, where: str) -> list[str]:
    """Return the names of the parameters of any function that are annotated as ToolContext."""
    names = []
    for name, parameter in _signature(function, where).items():
        with suppress(Exception):  # the other parameters of such a function need no types that can be resolved
            if _is_context(_type_of(function, parameter)):
                names.append(name)
    return names


def _check_returned(function: Function, where: str) -> None:
    """Raise ToolError for a declared return type of which no object can be made text."""
    annotation = inspect.signature(function).return_annotation
    if annotation is Parameter.empty:
        return
    with suppress(Exception):  # a type that cannot be looked up shows when something is returned
        annotation = _type_of(function, Parameter("returned", Parameter.KEYWORD_ONLY, annotation=annotation))
    if (kind := _opaque_class(annotation)) is not None:
        raise ToolError(
            f"{where}: what it returns cannot be shown to a model: {kind.__qualname__} has no JSON form. Return text, "
            "numbers, plain data, a dataclass, a pydantic model, or a ToolResult with the text"
        )


def _opaque_class(hint: object) -> type | None:
    """Return a class in a type whose objects have no JSON form, if there is one.

    Whatever a subclass may mend, an iterator gives or ``tolist`` makes plain passes.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Literal, Callable):
        return None
    for arg in args[:1] if origin is Annotated else args:
        if (part := _opaque_class(arg)) is not None:
            return part
    kind: object = origin or hint
    if not isinstance(kind, type) or kind in (ToolResult, UnionType, bytearray) or inspect.isabstract(kind):
        return None
    if getattr(kind, "_is_protocol", False) or hasattr(kind, "tolist") or hasattr(kind, "__next__"):
        return None
    try:
        TypeAdapter(kind)
    except PydanticSchemaGenerationError as error:
        return kind if f"for {kind}" in str(error) else None  # else a part of it, which may be an array
    except Exception:  # other hooks of a type's own
        return None
    return None


def _where(function: Function) -> str:
    return f"tool function '{getattr(function, '__qualname__', type(function).__qualname__)}'"


def _is_context(hint: object) -> bool:
    return hint is ToolContext or ToolContext in get_args(hint)


def _hides(note: object) -> bool:
    return note is Hidden or isinstance(note, Hidden)


def _hint(function: Function, parameter: Parameter, where: str) -> object:
    name, annotation = parameter.name, parameter.annotation
    if annotation is Parameter.empty:
        raise ToolError(f"{where}: '{name}' has no type; annotate it, as in `{name}: str`")
    try:
        return _type_of(function, parameter)
    except Exception as error:  # evaluating a user's annotation can raise anything
        raise ToolError(
            f"{where}: '{name}': the annotation {annotation!r} cannot be resolved ({type(error).__name__}: {error}); "
            "import the type at the top of the module, not under TYPE_CHECKING"
        ) from error


def _type_of(function: Function, parameter: Parameter) -> object:
    """Return a parameter's type, looked up where the function was written; raises what looking it up raises."""
    holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    target = _plain(function)
    source = target if inspect.isroutine(target) else type(target).__call__
    scope = getattr(inspect.unwrap(source), "__globals__", {})
    hint: object = get_type_hints(holder, scope, include_extras=True)[parameter.name]
    return hint


def _signature(function: Function, where: str) -> Mapping[str, Parameter]:
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


# -- a model's wrong arguments, in words --------------------------------------------------------------------------


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
                if kind in ("dict_type", "model_type", "model_attributes_type", "dataclass_type"):
                    message = "should be an object"  # where pydantic speaks of Python's types
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


# -- from pydantic's JSON schemas to those that models are shown --------------------------------------------------

# How keys are sorted: what a value is, all other keys, what it is for.
_ORDER = ("$ref", "type", "enum", "items", "properties", "required", None, "description", "default", "$defs")
# Where schemas stand in schemas. Everything under other keys (default, enum, const, examples) is data.
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_SCHEMAS = (
    "anyOf", "oneOf", "allOf", "prefixItems",
    "items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
)  # fmt: skip
# `discriminator` is OpenAPI's, with references that inlining leaves dangling; oneOf says it too.
_DROPPED = ("title", "$defs", "discriminator")


def tidy(schema: Schema) -> Schema:
    """Return pydantic's ``schema`` as a model should see it. The input is not changed.

    References are inlined (a type that holds itself keeps its ``$ref`` and ``$defs``), the ``title`` that pydantic
    makes of every name goes, and keys stand in one order. The meaning stays.
    """
    definitions: dict[str, Schema] = schema.get("$defs", {})
    reached = {
        name: set(re.findall(r'"\$ref": "#/\$defs/([^"]+)"', json.dumps(node))) for name, node in definitions.items()
    }
    for _ in definitions:  # each step reaches one reference further
        reached = {name: names.union(*(reached[other] for other in names)) for name, names in reached.items()}
    reached_defs: dict[str, object] = {}

    def clean(node: object) -> object:
        if isinstance(node, list):
            return [clean(item) for item in node]
        if not isinstance(node, dict):  # true and false are schemas too
            return node
        if "$ref" in node:
            name = str(node["$ref"]).removeprefix("#/$defs/")
            if name not in reached[name]:
                return clean(definitions[name] | {key: value for key, value in node.items() if key != "$ref"})
            if name not in reached_defs:
                reached_defs[name] = {}  # before going in, where it is referred to again
                reached_defs[name] = clean(definitions[name])
        cleaned: Schema = {}
        for key in sorted(node, key=lambda key: _ORDER.index(key if key in _ORDER else None)):
            value = node[key]
            if key in _DROPPED or (key == "additionalProperties" and value is True):  # true is the default
                continue
            if key in _MAPS:
                value = {name: clean(item) for name, item in value.items()}
            cleaned[key] = clean(value) if key in _SCHEMAS else value
        return cleaned

    result = cast(Schema, clean(schema))
    return result | {"$defs": reached_defs} if reached_defs else result
