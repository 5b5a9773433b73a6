"""Tool calls as models write them.

Invariant: what :data:`WRITERS` write, the ``parse`` of the format gives again; other formats have their calls written
by a chat template (:func:`calls_of_template`). A broken call is reported by its format as a problem, or has arguments
that no schema of the tools takes. What :func:`arguments` draws follows a tool's JSON schema; what :func:`spoiled` draws
breaks it in one way that it names. Only the keywords that this package's own schemas use are understood; a ``pattern``
and formats are drawn as Hypothesis can.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hypothesis import strategies as st

from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.trajectory.events import PlainData as Data
from fsm_rollout.trajectory.settings import MOST

Schema = Mapping[str, Any]

# Texts that tool formats have trouble with, simplest first.
WORDS = ("", "a", "4", "yes", "(37 + 58) * 4", "two words", "é 漢字 🙂", "line\nbreak", '"quoted"', "<b>")
_CHARACTERS = st.characters(codec="utf-8", exclude_categories=["Cc"])
plain_texts = st.sampled_from(WORDS) | st.text(_CHARACTERS, max_size=12)


def plain_data(
    texts: st.SearchStrategy[str], numbers: st.SearchStrategy[float], max_leaves: int
) -> st.SearchStrategy[Any]:
    """Return a strategy for plain data: what JSON and YAML can hold."""
    return st.recursive(
        st.none() | st.booleans() | numbers | texts,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
        max_leaves=max_leaves,
    )


_ANYTHING = plain_data(plain_texts, st.integers(-99, 99), max_leaves=3)
# A value that is not of the type, however leniently it is read.
_WRONG: Mapping[str, object] = {
    "string": [5],
    "integer": "no number",
    "number": "no number",
    "boolean": "neither",
    "array": {"not": "a list"},
    "object": "no object",
    "null": "something",
}
_FORMATS: Mapping[str, st.SearchStrategy[str]] = {
    "date": st.dates().map(str),
    "date-time": st.datetimes().map(lambda moment: moment.isoformat()),
    "time": st.times().map(str),
    "uuid": st.uuids().map(str),
}


def arguments(parameters: Schema) -> st.SearchStrategy[dict[str, object]]:
    """Draw the arguments of a call from the ``parameters`` of a tool's schema."""
    return _object(parameters, parameters.get("$defs", {}))


def spoiled(parameters: Schema) -> st.SearchStrategy[tuple[str, dict[str, object]]]:
    """Draw arguments that break the schema, each with what is wrong: a name too many, one missing, a wrong type."""
    good = arguments(parameters)

    def without(name: str) -> st.SearchStrategy[tuple[str, dict[str, object]]]:
        return good.map(lambda args: (f"'{name}' is missing", {k: v for k, v in args.items() if k != name}))

    def with_value(name: str, value: object, what: str) -> st.SearchStrategy[tuple[str, dict[str, object]]]:
        return good.map(lambda args: (f"'{name}' {what}", args | {name: value}))

    ways = [with_value("no_such_parameter", 1, "is no parameter"), *map(without, parameters.get("required", ()))]
    for name, schema in parameters.get("properties", {}).items():
        wrong = _WRONG.get(schema.get("type", ""))
        if wrong is not None:
            ways.append(with_value(name, wrong, "is of another type"))
    return st.one_of(ways)


def _value(schema: Schema | bool, defs: Schema) -> st.SearchStrategy[object]:
    if isinstance(schema, bool) or not schema:
        return _ANYTHING
    if "$ref" in schema:
        target = defs[schema["$ref"].rpartition("/")[2]]
        return st.deferred(lambda: _value(target, defs))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(list(schema["enum"]))
    if branches := schema.get("anyOf", schema.get("oneOf")):
        # The first branch that is no reference ends a type that holds itself.
        return st.one_of([_value(branch, defs) for branch in sorted(branches, key=lambda branch: "$ref" in branch)])
    match schema.get("type"):
        case [*kinds]:
            return st.one_of([_value({**schema, "type": kind}, defs) for kind in kinds])
        case "string":
            return _text(schema)
        case "integer" | "number":
            return _number(schema)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array" if "prefixItems" in schema:
            return st.tuples(*(_value(item, defs) for item in schema["prefixItems"])).map(list)
        case "array":
            least = schema.get("minItems", 0)
            return st.lists(
                _value(schema.get("items", True), defs),
                min_size=least,
                max_size=schema.get("maxItems", least + 3),
                unique_by=repr if schema.get("uniqueItems") else None,
            )
        case "object":
            return _object(schema, defs)
        case _:
            return _ANYTHING


def _object(schema: Schema, defs: Schema) -> st.SearchStrategy[dict[str, object]]:
    properties: Schema = schema.get("properties", {})
    if not properties and schema.get("additionalProperties", False) is not False:
        return st.dictionaries(plain_texts, _value(schema["additionalProperties"], defs), max_size=2)
    drawn = {name: _value(value, defs) for name, value in properties.items()}
    required = {name: drawn.pop(name) for name in schema.get("required", ()) if name in drawn}
    return st.fixed_dictionaries(required, optional=drawn)


