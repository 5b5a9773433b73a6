"""Tool calls as models write them: the text that each tool format reads back.

Invariant: for every built-in format, ``parse(call_text(…))`` gives the call again, where the tool's schema says its
types. A format without a writer here has its calls written by a chat template (:func:`call_text_of_template`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsm_rollout.errors import ChatTemplateError


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _unquoted(value: object) -> str:
    return value if isinstance(value, str) else _dumps(value)


def _hermes(name: str, arguments: Mapping[str, object]) -> str:
    return f'<tool_call>\n{{"name": {_dumps(name)}, "arguments": {_dumps(dict(arguments))}}}\n</tool_call>'


def _qwen3_coder(name: str, arguments: Mapping[str, object]) -> str:
    values = "".join(f"<parameter={key}>\n{_unquoted(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _glm(name: str, arguments: Mapping[str, object]) -> str:
    values = (f"<arg_key>{key}</arg_key>\n<arg_value>{_unquoted(v)}</arg_value>\n" for key, v in arguments.items())
    return f"<tool_call>{name}\n{''.join(values)}</tool_call>"


def _llama3_json(name: str, arguments: Mapping[str, object]) -> str:
    return f'{{"name": {_dumps(name)}, "parameters": {_dumps(dict(arguments))}}}'


def _mistral(name: str, arguments: Mapping[str, object]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{_dumps(dict(arguments))}"


WRITERS: dict[str, Callable[[str, Mapping[str, object]], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "glm": _glm,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
}
"""The built-in formats that can be written; ``name, arguments → text``."""


def call_text(tool_format: str, name: str, arguments: Mapping[str, object]) -> str:
    """Return one call of the tool ``name`` as a model would write it.

    Raises:
        ChatTemplateError: ``unknown-tool-format``: nothing here writes it.
    """
    if tool_format not in WRITERS:
        known = ", ".join(WRITERS)
        raise ChatTemplateError(
            "unknown-tool-format", f"no writer of calls for {tool_format!r} (known: {known}); let a template write them"
        )
    return WRITERS[tool_format](name, arguments)


def call_text_of_template(tokenizer: Any, tools: Sequence[object], name: str, arguments: Mapping[str, object]) -> str:
    """Return one call as the tokenizer's own chat template writes it: what an assistant message with it adds.

    Raises:
        ChatTemplateError: ``no-tool-calls``: the template does not write calls.
    """
    asked = [{"role": "user", "content": "?"}]
    call = {"id": "c00000000", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}

    def render(messages: Sequence[object], opened: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=list(tools), tokenize=False, add_generation_prompt=opened
            )
        )

    before, after = render(asked, True), render([*asked, said], False)
    text = after.removeprefix(before) if after.startswith(before) else ""
    eos = str(tokenizer.eos_token or "")
    text = text.rstrip().removesuffix(eos).rstrip()
    if name not in text:
        raise ChatTemplateError("no-tool-calls", f"the chat template does not write the call of {name!r}")
    return text
