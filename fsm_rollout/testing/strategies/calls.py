"""Tool calls as models write them.

Invariant: what :data:`WRITERS` write, the ``parse`` of the format gives again; other formats have their calls written
by a chat template (:func:`calls_of_template`). A broken call is reported by its format as a problem, or has arguments
that no schema of the tools takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hypothesis import strategies as st

from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.testing.strategies.schema_values import Schema, arguments
from fsm_rollout.trajectory.events import PlainData as Data


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