def _text(schema: Schema) -> st.SearchStrategy[str]:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if "pattern" in schema:
        # A `$` is the end in JSON schemas; in Python it may stand before a last line break as well.
        ends = "$" in schema["pattern"]
        texts: st.SearchStrategy[str] = st.from_regex(str(schema["pattern"]))
        longest = math.inf if most is None else most
        return texts.filter(lambda text: least <= len(text) <= longest and not (ends and text.endswith("\n")))
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]]
    if not least and most is None:
        return plain_texts
    return st.text(_CHARACTERS, min_size=least, max_size=max(12, least) if most is None else most)


def _number(schema: Schema) -> st.SearchStrategy[float]:
    """Draw numbers; integers stay within what a journal can hold (a turn reads no others)."""
    whole = schema["type"] == "integer"
    excluded = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    low = schema.get("exclusiveMinimum", schema.get("minimum"))
    high = schema.get("exclusiveMaximum", schema.get("maximum"))
    if whole or "multipleOf" in schema or low is high is None:
        most = MOST if whole else 1e6
        low, high = -most if low is None else low, most if high is None else high
    if "multipleOf" in schema:
        step = schema["multipleOf"]
        counts = st.integers(math.ceil(low / step), math.floor(high / step))
        return counts.map(lambda count: count * step).filter(lambda n: low <= n <= high and n not in excluded)
    if whole:
        return st.integers(math.ceil(low), math.floor(high)).filter(lambda n: n not in excluded)
    return st.floats(low, high, allow_nan=False, allow_infinity=False).filter(lambda n: n not in excluded)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tagged(values: Mapping[str, object], pattern: str) -> str:
    return "".join(pattern.format(key, v if isinstance(v, str) else _json(v)) for key, v in values.items())


_PARAMETER = "<parameter={}>\n{}\n</parameter>\n"
_ARGUMENT = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
# The built-in formats that can be written; `name, arguments → text`.
WRITERS: dict[str, Callable[[str, dict[str, object]], str]] = {
    "hermes": lambda name, values: f"<tool_call>\n{_json({'name': name, 'arguments': values})}\n</tool_call>",
    "qwen3_coder": lambda name, values: (
        f"<tool_call>\n<function={name}>\n{_tagged(values, _PARAMETER)}</function>\n</tool_call>"
    ),
    "glm": lambda name, values: f"<tool_call>{name}\n{_tagged(values, _ARGUMENT)}</tool_call>",
    "llama3_json": lambda name, values: _json({"name": name, "parameters": values}),
    "mistral": lambda name, values: f"[TOOL_CALLS]{name}[ARGS]{_json(values)}",
}


def calls_of_template(
    tokenizer: Any, tools: Sequence[object], calls: Sequence[tuple[str, Mapping[str, object]]]
) -> str:
    """Return calls (name, arguments) as a template writes them; ChatTemplateError ``no-tool-calls``: it does not."""

    def render(messages: Sequence[object], opened: bool) -> str:
        options: Data = {"tools": list(tools), "tokenize": False, "add_generation_prompt": opened}
        return str(tokenizer.apply_chat_template(list(messages), **options))

    question = {"role": "user", "content": "?"}
    listed = [
        {"id": f"c{index:08d}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": "", "tool_calls": listed}
    before, after = render([question], True), render([question, answer], False)
    text = after.removeprefix(before) if after.startswith(before) else ""
    text = text.rstrip().removesuffix(str(tokenizer.eos_token or "")).rstrip()
    for name, _ in calls:
        if name not in text:
            raise ChatTemplateError("no-tool-calls", f"the chat template writes no call of {name!r} after the prompt")
    return text


def _function(tool: Schema) -> tuple[str, Schema]:
    function = tool.get("function", tool)
    return str(function["name"]), function.get("parameters", {})


def tool_calls(tool: Schema, tool_format: str = "hermes") -> st.SearchStrategy[str]:
    """Return a strategy for well-formed calls of a tool, with arguments that its schema takes.

    Args:
        tool: an OpenAI schema, as ``tool_schema`` makes them.
        tool_format: a name of :data:`WRITERS`.
    """
    name, parameters = _function(tool)
    return arguments(parameters).map(partial(WRITERS[tool_format], name))


@st.composite
def broken_calls(draw: st.DrawFn, tools: Sequence[Schema], tool_format: str = "hermes") -> str:
    """Draw a call that something is wrong with: an unknown tool, arguments that do not fit, or a text cut short."""
    write = WRITERS[tool_format]
    name, parameters = _function(draw(st.sampled_from(list(tools))))
    values = draw(arguments(parameters))
    match draw(st.sampled_from(["unknown tool", "unknown argument", "missing arguments", "cut short"])):
        case "unknown tool":
            return write(f"no_{name}", values)
        case "unknown argument":
            return write(name, {**values, "no_such_argument": 1})
        case "missing arguments" if parameters.get("required"):
            return write(name, {})
        case _:
            text = write(name, values)
            return text[: draw(st.integers(len(text) // 2, len(text) - 1))]
