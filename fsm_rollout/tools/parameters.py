"""A function's parameters: what of them a model is shown, and what a model may fill in.

Invariant: what is shown and what is accepted come from one pydantic model, built from the signature, so a call that
follows the schema is never refused for its form. Arguments are read as JSON is read leniently ("3" is 3, and so is
3.0); nothing is lost on the way (3.5 is no int), nothing unknown is accepted.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from fsm_rollout.errors import BadArguments, ToolError, did_you_mean
from fsm_rollout.tools.base import Hidden, ToolContext, fresh
from fsm_rollout.tools.json_schema import Schema, tidy

MOST_PROBLEMS = 5
"""Wrong arguments named in one answer."""
LONGEST_VALUE = 80
"""Characters of a wrong value that are repeated to the model."""

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_NO_OBJECT = ("dict_type", "model_type", "model_attributes_type", "dataclass_type")
_EMPTY = inspect.Parameter.empty


class _Generate(GenerateJsonSchema):
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # pydantic's own form


class Parameters:
    """The parameters of ``function``, sorted into those for the model and those for others.

    ``hidden`` names further parameters that the model does not fill in. ``method`` says that the first parameter is
    ``self``. ``where`` begins every message.

    Raises:
        ToolError: the function cannot be shown to a model; says which parameter, why, and what to try.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        where: str,
        hidden: Collection[str] = (),
        method: bool = False,
    ) -> None:
        self._where = where
        self.contexts: list[str] = []
        """Parameters that get the ToolContext."""
        self.hidden: list[str] = []
        """Parameters that ``kwargs`` and ``tools_kwargs`` fill."""
        self.needed: list[str] = []
        """Those of ``hidden`` that have no default."""
        self.takes_any = False
        """Whether there is a ``**kwargs``, which takes any further hidden values."""
        self.documentation = inspect.getdoc(_documented(function)) or ""
        parsed = docstring_parser.parse(self.documentation)
        self.description = (parsed.description or "").strip()
        described = {p.arg_name.lstrip("*"): " ".join((p.description or "").split()) for p in parsed.params}
        shown: dict[str, tuple[Any, Any]] = {}
        signature = list(_signature(function, where).values())[method:]
        for parameter in signature:
            name = parameter.name
            if parameter.kind is parameter.VAR_KEYWORD:
                self.takes_any = True
                continue
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise ToolError(f"{where}: *{name}: a model names its arguments; take a list instead")
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ToolError(
                    f"{where}: '{name}' is positional-only, but arguments are passed by name; remove the '/'"
                )
            hint = None if name in hidden else self._hint(function, parameter)
            if _is_context(hint):
                self.contexts.append(name)
            elif name in hidden or _is_hidden(hint):
                self.hidden.append(name)
                if parameter.default is _EMPTY:
                    self.needed.append(name)
            else:
                about: dict[str, Any] = {"description": described[name]} if described.get(name) else {}
                if parameter.default is not _EMPTY:
                    about["default"] = parameter.default
                shown[name] = (hint, Field(alias=name, **about))
        names = [parameter.name for parameter in signature]
        for name in described:
            if name not in names:
                raise ToolError(
                    f"{where}: the docstring describes '{name}', which is no parameter{did_you_mean(name, names)}"
                )
        for name in hidden:
            if name not in self.hidden and not self.takes_any:
                raise ToolError(f"{where}: '{name}' is given by kwargs but is no parameter{did_you_mean(name, names)}")
        self.names = tuple(shown)
        self._model, self.schema = self._build(shown)

    def _hint(self, function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
        name, annotation = parameter.name, parameter.annotation
        if annotation is _EMPTY:
            raise ToolError(f"{self._where}: '{name}' has no type; annotate it, as in `{name}: str`")
        try:
            return _type_of(function, parameter)
        except Exception as error:  # evaluating source text can raise anything
            raise ToolError(
                f"{self._where}: '{name}': the annotation {annotation!r} cannot be resolved "
                f"({type(error).__name__}: {error}); import the type at the top of the module, not under TYPE_CHECKING"
            ) from error

    def _build(self, shown: Mapping[str, tuple[Any, Any]]) -> tuple[type[BaseModel], Schema]:
        # Fields are numbered and the real names are aliases: a parameter may be called `_x`, `schema` or `copy`, which
        # pydantic's own attributes forbid.
        fields: dict[str, Any] = {f"p{index}": field for index, field in enumerate(shown.values())}
        try:
            model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
            schema = tidy(model.model_json_schema(schema_generator=_Generate))
        except Exception as error:  # not only pydantic's: types bring their own hooks
            raise self._blame(shown, error) from error
        schema.pop("additionalProperties")  # true of every tool, and nobody's training data shows it
        return model, schema

    def _blame(self, shown: Mapping[str, tuple[Any, Any]], error: Exception) -> ToolError:
        """Find the parameter whose type pydantic cannot handle."""
        culprit, at_fault = error, ", ".join(shown)
        for name, (hint, _) in shown.items():
            try:
                TypeAdapter(hint).json_schema(schema_generator=_Generate)
            except Exception as found:
                culprit, at_fault = found, name
                break
        text = culprit.message if isinstance(culprit, PydanticUserError) else str(culprit)
        reason = text.partition("\n")[0].partition(". ")[0].rstrip(".")
        return ToolError(
            f"{self._where}: '{at_fault}': its type cannot be shown to a model: {reason}. "
            "Use JSON's types, Literal, an enum, a dataclass or a pydantic model, or hide it: Annotated[…, Hidden]"
        )

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the function takes them; defaults are left to the function.

        Raises:
            BadArguments: they do not fit; the message is meant for a model.
        """
        try:
            # A copy: a tool that changes its arguments must not change the record of the call.
            model = self._model.model_validate(fresh(arguments))
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
            raise BadArguments(_explain(problems, arguments, self.names)) from None
        fields = zip(type(model).model_fields, self.names, strict=True)
        return {name: getattr(model, field) for field, name in fields if field in model.model_fields_set}


def parameters_of(
    function: Callable[..., Any], *, where: str, hidden: Collection[str] = (), method: bool = False
) -> Parameters:
    """Return the parameters of a function, found out once: a pydantic model takes a millisecond to build.

    Raises:
        ToolError: as :class:`Parameters`.
    """
    build = _remembered if isinstance(function, Hashable) else _build
    return build(function, where, frozenset(hidden), method)


def _build(function: Callable[..., Any], where: str, hidden: frozenset[str], method: bool) -> Parameters:
    return Parameters(function, where=where, hidden=hidden, method=method)


_remembered = functools.lru_cache(maxsize=256)(_build)


def context_parameters(function: Callable[..., Any], where: str) -> list[str]:
    """Return the names of the parameters of any function that are annotated as ToolContext."""

    def asks(parameter: inspect.Parameter) -> bool:
        try:
            return _is_context(_type_of(function, parameter))
        except Exception:  # the other parameters of such a function need no types that can be resolved
            return False

    return [name for name, parameter in _signature(function, where).items() if asks(parameter)]


def _is_context(hint: Any) -> bool:
    return hint is ToolContext or ToolContext in get_args(hint)


def _is_hidden(hint: Any) -> bool:
    return get_origin(hint) is Annotated and any(note is Hidden or isinstance(note, Hidden) for note in get_args(hint))


def _type_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return a parameter's type, looked up where the function was written; raises what looking it up raises."""
    holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    scope = getattr(inspect.unwrap(_code(function)), "__globals__", {})
    return get_type_hints(holder, scope, include_extras=True)[parameter.name]


def _signature(function: Callable[..., Any], where: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ToolError(f"{where}: its signature cannot be read ({error}); wrap it in a typed function") from error


def _code(function: Any) -> Any:
    """Return what holds the source of a callable: a partial's function, an object's ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _documented(function: Any) -> Any:
    """Return what holds a callable's docstring; an object with ``__call__`` may have it on either."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function):
        return function
    return function.__call__ if inspect.getdoc(type(function).__call__) != object.__call__.__doc__ else type(function)


def _explain(problems: Sequence[ErrorDetails], arguments: Mapping[str, Any], names: Collection[str]) -> str:
    """Say in one line which arguments are wrong, what was got and what is expected."""
    told: dict[str, list[str]] = {}
    got: dict[str, str] = {}
    for problem in problems:
        path, value = _place(problem["loc"], arguments)
        message = problem["msg"].removeprefix("Input ").removeprefix("Value error, ")
        if problem["type"] == "missing":
            path = f"{path}.{problem['loc'][-1]}" if path else str(problem["loc"][-1])
            message = "is missing"
        elif problem["type"] in _UNKNOWN:
            message = "is not a parameter"
            if len(problem["loc"]) == 1:
                message += did_you_mean(path, names) if names else "; there are none"
        else:
            if problem["type"] in _NO_OBJECT:  # pydantic speaks of Python's types
                message = "should be an object"
            got[path] = f" (got {_shown(value)})"
        if message not in told.setdefault(path, []):
            told[path].append(message)
    lines = [f"argument '{path}' {' or '.join(messages)}{got.get(path, '')}" for path, messages in told.items()]
    more = f"; and {len(lines) - MOST_PROBLEMS} more" if len(lines) > MOST_PROBLEMS else ""
    return "; ".join(lines[:MOST_PROBLEMS]) + more


def _place(location: Sequence[int | str], arguments: Any) -> tuple[str, Any]:
    """Follow an error's location into what the model wrote, past pydantic's names for branches of a union."""
    path = ""
    value: Any = arguments
    for part in location:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
            path += f".{part}" if path else str(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
            path += f"[{part}]"
    return path, value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"
